"""Scores of a reply: what it contains, how likely the right one was, and what else was likely."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from sparsek_backend.eval.prompt import Answer, Prompt, Tokens
from sparsek_backend.eval.stats import pack
from sparsek_backend.extras import needing


@dataclass(frozen=True)
class Reply:
    """A model's reply to a prompt, and what it finds likely along the prompt's target."""

    tokens: Tokens | None  # the greedy continuation, or ``None`` where only its text is known
    text: str | None  # the same as text, or ``None`` where there is no tokenizer
    # for every token of the target, given those before it: log-probabilities of the likeliest
    # tokens and of itself
    likely: Sequence[Mapping[int, float]]


def score_reply(prompt: Prompt, reply: Reply) -> dict[str, Any]:
    """Score a greedy reply by what it contains, and the right answer by its likelihood.

    Text is compared where there is text, token ids elsewhere.  RULER's metrics are its authors'
    code; without text, token ids stand in for it.

    Returns:
        ``accuracy``: the share of the expected answers that it contains, or RULER's metric; of a
        text, the share of its tokens that were the likeliest.  ``correct``: whether that is all.
        ``nll``: mean negative log-likelihood of the right answer, nats per token.  ``likely``: what
        was likely along it, by :func:`pack`.

    Raises:
        ImportError: a prompt asks for RULER's metric, and its package is not installed.
        ValueError: the reply has neither, or other than one entry for a token of the target.
    """
    if len(reply.likely) != len(prompt.target):
        raise ValueError(
            f"likely: expected {len(prompt.target)}, one for each token of the target, "
            f"got {len(reply.likely)}"
        )
    accuracy = _accuracy(prompt, reply)
    right = [place[token] for token, place in zip(prompt.target, reply.likely, strict=True)]
    scores = {"accuracy": accuracy, "correct": accuracy == 1.0, "nll": -fmean(right)}
    return scores | {"likely": pack(reply.likely)}


def metric_of(prompt: Prompt) -> Any:
    """RULER's metric, of texts, that a prompt names.

    Raises:
        ImportError: the package of RULER's authors is missing.
    """
    with needing("RULER's metric is in a package of its authors", extra="ruler"):
        from long_context_eval.eval.synthetic import constants
    return getattr(constants, f"{prompt.metric}_per_sample")


def _accuracy(prompt: Prompt, reply: Reply) -> float:
    if prompt.variant == "text":
        places = zip(prompt.target, reply.likely, strict=True)
        return sum(place[x] == max(place.values()) for x, place in places) / len(prompt.target)
    if prompt.metric and reply.text is not None:
        texts = [answer.text for answer in prompt.answers]
        return float(metric_of(prompt)([reply.text], [texts])[0]) / 100
    found = [_contains(reply, answer) for answer in prompt.answers]
    return float(any(found)) if prompt.metric == "string_match_part" else sum(found) / len(found)


def _contains(reply: Reply, answer: Answer) -> bool:
    if reply.text is not None:
        return answer.text in reply.text
    if reply.tokens is None:
        raise ValueError("reply: expected text or tokens, got neither")
    places = itertools.product(range(len(reply.tokens)), answer.tokens)
    return any(reply.tokens[i : i + len(form)] == form for i, form in places)
