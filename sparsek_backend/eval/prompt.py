"""Prompts: a task's draft in words, fitted to an exact number of tokens."""

from __future__ import annotations

import hashlib
import random
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain
from typing import Literal

Tokens = tuple[int, ...]
Variant = Literal["plain", "followed", "text"]

VARIANTS: tuple[Variant, ...] = ("plain", "followed")
FOLLOWED_BY = 600
"""Tokens between question and answer in the variant ``followed``."""
SHORT_LEAD = "The answer is:"
LEAST_FILLER = 64
"""Tokens of filler that a prompt must have room for."""
_NOTES_BEGIN = "\n\nBefore you answer the question above, read these notes."
_NOTES_TEXT = (
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
_NOTES = [f" {note}" for note in _NOTES_TEXT.split("|")]


class Tokenizer(ABC):
    """Text to token ids."""

    @cached_property
    def encode(self) -> Callable[[str], Tokens]:
        """What ``read`` returns, which is kept: for texts that come again."""
        return lru_cache(1 << 16)(self.read)

    @abstractmethod
    def read(self, text: str, *, special: bool = False) -> Tokens:
        """Token ids of a text; ``special`` adds those that begin one.

        Chat markers in it count as such.
        """

    def frame(self) -> tuple[Tokens, Tokens]:
        """Tokens before and after a user's words: those that begin a text, and a line's end."""
        plain, begun = (self.read("a", special=special) for special in (False, True))
        before = begun[: len(begun) - len(plain)] if begun[-len(plain) :] == plain else ()
        return before, self.encode("\n")


@dataclass(frozen=True)
class Draft:
    """A prompt in words, of no certain length yet."""

    head: str  # the instruction at the start
    # depth in the body (0 is its start, 1 its end) and text of everything that must be in it, in
    # any order
    needles: Sequence[tuple[float, str]]
    filler: Iterator[str]  # text for the rest of the body, piece by piece, without end
    question: str  # what is asked, behind the body
    answers: tuple[str, ...]  # what a right answer contains, in its order
    lead: str = SHORT_LEAD  # first words of the answer, given to the model


@dataclass(frozen=True)
class Answer:
    """One thing that a right answer contains."""

    text: str  # as text
    tokens: tuple[Tokens, ...]  # as token ids, in each form that it may take after other tokens


@dataclass(frozen=True)
class Prompt:
    """A prompt of exactly ``length`` tokens; with a ``metric``, of as many, its answer included.

    In the variant ``text`` nothing is asked: it is a text, whose second half is the target.
    """

    task: str
    variant: Variant
    length: int
    index: int
    pieces: tuple[Tokens, ...]  # its token ids, in pieces that many prompts share
    answers: tuple[Answer, ...]  # what a right answer contains
    target: Tokens  # the whole right answer, whose log-likelihood is measured
    max_tokens: int  # to generate
    # RULER's metric of a reply, by name; else the share of the answers that it contains
    metric: str = ""

    @property
    def fits(self) -> bool:
        """Whether it has the tokens that its length allows."""
        found = len(self.ids)
        if self.metric:
            return found + self.max_tokens <= self.length
        return found + (len(self.target) if self.variant == "text" else 0) == self.length

    @property
    def name(self) -> str:
        return f"{self.task}/{self.variant}/{self.length}/{self.index}"

    @property
    def ids(self) -> list[int]:
        return list(chain.from_iterable(self.pieces))

    @cached_property
    def digest(self) -> str:
        """A name of the content: two prompts with one digest ask the same."""
        content = hashlib.sha256(array("q", self.ids).tobytes())
        for tokens in (self.target, *chain.from_iterable(a.tokens for a in self.answers)):
            content.update(array("q", (-1, *tokens)).tobytes())
        content.update(f"{self.max_tokens}{self.metric}".encode())
        return content.hexdigest()[:16]


def endless(rng: random.Random, pool: Sequence[str]) -> Iterator[str]:
    """The pool in random order, again and again."""
    while True:
        yield from rng.sample(pool, len(pool))


def fit(
    draft: Draft,
    tokenizer: Tokenizer,
    *,
    task: str,
    variant: Variant,
    length: int,
    index: int,
    rng: random.Random,
) -> Prompt:
    """Fill a draft up to exactly ``length`` tokens.

    The body begins with the end of a piece of filler, whose beginning found no room.

    Raises:
        ValueError: ``length`` leaves no room for filler; the message has the least length.
    """
    before, after = tokenizer.frame()
    followed = variant == "followed"
    head = (before, tokenizer.encode(draft.head))
    lead = tokenizer.encode(SHORT_LEAD if followed else draft.lead)
    notes: list[Tokens] = []
    if followed:
        notes.append(tokenizer.encode(_NOTES_BEGIN))
        notes += _take(tokenizer, endless(rng, _NOTES), FOLLOWED_BY - len(notes[0]))
    tail = (tokenizer.encode(draft.question), *notes, after, lead)
    needles = (tokenizer.encode(text) for _, text in draft.needles)
    room = length - sum(map(len, (*head, *needles, *tail)))
    if room < LEAST_FILLER:
        raise ValueError(
            f"length: expected at least {length - room + LEAST_FILLER} tokens for task "
            f"{task!r}, variant {variant!r}, got {length}"
        )
    body = _take(tokenizer, draft.filler, room)
    last = len(body) - 1
    for depth, text in reversed(sorted(draft.needles, key=lambda needle: needle[0])):
        body.insert(1 + round(depth * last), tokenizer.encode(text))
    target = tokenizer.encode("".join(f" {answer}" for answer in draft.answers))
    return Prompt(
        task=task,
        variant=variant,
        length=length,
        index=index,
        pieces=tuple(piece for piece in (*head, *body, *tail) if piece),
        answers=tuple(make_answer(tokenizer, text) for text in draft.answers),
        target=target,
        max_tokens=len(target) + len(target) // 4 + 8,
    )


def make_text(index: int, tokens: Tokens) -> Prompt:
    """A text as a prompt that asks nothing: what is measured is its second half."""
    half = len(tokens) // 2
    read, target = tokens[:half], tokens[half:]
    return Prompt("text", "text", len(tokens), index, (read,), (), target, max_tokens=0)


def make_answer(tokenizer: Tokenizer, text: str) -> Answer:
    """An expected answer in the forms that a tokenizer gives it at a start and behind a space."""
    forms = dict.fromkeys((tokenizer.encode(f" {text}"), tokenizer.encode(text)))
    return Answer(text, tuple(forms))


def _take(tokenizer: Tokenizer, texts: Iterator[str], count: int) -> list[Tokens]:
    """Pieces of exactly ``count`` tokens in all: the first is the end of a longer one."""
    pieces: list[Tokens] = []
    while count > 0:
        piece = tokenizer.encode(next(texts))
        pieces.append(piece[max(len(piece) - count, 0) :])
        count -= len(pieces[-1])
    return [pieces[-1], *pieces[:-1]]
