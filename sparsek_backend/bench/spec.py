"""The batch-spec grammar: `8q1s32k` is 8 requests with 1 query token and 32k tokens of context.

    spec    := group ("_" group)*
    group   := [count] "q" length ["s" length]
    length  := size ["-" size]
    size    := digits ["k" | "m"]          k = 1024, m = 1024 * 1024

Without `s` the context is the query itself (a whole prefill).  A range such as `32q1k-16k` spaces
the lengths of its requests evenly and in ascending order, so that a ragged batch is reproducible.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_GROUP = re.compile(
    r"(?P<count>\d+)?q(?P<q>\d+[km]?)(?:-(?P<q_hi>\d+[km]?))?"
    r"(?:s(?P<s>\d+[km]?)(?:-(?P<s_hi>\d+[km]?))?)?"
)
_UNITS = {"k": 1024, "m": 1024 * 1024}


@dataclass(frozen=True)
class BatchSpec:
    """Requests of one step: query tokens and keys (query tokens included) of each."""

    text: str  # the spec as written
    query_lens: tuple[int, ...]  # new tokens of each request
    seq_lens: tuple[int, ...]  # keys of each request, its new tokens included

    @property
    def num_requests(self) -> int:
        return len(self.query_lens)

    @property
    def total_query_tokens(self) -> int:
        return sum(self.query_lens)

    @property
    def is_uniform(self) -> bool:
        return len(set(zip(self.query_lens, self.seq_lens, strict=True))) == 1


def _size(text: str) -> int:
    unit = _UNITS.get(text[-1])
    return int(text[:-1]) * unit if unit else int(text)


def _spread(low: str, high: str | None, count: int) -> list[int]:
    first = _size(low)
    if high is None:
        return [first] * count
    last = _size(high)
    return [round(first + (last - first) * i / max(count - 1, 1)) for i in range(count)]


def parse_spec(text: str) -> BatchSpec:
    """Parse a batch spec.

    Args:
        text: e.g. `8q1s32k`, `q128k`, `32q1k-16k`, `2q2k_8q1s1k`.

    Raises:
        ValueError: `text` does not follow the grammar, or a request has no query token or fewer
            keys than query tokens.
    """
    query_lens: list[int] = []
    seq_lens: list[int] = []
    for group in text.split("_"):
        match = _GROUP.fullmatch(group)
        if match is None:
            raise ValueError(
                f"spec: expected groups such as '8q1s32k', '2q2k' or '32q1k-16k' joined by '_', "
                f"got {group!r} in {text!r}"
            )
        count = int(match["count"] or 1)
        if count < 1:
            raise ValueError(f"spec: expected at least one request per group, got {text!r}")
        queries = _spread(match["q"], match["q_hi"], count)
        keys = _spread(match["s"], match["s_hi"], count) if match["s"] else list(queries)
        query_lens += queries
        seq_lens += keys
    for query_len, seq_len in zip(query_lens, seq_lens, strict=True):
        if query_len < 1:
            raise ValueError(f"spec: expected at least one query token per request, got {text!r}")
        if seq_len < query_len:
            raise ValueError(
                f"spec: expected at least as many keys as query tokens, got {seq_len} keys for "
                f"{query_len} query tokens in {text!r}"
            )
    return BatchSpec(text, tuple(query_lens), tuple(seq_lens))
