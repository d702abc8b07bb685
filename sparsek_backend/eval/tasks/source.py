"""What a task draws its prompts from."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sparsek_backend.eval.filler import endless
from sparsek_backend.eval.prompt import Tokenizer


@dataclass(frozen=True)
class Source:
    """Seed, place and length from which a task makes one prompt."""

    seed: int  # of the whole evaluation; pools that all prompts share depend on it alone
    rng: random.Random  # this prompt's own
    # where in the body the asked thing stands, 0 to 1; even over the prompts of a task
    depth: float
    length: int  # tokens of the prompt
    tokenizer: Tokenizer  # the model's
    prose: Sequence[str]  # the pool of filler sentences

    def sentences(self) -> Iterator[str]:
        """Filler sentences without end."""
        return endless(self.rng, self.prose)
