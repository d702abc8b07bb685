"""Few-shot learning in context: the rule is in examples far back, and nowhere else."""

from __future__ import annotations

import random
from functools import lru_cache

from sparsek_backend.eval.filler import endless
from sparsek_backend.eval.prompt import Draft
from sparsek_backend.eval.tasks.source import Source
from sparsek_backend.eval.words import ADJECTIVES, NOUNS, draw_made_up_words

_SHOTS = 4
_EXAMPLES = 6
"""Examples of every other object in the pool."""


def few_shot(source: Source) -> Draft:
    """Marks of objects, learnt from four examples of the asked one among many of others."""
    marks = _marks(source.seed)
    thing = source.rng.choice(NOUNS)
    mark = marks[thing]
    asked, *shown = source.rng.sample(ADJECTIVES, _SHOTS + 1)
    depths = [source.depth, *(source.rng.random() for _ in range(_SHOTS - 1))]
    return Draft(
        head="Every object below has a mark, which depends on the kind of object alone.\n",
        needles=[
            (depth, "\n" + _example(adjective, thing, mark))
            for depth, adjective in zip(depths, shown, strict=True)
        ],
        filler=endless(source.rng, [text for other, text in _pool(source.seed) if other != thing]),
        question=f"\n\nWhich mark does the object '{asked} {thing}' have?",
        lead=_example(asked, thing, ""),
        answers=(mark,),
        target=f" {mark}",
    )


def _example(adjective: str, thing: str, mark: str) -> str:
    return f"object: {adjective} {thing} | mark: {mark}".rstrip(" ")


@lru_cache(maxsize=4)
def _marks(seed: int) -> dict[str, str]:
    words = draw_made_up_words(random.Random(f"marks {seed}"), len(NOUNS))
    return dict(zip(NOUNS, words, strict=True))


@lru_cache(maxsize=4)
def _pool(seed: int) -> list[tuple[str, str]]:
    """Every object's name with its examples."""
    rng = random.Random(f"examples {seed}")
    return [
        (thing, "\n" + _example(adjective, thing, mark))
        for thing, mark in _marks(seed).items()
        for adjective in rng.sample(ADJECTIVES, _EXAMPLES)
    ]
