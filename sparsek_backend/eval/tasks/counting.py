"""Which words come most often: RULER's common words and frequent words (arXiv 2404.06654)."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import lru_cache

from sparsek_backend.eval.filler import endless
from sparsek_backend.eval.prompt import Draft
from sparsek_backend.eval.tasks.task import Source, Task
from sparsek_backend.eval.words import draw_made_up_words, pair_names

_COMMON = 4
_COMMON_SHARE = 0.06
"""Share of a list that each common word makes; other words come at most three times."""
_FREQUENT_SHARES = (0.25, 0.16, 0.1)
_RARE_WORDS = 3000


def common_words(source: Source) -> Draft:
    """A long list of words; the four that come most often are asked for."""
    names = pair_names()
    source.rng.shuffle(names)
    return _most_often(
        source,
        head="Below is a long list of words. Four of them come far more often than the others.\n",
        words=names[:_COMMON],
        shares=[_COMMON_SHARE] * _COMMON,
        others=names[_COMMON:],
        kind="words of the list",
    )


def frequent_words(source: Source) -> Draft:
    """A long list of made-up words, of which three are frequent; those are asked for."""
    words = source.rng.sample(_made_up(source.seed), _RARE_WORDS)
    count = len(_FREQUENT_SHARES)
    return _most_often(
        source,
        head="Below is a list of made-up words. Three of them come far more often than others.\n",
        words=words[:count],
        shares=list(_FREQUENT_SHARES),
        others=words[count:],
        kind="made-up words",
    )


def _most_often(
    source: Source,
    *,
    head: str,
    words: Sequence[str],
    shares: Sequence[float],
    others: Sequence[str],
    kind: str,
) -> Draft:
    """A list in which each of ``words`` makes its share and every other word comes rarely."""
    needles = []
    for word, share in zip(words, shares, strict=True):
        text = f" {word}"
        times = max(int(share * source.length / len(source.tokenizer.encode(text))), 4)
        needles += [(source.rng.random(), text) for _ in range(times)]
    return Draft(
        head=head,
        needles=needles,
        filler=_rarely(source.rng, others),
        question=f"\n\nWhich {len(words)} {kind} come most often?",
        lead=f"The {len(words)} {kind} that come most often are",
        answers=tuple(words),
        target=" " + ", ".join(words),
        evidence=(),  # it is everywhere
    )


def _rarely(rng: random.Random, words: Sequence[str]) -> Iterator[str]:
    """Every word of a list once, then all of them again in another order."""
    return endless(rng, [f" {word}" for word in words])


@lru_cache(maxsize=4)
def _made_up(seed: int) -> tuple[str, ...]:
    return tuple(draw_made_up_words(random.Random(f"made-up {seed}"), 2 * _RARE_WORDS))


COUNTING = (
    Task("common_words", "the four commonest words of a list", common_words),
    Task("frequent_words", "the three most frequent made-up words", frequent_words),
)
