"""Which segments of a step FlashAttention takes, and how it is called."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("vllm", reason="the vLLM backend needs vLLM")

import torch

from sparsek_backend.vllm_backend.sparsek.flash import FlashPrefill
from sparsek_kernels.paged import PagedBatch, SelectionPolicy, StepPolicy
from sparsek_kernels.paged.operands import PagedOperands
from sparsek_kernels.paged.plan import plan_step

TOPK = SelectionPolicy(num_sink=64, window_size=128, top_k=2, dense_below=256)


def make_batch(seq_lens: list[int], query_lens: list[int], num_decodes: int) -> PagedBatch:
    offsets = torch.tensor([0, *torch.tensor(query_lens).cumsum(0).tolist()], dtype=torch.int32)
    return PagedBatch(
        block_table=torch.arange(len(seq_lens) * 4, dtype=torch.int32).view(len(seq_lens), 4),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        cu_seqlens_q=offsets,
        num_decodes=num_decodes,
        num_decode_tokens=sum(query_lens[:num_decodes]),
        decode_query_len=1,
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        query_lens_host=tuple(query_lens),
    )


def served(policy: SelectionPolicy, seq_lens: list[int], query_lens: list[int]) -> list[bool]:
    """Whether FlashAttention serves each segment; requests of one query token are decodes."""
    batch = make_batch(seq_lens, query_lens, query_lens.count(1))
    step = StepPolicy.of(policy)
    return [FlashPrefill.serves(segment) for segment in plan_step(batch, step, seq_lens)]


@pytest.mark.parametrize(
    ("policy", "dense"),
    [
        (SelectionPolicy(), True),
        (SelectionPolicy(window_size=100), True),
        (SelectionPolicy(window_size=100, dense_below=100), True),
        (SelectionPolicy(window_size=100, dense_below=128), False),
        (SelectionPolicy(num_sink=4, window_size=100), False),
        (TOPK, False),
    ],
)
def test_long_prefills_are_served_where_flash_has_the_mask(
    policy: SelectionPolicy, dense: bool
) -> None:
    assert served(policy, [9000], [500]) == [dense]


def test_dense_prefills_and_last_queries_are_served_and_decodes_are_not() -> None:
    seq_lens, query_lens = [900, 100, 256, 4000, 90], [1, 100, 16, 300, 90]
    assert served(TOPK, seq_lens, query_lens) == [False, True, False, True]
    policy = replace(TOPK, dense_last=64)
    assert served(policy, seq_lens, query_lens) == [False, True, False, True, True]


@pytest.mark.parametrize(
    ("policy", "window"), [(TOPK, [-1, -1]), (SelectionPolicy(window_size=33), [32, 0])]
)
def test_flash_is_called_over_our_pages(policy: SelectionPolicy, window: list[int]) -> None:
    calls = []
    flash = FlashPrefill(lambda **kwargs: calls.append(kwargs), 3)
    seq_lens = [50, 100, 40]
    batch = make_batch(seq_lens, [1, 100, 40], 1)
    decode, segment = plan_step(batch, StepPolicy.of(policy), seq_lens)
    assert not flash.serves(decode)
    q, out = torch.zeros(145, 4, 64), torch.zeros(145, 4, 64)
    pages = torch.zeros(8, 2, 64, 128)
    flash(PagedOperands(q, pages[..., :64], pages[..., 64:], out, 0.125), segment)
    (call,) = calls
    assert call["k"].shape == (8, 64, 2, 64)
    assert call["k"].data_ptr() == pages.data_ptr()
    assert call["window_size"] == window
    assert call["causal"] is True
    assert call["fa_version"] == 3
    assert (call["max_seqlen_q"], call["max_seqlen_k"]) == (100, 100)
    assert call["seqused_k"].tolist() == [100, 40]
    assert call["cu_seqlens_q"].tolist() == [0, 100, 140]
    assert call["q"].shape == call["out"].shape == (140, 4, 64)
    assert call["out"].data_ptr() == out[1].data_ptr()


def test_flash_makes_views_of_the_pages_that_it_is_given() -> None:
    calls: list[dict[str, torch.Tensor]] = []
    flash = FlashPrefill(lambda **kwargs: calls.append(kwargs), 3)
    (segment,) = plan_step(make_batch([70], [70], 0), StepPolicy.of(SelectionPolicy()), [70])
    q, out = torch.zeros(70, 4, 64), torch.zeros(70, 4, 64)
    first, other = (torch.zeros(8, 2, 64, 128) for _ in range(2))
    for pages in (first, other):
        keys, values = pages[..., :64], pages[..., 64:]
        for _ in range(2):
            flash(PagedOperands(q, keys, values, out, 0.125), segment)
        found, again = calls[-2:]
        assert (found["k"].data_ptr(), found["v"].data_ptr()) == (
            keys.data_ptr(),
            values.data_ptr(),
        )
        assert found["k"].shape == found["v"].shape == (8, 64, 2, 64)
        assert again["k"] is found["k"]
        assert again["v"] is found["v"]
        assert (found["q"].data_ptr(), found["out"].data_ptr()) == (q.data_ptr(), out.data_ptr())
