"""Which words come most often: RULER's common words and frequent words (arXiv 2404.06654)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache

from sparsek_backend.eval.filler import endless
from sparsek_backend.eval.prompt import Draft
from sparsek_backend.eval.tasks.source import Source
from sparsek_backend.eval.words import NAMES, draw_made_up_words

_COMMON = 4
_COMMON_SHARE = 0.06
"""Share of a list that each common word makes; other words come at most three times."""
_FREQUENT_SHARES = (0.25, 0.16, 0.1)
_MADE_UP_WORDS = 6000


def common_words(source: Source) -> Draft:
    """A long list of words; the four that come most often are asked for."""
    return _most_often(
        source,
        head="Below is a long list of words. Four of them come far more often than the others.\n",
        pool=NAMES,
        shares=[_COMMON_SHARE] * _COMMON,
        kind="words of the list",
    )


def frequent_words(source: Source) -> Draft:
    """A long list of made-up words, of which three are frequent; those are asked for."""
    return _most_often(
        source,
        head="Below is a list of made-up words. Three of them come far more often than others.\n",
        pool=_made_up(source.seed),
        shares=_FREQUENT_SHARES,
        kind="made-up words",
    )


def _most_often(
    source: Source, *, head: str, pool: Sequence[str], shares: Sequence[float], kind: str
) -> Draft:
    """A list in which some words of a pool make their shares and every other one comes rarely."""
    words = source.rng.sample(pool, len(shares))
    asked = set(words)
    needles = []
    for word, share in zip(words, shares, strict=True):
        text = f" {word}"
        times = max(int(share * source.length / len(source.tokenizer.encode(text))), 4)
        needles += [(source.rng.random(), text) for _ in range(times)]
    return Draft(
        head=head,
        needles=needles,
        filler=endless(source.rng, [f" {word}" for word in pool if word not in asked]),
        question=f"\n\nWhich {len(words)} {kind} come most often?",
        lead=f"The {len(words)} {kind} that come most often are",
        answers=tuple(words),
        target=" " + ", ".join(words),
        evidence=(),  # it is everywhere
    )


@lru_cache(maxsize=4)
def _made_up(seed: int) -> tuple[str, ...]:
    return tuple(draw_made_up_words(random.Random(f"made-up {seed}"), _MADE_UP_WORDS))
