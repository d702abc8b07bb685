"""What the command line asks for, checked before anything is opened."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from sparsek_backend.eval.perplexity import pick_texts, read_texts
from sparsek_backend.eval.prompt import Tokenizer, Variant
from sparsek_backend.eval.prompt_file import PromptSet
from sparsek_backend.eval.tasks import check_tasks, make_prompts
from sparsek_backend.models import fetch_texts

PROMPTS_ON_GPU, PROMPTS_ON_CPU = 100, 2


@dataclass(frozen=True)
class PromptOptions:
    """Which prompts and texts an evaluation has.

    Args:
        tasks, variants, lengths: of the retrieval prompts.
        prompts_per_task: of each task, variant and length; 0 skips retrieval.
        seed: of the prompts.
        texts: how many texts are scored for perplexity; 0 skips it.
        text_length: tokens of each.
        texts_folder: folder of `.txt` files; ``None`` fetches speeches.
    """

    tasks: tuple[str, ...]
    variants: tuple[Variant, ...]
    lengths: tuple[int, ...]
    prompts_per_task: int
    seed: int
    texts: int = 0
    text_length: int = 4096
    texts_folder: Path | None = None

    def __post_init__(self) -> None:
        check_tasks(self.tasks)
        if not self.prompts_per_task and not self.texts:
            raise ValueError("nothing to measure: --prompts-per-task 0 and --texts 0")
        if self.texts and self.texts_folder is not None:
            read_texts(self.texts_folder)  # a wrong folder is named before an engine starts

    def make(self, tokenizer: Tokenizer, details: dict[str, object]) -> PromptSet:
        """Make the prompts and pick the texts."""
        texts = []
        if self.texts:
            found = read_texts(self.texts_folder or fetch_texts())
            texts = pick_texts(found, tokenizer, length=self.text_length, count=self.texts)
        prompts = list(
            make_prompts(
                tokenizer,
                tasks=self.tasks,
                variants=self.variants,
                lengths=self.lengths,
                count=self.prompts_per_task,
                seed=self.seed,
            )
        )
        return PromptSet(prompts, texts, {"seed": self.seed, **details})


def default_prompts_per_task() -> int:
    """Enough for differences of a few points on a GPU, few enough for an hour on a CPU."""
    return PROMPTS_ON_GPU if torch.cuda.is_available() else PROMPTS_ON_CPU


def server_of(text: str) -> tuple[str, str]:
    """Label and URL of a server written as ``[LABEL=]URL``."""
    label, separator, url = text.partition("=")
    return (label, url) if separator and "/" not in label else (text, text)


def check_unique(name: str, values: Sequence[object]) -> None:
    """Refuse a value that is given twice."""
    for value in values:
        if values.count(value) > 1:
            raise ValueError(f"{name}: {value!r} is given twice")
