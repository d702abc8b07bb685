"""Questions to a served model through the OpenAI API, and what the server says it attended."""

from __future__ import annotations

import re
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ATTENDED_COUNTER = "sparsek_attended_tokens_total"
CONTEXT_COUNTER = "sparsek_context_tokens_total"

CHAT_QUESTION = "What is the capital of France?"
CHAT_ANSWER = "Paris"
DOCUMENT_NAME = "1862-Lincoln-1.txt"
DOCUMENT_CHARACTERS = 26_000
PLANTED = "The lighthouse keeper's name is Matilda Grey."
PLANTED_AT = 0.7  # of the document: some 1,600 tokens before the question, outside the window
DOCUMENT_QUESTION = "What is the lighthouse keeper's name in the document above?"
DOCUMENT_ANSWER = "Matilda Grey"


@dataclass(frozen=True)
class Answer:
    """One streamed answer. Times are in seconds from the request."""

    text: str
    prompt_tokens: int
    completion_tokens: int
    first_token_seconds: float
    total_seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Tokens after the first one over the time after the first one; 0 for a single token."""
        elapsed = self.total_seconds - self.first_token_seconds
        if self.completion_tokens < 2 or elapsed <= 0:
            return 0.0
        return (self.completion_tokens - 1) / elapsed


@dataclass(frozen=True)
class Attended:
    """Tokens of context that queries attended, and that dense attention would have."""

    attended: float
    context: float

    def __sub__(self, earlier: Attended) -> Attended:
        return Attended(self.attended - earlier.attended, self.context - earlier.context)

    @property
    def share(self) -> float:
        """Attended over context, 0 to 1.

        Raises:
            ValueError: no query was counted, so SPARSEK did not serve the request.
        """
        if self.context <= 0:
            raise ValueError(
                f"the server's {CONTEXT_COUNTER} did not grow: SPARSEK served no attention"
            )
        return self.attended / self.context


def document_prompt(folder: Path) -> str:
    """Return a message that is several thousand tokens long, with one sentence planted in it."""
    text = (folder / DOCUMENT_NAME).read_text(encoding="utf-8")[:DOCUMENT_CHARACTERS]
    cut = text.index("\n", int(len(text) * PLANTED_AT))
    return f"{text[:cut]}\n\n{PLANTED}\n\n{text[cut:]}\n\n{DOCUMENT_QUESTION}"


def ask(
    base_url: str, model: str, content: str, *, max_tokens: int, write: Callable[[str], object]
) -> Answer:
    """Stream the greedy answer to one user message.

    Args:
        write: receives each piece of text as it arrives.

    Raises:
        RuntimeError: the server refused the request or broke off.
    """
    import httpx
    import openai

    api = openai.OpenAI(base_url=f"{base_url}/v1", api_key="none", timeout=600, max_retries=0)
    began = time.monotonic()
    first: float | None = None
    pieces: list[str] = []
    prompt_tokens = completion_tokens = 0
    try:
        stream = api.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": content}],
            max_tokens=max_tokens,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        for chunk in stream:
            if chunk.usage is not None:
                prompt_tokens = chunk.usage.prompt_tokens
                completion_tokens = chunk.usage.completion_tokens
            piece = chunk.choices[0].delta.content if chunk.choices else None
            if piece:
                first = time.monotonic() if first is None else first
                pieces.append(piece)
                write(piece)
    except (openai.OpenAIError, httpx.HTTPError) as error:
        raise RuntimeError(f"the server did not answer: {error}") from error
    ended = time.monotonic()
    return Answer(
        text="".join(pieces),
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        first_token_seconds=(ended if first is None else first) - began,
        total_seconds=ended - began,
    )


def read_attended(base_url: str) -> Attended:
    """Read the server's counters from its ``/metrics``."""
    with urllib.request.urlopen(f"{base_url}/metrics", timeout=30) as reply:
        text = reply.read().decode("utf-8")
    return Attended(_sum(text, ATTENDED_COUNTER), _sum(text, CONTEXT_COUNTER))


def _sum(metrics: str, counter: str) -> float:
    """Sum one counter over its labels in Prometheus's text format."""
    sample = re.compile(rf"^{counter}(?:\{{.*\}})? (\S+)", re.MULTILINE)
    return sum(float(value) for value in sample.findall(metrics))
