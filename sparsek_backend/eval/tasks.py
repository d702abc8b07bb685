"""Tasks that RULER lacks: a question before its text, records, a passage to go on; and real texts,
of which the second half is read: only there does a sparse budget leave much out."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path

from sparsek_backend.eval.prompt import Draft, Prompt, Tokenizer, Variant, endless, fit, make_text
from sparsek_backend.extras import needing

_KEYS = 8
_RECORDS = 8192
_SENTENCES = 3
_GOLDEN = (math.sqrt(5) - 1) / 2


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


def draw_names(rng: random.Random, count: int) -> list[str]:
    """Distinct names of an adjective and a noun, such as ``amber-basket``."""
    nouns = rng.sample(words("noun"), count)
    return [f"{rng.choice(words('adjective'))}-{noun}" for noun in nouns]


def draw_numbers(rng: random.Random, count: int) -> list[str]:
    """Distinct numbers of seven digits."""
    return [str(number) for number in rng.sample(range(1_000_000, 10_000_000), count)]


def question_first(rng: random.Random, depth: float, seed: int) -> Draft:
    """The numbers of eight names in prose; which one is asked for stands before the text."""
    names, numbers = draw_names(rng, _KEYS), draw_numbers(rng, _KEYS)
    depths = [depth, *(rng.random() for _ in range(_KEYS - 1))]
    return Draft(
        head=f"What is the access number of the {names[0]}? The text below says it.\n",
        needles=[
            (place, f"\nThe access number of the {name} is {number}.\n")
            for place, name, number in zip(depths, names, numbers, strict=True)
        ],
        filler=endless(rng, make_pool(seed)),
        question="\n\nNow answer the question that stands before the text.",
        answers=(numbers[0],),
    )


def records(rng: random.Random, depth: float, seed: int) -> Draft:
    """Hundreds of records of one form, each with a key; the value of one key is asked for."""
    pool = _records(seed)
    asked = rng.randrange(_RECORDS)
    key, value, line = pool[asked]
    return Draft(
        head="Below is a table of records, each with a key and a value.\n",
        needles=[(depth, line)],
        filler=endless(rng, [line for _, _, line in (*pool[:asked], *pool[asked + 1 :])]),
        question=f"\n\nWhat is the value of the key {key}?",
        lead=f"The value of the key {key} is",
        answers=(value,),
    )


@lru_cache(maxsize=4)
def _records(seed: int) -> tuple[tuple[str, str, str], ...]:
    """Distinct keys of eight hexadecimal digits, their distinct values, and their lines."""
    rng = random.Random(f"records {seed}")
    keys = [f"{number:08x}" for number in rng.sample(range(1 << 28, 1 << 32), _RECORDS)]
    values = draw_numbers(rng, _RECORDS)
    return tuple((k, v, f"\nkey {k}: value {v}") for k, v in zip(keys, values, strict=True))


def continuation(rng: random.Random, depth: float, seed: int) -> Draft:
    """A passage in prose; given its first sentence, the three that follow are asked for."""
    pool = make_pool(seed)
    passage = rng.sample(pool, 1 + _SENTENCES)
    first, *rest = (sentence.strip() for sentence in passage)
    return Draft(
        head="Read the text below with care; one passage of it is asked for at the end.\n",
        needles=[(depth, "\n" + " ".join((first, *rest)))],
        filler=endless(rng, [sentence for sentence in pool if sentence not in passage]),
        question=(
            f'\n\nOne passage of the text begins like this: "{first}" Write the {_SENTENCES} '
            "sentences that follow it, word for word."
        ),
        lead=f"The passage is: {first}",
        answers=tuple(rest),
    )


_DRAFTS: dict[str, Callable[[random.Random, float, int], Draft]] = {
    make.__name__: make for make in (question_first, records, continuation)
}
"""What makes one prompt in words: of its own generator, of where in the text (0 to 1) the asked
thing stands, and of the seed of all."""

TASKS = (*_DRAFTS, "text")
"""The names that users write."""


def make_prompts(
    tokenizer: Tokenizer,
    *,
    tasks: Sequence[str],
    variants: Sequence[Variant],
    lengths: Sequence[int],
    count: int,
    seed: int,
    texts: Sequence[str] = (),
) -> Iterator[Prompt]:
    """Yield ``count`` prompts of every task, variant and length.

    A prompt depends on its task, length and index, the seed and the tokenizer: more prompts are
    the same ones and further ones.  The variants of a prompt share its body's needles.  Texts have
    no variants; they begin at places spread evenly over ``texts``, one after the other.

    Raises:
        ValueError: a length without room for filler, or no texts where they are due.
    """
    if "text" in tasks and not any(texts):
        raise ValueError("texts: expected some for the task text, got none")
    for length, name, index in itertools.product(lengths, tasks, range(count)):
        depth = (0.5 + index * _GOLDEN) % 1.0  # even over the prompts of a task
        if name == "text":
            following = itertools.islice(itertools.cycle(texts), int(depth * len(texts)), None)
            tokens = (token for x in following for token in tokenizer.read(x[: 12 * length]))
            yield make_text(index, tuple(itertools.islice(tokens, length)))
            continue
        own = f"{seed} {name} {length} {index}"
        for variant in variants:
            yield fit(
                _DRAFTS[name](random.Random(own), depth, seed),
                tokenizer,
                task=name,
                variant=variant,
                length=length,
                index=index,
                rng=random.Random(f"notes {own}"),
            )


def read_texts(folder: Path) -> list[str]:
    """Every `*.txt` of a folder, in the order of their names.

    Raises:
        ValueError: the folder is missing or has no text.
    """
    files = sorted(folder.glob("*.txt")) if folder.is_dir() else []
    if not files:
        raise ValueError(f"texts: expected a folder with .txt files, got {str(folder)!r}")
    return [file.read_text(encoding="utf-8", errors="replace") for file in files]
