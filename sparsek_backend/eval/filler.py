"""Filler text: sentences of random words, and the names and numbers that are hidden in it.

All prompts of one seed draw their filler from one pool of sentences: each is tokenized once.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import lru_cache

from sparsek_backend.extras import needing

NOTES_BEGIN = "\n\nBefore you answer the question above, read these notes."
_NOTES = (
    "Read the whole question once more before you begin.|A short reply is better than a long "
    "one.|Do not explain how you found it.|Spell every name exactly as it stands in the "
    "text.|Numbers are written without spaces or commas inside them.|If several things are asked "
    "for, separate them with commas.|Do not add a greeting, and do not sign the reply.|Nothing "
    "outside the text is needed, and general knowledge does not help.|Do not repeat the question "
    "in the reply.|The text may contain many similar passages; only one set of them was asked "
    "about.|A reply that is almost right counts as wrong.|If you are unsure, give the one reply "
    "that seems most likely.|The length of the text says nothing about where the reply stands in "
    "it.|Passages at the start, in the middle and at the end matter equally.|Do not mention these "
    "notes in the reply.|Upper and lower case must be kept as they are."
)
NOTES = [f" {note}" for note in _NOTES.split("|")]


@lru_cache(maxsize=3)
def words(kind: str) -> list[str]:
    """Short English words of a kind: noun, verb or adjective."""
    with needing("prompts of random words need wonderwords", extra="eval"):
        from wonderwords import RandomWord
    return sorted(RandomWord().filter(include_categories=[kind], word_max_length=5, regex="[a-z]+"))


@lru_cache(maxsize=4)
def make_pool(seed: int) -> tuple[str, ...]:
    """The distinct sentences that all prompts of a seed draw from, each behind a space."""
    rng = random.Random(f"filler {seed}")
    sentences: dict[str, None] = {}
    while len(sentences) < 4096:
        chosen = map(rng.choice, map(words, ("noun", "noun", "verb", "adjective", "noun")))
        sentences[" The {} by the {} will {} the {} {}.".format(*chosen)] = None
    return tuple(sentences)


def endless(rng: random.Random, pool: Sequence[str]) -> Iterator[str]:
    """The pool in random order, again and again."""
    while True:
        yield from rng.sample(pool, len(pool))


def draw_names(rng: random.Random, count: int) -> list[str]:
    """Distinct names of an adjective and a noun, such as ``amber-basket``."""
    nouns = rng.sample(words("noun"), count)
    return [f"{rng.choice(words('adjective'))}-{noun}" for noun in nouns]


def draw_numbers(rng: random.Random, count: int) -> list[str]:
    """Distinct numbers of seven digits."""
    return [str(number) for number in rng.sample(range(1_000_000, 10_000_000), count)]
