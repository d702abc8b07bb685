"""Key-value records: hundreds of lines that all look alike, one of them asked for."""

from __future__ import annotations

import random
from functools import lru_cache

from sparsek_backend.eval.filler import endless
from sparsek_backend.eval.prompt import Draft
from sparsek_backend.eval.tasks.task import Source, Task
from sparsek_backend.eval.words import draw_numbers

_POOL = 8192


def records(source: Source) -> Draft:
    """Records that fill the text; the value of one key is asked for."""
    pool = _pool(source.seed)
    key, value = pool[source.rng.randrange(_POOL)]
    return Draft(
        head="Below is a table of records, each with a key and a value.\n",
        needles=[(source.depth, _line(key, value))],
        filler=endless(source.rng, [_line(*pair) for pair in pool if pair[0] != key]),
        question=f"\n\nWhat is the value of the key {key}?",
        lead=f"The value of the key {key} is",
        answers=(value,),
        target=f" {value}",
    )


def _line(key: str, value: str) -> str:
    return f"\nkey {key}: value {value}"


@lru_cache(maxsize=4)
def _pool(seed: int) -> list[tuple[str, str]]:
    """Distinct keys of eight hexadecimal digits with distinct values."""
    rng = random.Random(f"records {seed}")
    keys = [f"{number:08x}" for number in rng.sample(range(1 << 28, 1 << 32), _POOL)]
    return list(zip(keys, draw_numbers(rng, _POOL), strict=True))


RECORDS = (Task("records", "the value of one of hundreds of keys", records),)
