"""The retrieval tasks, one module for each family."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Iterator, Sequence

from sparsek_backend.eval.filler import make_pool
from sparsek_backend.eval.prompt import Draft, Prompt, Tokenizer, Variant, fit
from sparsek_backend.eval.tasks import (
    continuation,
    counting,
    few_shot,
    needles,
    records,
    tracking,
)
from sparsek_backend.eval.tasks.source import Source

TASKS: dict[str, Callable[[Source], Draft]] = {
    make.__name__: make
    for make in (
        needles.single,
        needles.multi_key,
        needles.multi_value,
        needles.multi_query,
        needles.question_first,
        tracking.variable_tracking,
        counting.common_words,
        counting.frequent_words,
        records.records,
        continuation.continuation,
        few_shot.few_shot,
    )
}
"""By the name that users write: what makes one prompt in words."""

_GOLDEN = (math.sqrt(5) - 1) / 2


def check_tasks(names: Sequence[str], known: Collection[str] = TASKS) -> None:
    """Raise a ValueError for a name that no task has."""
    for name in names:
        if name not in known:
            raise ValueError(f"task: expected one of {', '.join(known)}, got {name!r}")


def make_prompts(
    tokenizer: Tokenizer,
    *,
    tasks: Sequence[str],
    variants: Sequence[Variant],
    lengths: Sequence[int],
    count: int,
    seed: int,
) -> Iterator[Prompt]:
    """Yield ``count`` prompts of every task, variant and length.

    A prompt depends on its task, length and index, the seed and the tokenizer: more prompts are
    the same ones and further ones.  The variants of a prompt share its body's needles.

    Raises:
        ValueError: unknown task, or a length without room for filler.
    """
    check_tasks(tasks)
    prose = make_pool(seed)
    for length in lengths:
        for name in tasks:
            for index in range(count):
                for variant in variants:
                    own = f"{seed} {name} {length} {index}"
                    source = Source(
                        seed=seed,
                        rng=random.Random(own),
                        depth=(0.5 + index * _GOLDEN) % 1.0,
                        length=length,
                        tokenizer=tokenizer,
                        prose=prose,
                    )
                    yield fit(
                        TASKS[name](source),
                        tokenizer,
                        task=name,
                        variant=variant,
                        length=length,
                        index=index,
                        rng=random.Random(f"notes {own}"),
                    )
