"""The batch-spec grammar."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsek_backend.bench.spec import parse_spec


@pytest.mark.parametrize(
    ("text", "query_lens", "seq_lens"),
    [
        ("8q1s32k", (1,) * 8, (32768,) * 8),
        ("q128k", (131072,), (131072,)),
        ("q5s1m", (5,), (1 << 20,)),
        ("2q2k_3q1s1k", (2048, 2048, 1, 1, 1), (2048, 2048, 1024, 1024, 1024)),
        ("3q1k-3k", (1024, 2048, 3072), (1024, 2048, 3072)),
        ("2q1s10-20", (1, 1), (10, 20)),
        ("1q7-9", (7,), (7,)),
    ],
)
def test_a_spec_means_what_it_says(
    text: str, query_lens: tuple[int, ...], seq_lens: tuple[int, ...]
) -> None:
    spec = parse_spec(text)
    assert (spec.query_lens, spec.seq_lens) == (query_lens, seq_lens)
    assert spec.text == text
    assert spec.num_requests == len(query_lens)
    assert spec.total_query_tokens == sum(query_lens)


@pytest.mark.parametrize(
    "text", ["", "8", "8q", "q1s", "s32k", "8q1s32g", "0q1", "q0", "q8s4", "q1__q1", "Q1", "q1 "]
)
def test_a_malformed_spec_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(ValueError, match="spec: expected"):
        parse_spec(text)


@given(
    st.lists(
        st.tuples(st.integers(1, 9), st.integers(1, 5000), st.integers(0, 5000)),
        min_size=1,
        max_size=4,
    )
)
def test_every_written_batch_is_read_back(groups: list[tuple[int, int, int]]) -> None:
    text = "_".join(f"{count}q{q}s{q + more}" for count, q, more in groups)
    spec = parse_spec(text)
    assert list(spec.query_lens) == [q for count, q, _ in groups for _ in range(count)]
    assert list(spec.seq_lens) == [q + more for count, q, more in groups for _ in range(count)]


def test_uniform_batches_are_told_apart() -> None:
    assert parse_spec("4q1s8k").is_uniform
    assert not parse_spec("4q1s8k_1q2s8k").is_uniform
