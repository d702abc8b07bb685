"""The scoring of one model over a prompt set, in calls small enough to lose little."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

from sparsek_backend.eval.perplexity import score_text
from sparsek_backend.eval.prompt import Prompt
from sparsek_backend.eval.prompt_file import PromptSet
from sparsek_backend.eval.record import (
    Row,
    append_rows,
    identity,
    prompt_row,
    read_rows,
    scored,
    text_row,
)
from sparsek_backend.eval.scoring import Reply, score_reply

_LONGEST_REPLY = 600


class Scorer(Protocol):
    """A model as the evaluation sees it."""

    def prompt_logprobs(self, tokens: Sequence[int]) -> list[float]:
        """Natural-log probability of each token but the first, given those before it."""

    def reply(self, prompts: Sequence[Prompt]) -> list[Reply]:
        """Greedy replies, and the log-probabilities of the targets."""


def pending(prompts: PromptSet, record: Path, run: str) -> PromptSet:
    """The prompts and texts that a run has not scored yet."""
    done = scored(read_rows(record), run)
    return PromptSet(
        [prompt for prompt in prompts.prompts if identity(prompt_row(prompt)) not in done],
        [text for text in prompts.texts if identity(text_row(*text)) not in done],
        prompts.details,
    )


def score(
    scorer: Scorer,
    prompts: PromptSet,
    *,
    record: Path,
    run: str,
    batch: int,
    on_progress: Callable[[int, str], None],
) -> None:
    """Score what is given and append it to the record, a call of the model at a time.

    Args:
        batch: prompts in one call, which are of one length.
        on_progress: gets how many were scored, and what they were.
    """
    for name, tokens in prompts.texts:
        found = score_text(scorer.prompt_logprobs(tokens))
        append_rows(record, [{"run": run, **text_row(name, tokens), **found}])
        on_progress(1, f"perplexity of {name}")
    for length, same in groupby(prompts.prompts, key=lambda prompt: prompt.length):
        members = list(same)
        for begin in range(0, len(members), batch):
            asked = members[begin : begin + batch]
            replies = scorer.reply(asked)
            append_rows(record, [_row(run, *pair) for pair in zip(asked, replies, strict=True)])
            on_progress(len(asked), f"{asked[-1].task}, {length} tokens")


def _row(run: str, prompt: Prompt, reply: Reply) -> Row:
    said: Any = reply.tokens if reply.text is None else reply.text[:_LONGEST_REPLY]
    return {"run": run, **prompt_row(prompt), **asdict(score_reply(prompt, reply)), "reply": said}
