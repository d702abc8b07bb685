"""Numbers in prose: RULER's single, multi-key, multi-value and multi-query needles (arXiv
2404.06654), and a question that stands before the text."""

from __future__ import annotations

from sparsek_backend.eval.prompt import SHORT_LEAD, Draft
from sparsek_backend.eval.tasks.source import Source
from sparsek_backend.eval.words import draw_names, draw_numbers

_HEAD = "Some access numbers are hidden in the text below. Remember them; you will be asked.\n"
_KEYS = 8
_VALUES = 4
_ASKED = 4


def _needle(name: str, number: str) -> str:
    return f"\nThe access number of the {name} is {number}.\n"


def _depths(source: Source, count: int) -> list[float]:
    """Depths for ``count`` needles: the first at the source's, the others anywhere."""
    return [source.depth, *(source.rng.random() for _ in range(count - 1))]


def single(source: Source) -> Draft:
    """One number, asked for."""
    return _keys(source, 1)


def multi_key(source: Source) -> Draft:
    """The numbers of eight names, one asked for."""
    return _keys(source, _KEYS)


def multi_query(source: Source) -> Draft:
    """The numbers of eight names, four asked for."""
    return _keys(
        source,
        _KEYS,
        asked=_ASKED,
        question="\n\nWhat are the access numbers of these: {}? Give them in this order.",
        lead="The access numbers of the {} are",
    )


def question_first(source: Source) -> Draft:
    """The numbers of eight names; which one is asked for stands before the text."""
    return _keys(
        source,
        _KEYS,
        head="What is the access number of the {}? The text below says it.\n",
        question="\n\nNow answer the question that stands before the text.",
        lead=SHORT_LEAD,
    )


def _keys(
    source: Source,
    count: int,
    *,
    asked: int = 1,
    head: str = _HEAD,
    question: str = "\n\nWhat is the access number of the {}?",
    lead: str = "The access number of the {} is",
) -> Draft:
    """The numbers of ``count`` names, the first ``asked`` asked for; {} stands for their names."""
    names, numbers = draw_names(source.rng, count), draw_numbers(source.rng, count)
    depths = _depths(source, count)
    wanted = ", ".join(names[:asked])
    return Draft(
        head=head.format(wanted),
        needles=[(d, _needle(*pair)) for d, *pair in zip(depths, names, numbers, strict=True)],
        filler=source.sentences(),
        question=question.format(wanted),
        lead=lead.format(wanted),
        answers=tuple(numbers[:asked]),
        target=" " + ", ".join(numbers[:asked]),
        evidence=tuple(range(asked)),
    )


def multi_value(source: Source) -> Draft:
    """Four numbers of one name, all asked for."""
    name = draw_names(source.rng, 1)[0]
    numbers = draw_numbers(source.rng, _VALUES)
    depths = _depths(source, _VALUES)
    return Draft(
        head=_HEAD,
        needles=[(d, _needle(name, number)) for d, number in zip(depths, numbers, strict=True)],
        filler=source.sentences(),
        question=f"\n\nWhat are all {_VALUES} access numbers of the {name}?",
        lead=f"The {_VALUES} access numbers of the {name} are",
        answers=tuple(numbers),
        target=" " + ", ".join(number for _, number in sorted(zip(depths, numbers, strict=True))),
    )
