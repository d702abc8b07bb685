"""Scores of a reply: which expected answers it contains, and how likely the right one was."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sparsek_backend.eval.prompt import Answer, Prompt, Tokens
from sparsek_backend.extras import needing


@dataclass(frozen=True)
class Reply:
    """A model's reply to a prompt, with the log-probabilities of the right answer."""

    tokens: Tokens | None  # the greedy continuation, or ``None`` where only its text is known
    text: str | None  # the same as text, or ``None`` where there is no tokenizer
    # log-probability of every token of the prompt's target, given those before it
    target_logprobs: Sequence[float]


@dataclass(frozen=True)
class Score:
    """Accuracy of a reply, and the NLL of the right answer."""

    accuracy: float  # share of the expected answers that it contains, or RULER's metric
    correct: bool  # whether that is all
    nll: float  # mean negative log-likelihood of the right answer, nats per token


def score_reply(prompt: Prompt, reply: Reply) -> Score:
    """Score a greedy reply by what it contains, and the right answer by its likelihood.

    Text is compared where there is text, token ids elsewhere.  RULER's metrics are its authors'
    code; without text, token ids stand in for it.

    Raises:
        ImportError: a prompt asks for RULER's metric, and its package is not installed.
        ValueError: the reply has neither, or other than one log-probability for a target's token.
    """
    if len(reply.target_logprobs) != len(prompt.target):
        raise ValueError(
            f"target_logprobs: expected {len(prompt.target)}, one for each token of the target, "
            f"got {len(reply.target_logprobs)}"
        )
    accuracy = _accuracy(prompt, reply)
    return Score(
        accuracy=accuracy,
        correct=accuracy == 1.0,
        nll=-math.fsum(reply.target_logprobs) / len(prompt.target),
    )


def _accuracy(prompt: Prompt, reply: Reply) -> float:
    if prompt.metric and reply.text is not None:
        with needing("RULER's metric is in a package of its authors", extra="ruler"):
            from long_context_eval.eval.synthetic import constants
        metric = getattr(constants, f"{prompt.metric}_per_sample")
        return float(metric([reply.text], [[answer.text for answer in prompt.answers]])[0]) / 100
    found = [_contains(reply, answer) for answer in prompt.answers]
    return float(any(found)) if prompt.metric == "string_match_part" else sum(found) / len(found)


def _contains(reply: Reply, answer: Answer) -> bool:
    if reply.text is not None:
        return answer.text in reply.text
    if reply.tokens is None:
        raise ValueError("reply: expected text or tokens, got neither")
    return any(_holds(reply.tokens, form) for form in answer.tokens)


def _holds(tokens: Tokens, part: Tokens) -> bool:
    """Whether ``part`` occurs in ``tokens`` without a gap."""
    width = len(part)
    return any(tokens[i : i + width] == part for i in range(len(tokens) - width + 1))
