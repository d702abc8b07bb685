"""What a task is, and what it draws its prompts from."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from sparsek_backend.eval.filler import endless
from sparsek_backend.eval.prompt import Draft, Tokenizer


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


@dataclass(frozen=True)
class Task:
    """A kind of prompt.

    Args:
        name: as users write it.
        about: what it asks, in a few words.
        draft: one prompt in words.
    """

    name: str
    about: str
    draft: Callable[[Source], Draft]
