"""Verbatim continuation: a passage that stood in the text once goes on, word for word."""

from __future__ import annotations

from sparsek_backend.eval.filler import make_sentence
from sparsek_backend.eval.prompt import Draft
from sparsek_backend.eval.tasks.source import Source

_SENTENCES = 3


def continuation(source: Source) -> Draft:
    """A passage in prose; given its first sentence, the three that follow are asked for."""
    known = {text.strip() for text in source.prose}
    passage: list[str] = []
    while len(passage) <= _SENTENCES:
        sentence = make_sentence(source.rng)
        if sentence not in known:
            known.add(sentence)
            passage.append(sentence)
    first, rest = passage[0], passage[1:]
    return Draft(
        head="Read the text below with care; one passage of it is asked for at the end.\n",
        needles=[(source.depth, "\n" + " ".join(passage))],
        filler=source.sentences(),
        question=(
            f'\n\nOne passage of the text begins like this: "{first}" Write the {_SENTENCES} '
            "sentences that follow it, word for word."
        ),
        lead=f"The passage is: {first}",
        answers=tuple(rest),
        target=" " + " ".join(rest),
    )
