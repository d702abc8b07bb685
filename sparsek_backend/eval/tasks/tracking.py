"""Variable tracking (RULER, arXiv 2404.06654): which names hold a number, through assignments."""

from __future__ import annotations

from itertools import pairwise

from sparsek_backend.eval.prompt import Draft
from sparsek_backend.eval.tasks.source import Source
from sparsek_backend.eval.words import draw_letters, draw_numbers

_HOPS = 4


def variable_tracking(source: Source) -> Draft:
    """A chain of assignments in their order, all names asked for."""
    names = draw_letters(source.rng, _HOPS + 1)
    number = draw_numbers(source.rng, 1)[0]
    depths = sorted([source.depth, *(source.rng.random() for _ in range(_HOPS))])
    steps = [f"\nSet {names[0]} to {number}.\n"]
    steps += [f"\nSet {name} to the value of {held}.\n" for held, name in pairwise(names)]
    return Draft(
        head="Variables are set in the text below. Keep track of their values.\n",
        needles=list(zip(depths, steps, strict=True)),
        filler=source.sentences(),
        question=f"\n\nWhich {len(names)} variables hold the value {number} in the end?",
        lead=f"The {len(names)} variables that hold the value {number} are",
        answers=tuple(names),
        target=" " + ", ".join(names),
    )
