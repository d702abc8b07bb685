"""What a task draws its prompts from."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sparsek_backend.eval.filler import endless
from sparsek_backend.eval.prompt import Tokenizer


@dataclass(frozen=True)
class Source:
    """Seed, place and length from which a task makes one prompt.

    Args:
        seed: of the whole evaluation; pools that all prompts share depend on it alone.
        rng: this prompt's own.
        depth: where in the body the asked thing stands, 0 to 1; even over the prompts of a task.
        length: tokens of the prompt.
        tokenizer: the model's.
        prose: the pool of filler sentences.
    """

    seed: int
    rng: random.Random
    depth: float
    length: int
    tokenizer: Tokenizer
    prose: Sequence[str]

    def sentences(self) -> Iterator[str]:
        """Filler sentences without end."""
        return endless(self.rng, self.prose)
