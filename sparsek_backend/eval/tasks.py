"""The two tasks, over anything that can tokenize, score a prompt and generate.

Perplexity: the negative log-likelihood of real text, its second half apart, because only there does
a sparse budget leave much out.  Passkey: a number hidden in long text, asked for at its end.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

PASSKEY_NEEDLE = "\n\nThe pass key is {key}. Remember it. {key} is the pass key.\n\n"
PASSKEY_QUESTION = "\n\nThe pass key is"


class Scorer(Protocol):
    """A model as the tasks see it."""

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens."""

    def prompt_logprobs(self, tokens: Sequence[int]) -> list[float]:
        """Natural-log probability of each token but the first, given those before it."""

    def generate(self, tokens: Sequence[int], max_tokens: int) -> str:
        """Greedy continuation."""


Progress = Callable[[str], None]


@dataclass(frozen=True)
class TextScore:
    """One text's mean NLL (nats per token), whole and over its second half."""

    text: str
    tokens: int
    nll: float
    nll_second_half: float


@dataclass(frozen=True)
class PasskeyScore:
    """One probe: whether the greedy answer began with the key, and the key's mean NLL."""

    tokens: int
    depth: float
    correct: bool
    answer: str
    answer_nll: float


def read_texts(folder: Path) -> list[tuple[str, str]]:
    """Every `*.txt` of a folder as (name, text), in the order of their names.

    Raises:
        ValueError: the folder is missing or has no text.
    """
    files = sorted(folder.glob("*.txt")) if folder.is_dir() else []
    if not files:
        raise ValueError(f"texts: expected a folder with .txt files, got {str(folder)!r}")
    return [(file.stem, file.read_text(encoding="utf-8", errors="replace")) for file in files]


def pick_texts(
    texts: Sequence[tuple[str, str]], scorer: Scorer, *, length: int, count: int
) -> list[tuple[str, list[int]]]:
    """The first `length` tokens of `count` texts that have as many, spread over the collection.

    Raises:
        ValueError: fewer than `count` texts are long enough.
    """
    likely = [entry for entry in texts if len(entry[1]) >= length]
    order = sorted(range(len(likely)), key=lambda i: (i * count % max(len(likely), 1), i))
    picked: list[tuple[str, list[int]]] = []
    longest = 0
    for index in order:
        name, text = likely[index]
        tokens = scorer.tokenize(text[: 12 * length])
        longest = max(longest, len(tokens))
        if len(tokens) >= length:
            picked.append((name, tokens[:length]))
        if len(picked) == count:
            return picked
    raise ValueError(
        f"texts: expected {count} texts of at least {length} tokens, found {len(picked)}"
        + (f" (the longest has {longest})" if longest else f" among {len(texts)} texts")
        + "; lower --length or --texts"
    )


def run_perplexity(
    scorer: Scorer, texts: Sequence[tuple[str, list[int]]], progress: Progress
) -> list[TextScore]:
    """Score each text once."""
    scores = []
    for name, tokens in texts:
        logprobs = scorer.prompt_logprobs(tokens)
        half = logprobs[len(tokens) // 2 - 1 :]
        scores.append(TextScore(name, len(tokens), -_mean(logprobs), -_mean(half)))
        progress(f"perplexity {name}")
    return scores


def run_passkey(
    scorer: Scorer,
    texts: Sequence[tuple[str, str]],
    *,
    lengths: Sequence[int],
    depths: Sequence[float],
    seed: int,
    progress: Progress,
) -> list[PasskeyScore]:
    """Hide a five-digit number at each depth of each length of filler, and ask for it."""
    scores = []
    for length in lengths:
        for depth in depths:
            rng = random.Random(f"{seed} {length} {depth}")
            key = str(rng.randrange(10000, 100000))
            prompt = passkey_prompt(scorer, texts, length=length, depth=depth, key=key, rng=rng)
            target = scorer.tokenize(f" {key}")
            logprobs = scorer.prompt_logprobs([*prompt, *target])[-len(target) :]
            answer = scorer.generate(prompt, 12)  # the prompt's pages are cached by now
            found = re.search(r"\d+", answer)
            correct = found is not None and found[0] == key
            scores.append(
                PasskeyScore(len(prompt), depth, correct, answer.strip(), -_mean(logprobs))
            )
            progress(f"passkey {length} tokens, depth {depth:g}")
    return scores


def passkey_prompt(
    scorer: Scorer,
    texts: Sequence[tuple[str, str]],
    *,
    length: int,
    depth: float,
    key: str,
    rng: random.Random,
) -> list[int]:
    """Exactly `length` tokens: filler, the needle at `depth` of it, more filler, the question.

    Raises:
        ValueError: `depth` is outside [0, 1], or `length` leaves no room for filler.
    """
    if not 0 <= depth <= 1:
        raise ValueError(f"depth: expected a number from 0 to 1, got {depth}")
    needle = scorer.tokenize(PASSKEY_NEEDLE.format(key=key))
    question = scorer.tokenize(PASSKEY_QUESTION)
    room = length - len(needle) - len(question)
    if room < 64:
        raise ValueError(
            f"length: expected at least {length - room + 64} tokens for a passkey, got {length}"
        )
    filler: list[int] = []
    start = rng.randrange(len(texts))
    for step in range(len(texts)):
        _, text = texts[(start + step) % len(texts)]
        filler += scorer.tokenize(text[: 12 * length])
        if len(filler) >= room:
            break
    if len(filler) < room:
        raise ValueError(f"texts: expected {room} tokens of filler, found {len(filler)}")
    at = round(depth * room)
    return [*filler[:at], *needle, *filler[at:room], *question]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
