"""The tokenizer of a Hugging Face folder, as the prompts need it."""

from __future__ import annotations

from typing import Any

from sparsek_backend.eval.prompt import Tokenizer, Tokens
from sparsek_backend.extras import needing
from sparsek_backend.models import check_model

_USER = "\u2063user words\u2063"  # stands for the user's words in a rendered chat template


class HubTokenizer(Tokenizer):
    """Text to token ids, as the model's own tokenizer does it.

    Args:
        model: a Hugging Face folder or name.
        chat: whether prompts are a user's turn of the chat template; ``None`` where there is one.

    Raises:
        ImportError: Transformers is not installed.
        ValueError: the model has no tokenizer, or ``chat`` asks for a template that it lacks.
    """

    def __init__(self, model: str, chat: bool | None = None) -> None:
        super().__init__()
        check_model(model)
        with needing("prompts need Transformers", extra="eval"):
            from transformers import AutoTokenizer
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(model)
            # from a config alone, Transformers makes a tokenizer without a vocabulary
            if not self._tokenizer.encode("a", add_special_tokens=False):
                raise ValueError("it encodes nothing")
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"model: expected a folder with a tokenizer, {model!r} has none that loads; make "
                "the prompts where there is one (`sparsek eval prompts MODEL --out FILE`) and give "
                "them with --prompts"
            ) from error
        self._tokenizer.model_max_length = 1 << 30  # texts are cut here, not there
        template = getattr(self._tokenizer, "chat_template", None)
        if chat and not template:
            raise ValueError(f"chat: expected a tokenizer with a chat template, {model!r} has none")
        self.chat = bool(template) if chat is None else chat

    def read(self, text: str, *, special: bool = False) -> Tokens:
        """Token ids as the tokenizer finds them."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=special))

    def frame(self) -> tuple[Tokens, Tokens]:
        """Tokens before and after a user's words, by the chat template where it is asked for.

        Raises:
            ValueError: the template fails, or leaves the words out.
        """
        if not self.chat:
            return super().frame()
        turn = [{"role": "user", "content": _USER}]
        render = self._tokenizer.apply_chat_template
        try:
            text = render(turn, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a model's own code
            raise ValueError(f"chat: the model's template fails ({error}); try --raw") from error
        before, words, after = text.partition(_USER)
        if not words:
            raise ValueError("chat: the model's template leaves a user's words out; try --raw")
        return self.encode(before), self.encode(after)

    def decode(self, tokens: Tokens) -> str:
        """The text of token ids."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))
