"""Requests of a load: made-up chats, or questions about long documents."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

FIRST_TOKEN_ID = 100
"""Prompts draw token ids from here on: the lowest are special tokens."""
MIXES = ("sharegpt", "documents")


@dataclass(frozen=True)
class Lengths:
    """Tokens of one request."""

    prompt: int
    output: int


def draw_lengths(mix: str, count: int, document_tokens: int, seed: int) -> list[Lengths]:
    """Return the lengths of ``count`` requests.

    ``sharegpt`` has the heavy tails of ShareGPT's conversations: log-normal, with medians of 130
    prompt and 150 output tokens.  ``documents`` has prompts of ``document_tokens``, a quarter more
    or less, and answers with a median of 128 tokens.

    Raises:
        ValueError: an unknown mix, or a count or size below 1.
    """
    if mix not in MIXES:
        raise ValueError(f"mix: expected one of {', '.join(MIXES)}, got {mix!r}")
    for name, value in (("num_requests", count), ("document_tokens", document_tokens)):
        if value < 1:
            raise ValueError(f"{name}: expected at least 1, got {value}")
    draw = random.Random(seed)
    if mix == "sharegpt":
        return [
            Lengths(_log_normal(draw, 130, 1.1, 4, 2048), _log_normal(draw, 150, 0.9, 4, 1024))
            for _ in range(count)
        ]
    return [
        Lengths(
            max(1, round(document_tokens * draw.uniform(0.75, 1.25))),
            _log_normal(draw, 128, 0.5, 16, 512),
        )
        for _ in range(count)
    ]


def longest(lengths: list[Lengths]) -> int:
    """Return the tokens of the longest request, with room for a tokenizer's special ones."""
    return max(one.prompt + one.output for one in lengths) + 16


def write_prompts(
    path: Path,
    lengths: list[Lengths],
    vocab_size: int,
    decode: Callable[[list[int]], str],
    seed: int,
) -> None:
    """Write random prompts of these lengths, as `vllm bench serve` reads a custom dataset.

    Args:
        path: a .jsonl file.
        lengths: of the requests, in order.
        vocab_size: token ids are below it.
        decode: the tokenizer's; a prompt is as long as its text becomes in tokens again.
        seed: another one gives prompts that share no prefix with these.
    """
    draw = random.Random(seed)
    with path.open("w", encoding="utf-8") as file:
        for one in lengths:
            text = decode(draw.choices(range(FIRST_TOKEN_ID, vocab_size), k=one.prompt))
            file.write(json.dumps({"prompt": text, "output_tokens": one.output}) + "\n")


def write_number_tokenizer(folder: Path, vocab_size: int) -> None:
    """Give a shape without weights a tokenizer: token 123 is the word "123".

    Token 0, which no prompt has, is a long word: vLLM refuses text with more characters than tokens
    of its longest word would have, and words of six digits come with a blank between.
    """
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = {"<unknown>": 0, **{str(index): index for index in range(1, vocab_size)}}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unknown>").save_pretrained(
        folder
    )


def _log_normal(draw: random.Random, median: float, sigma: float, low: int, high: int) -> int:
    return min(max(round(draw.lognormvariate(math.log(median), sigma)), low), high)
