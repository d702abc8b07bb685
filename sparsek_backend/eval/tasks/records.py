"""Key-value records: hundreds of lines of one form, one of them asked for."""

from __future__ import annotations

import random
from functools import lru_cache

from sparsek_backend.eval.filler import endless
from sparsek_backend.eval.prompt import Draft
from sparsek_backend.eval.tasks.source import Source
from sparsek_backend.eval.words import draw_numbers

_POOL = 8192


def records(source: Source) -> Draft:
    """Records that fill the text; the value of one key is asked for."""
    pool = _pool(source.seed)
    asked = source.rng.randrange(_POOL)
    key, value, line = pool[asked]
    return Draft(
        head="Below is a table of records, each with a key and a value.\n",
        needles=[(source.depth, line)],
        filler=endless(source.rng, [line for _, _, line in (*pool[:asked], *pool[asked + 1 :])]),
        question=f"\n\nWhat is the value of the key {key}?",
        lead=f"The value of the key {key} is",
        answers=(value,),
        target=f" {value}",
    )


@lru_cache(maxsize=4)
def _pool(seed: int) -> tuple[tuple[str, str, str], ...]:
    """Distinct keys of eight hexadecimal digits, their distinct values, and their lines."""
    rng = random.Random(f"records {seed}")
    keys = [f"{number:08x}" for number in rng.sample(range(1 << 28, 1 << 32), _POOL)]
    values = draw_numbers(rng, _POOL)
    return tuple((k, v, f"\nkey {k}: value {v}") for k, v in zip(keys, values, strict=True))
