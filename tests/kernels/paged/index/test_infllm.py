"""InfLLM-v2's own selection: the oracle by hand, and the torch path against the oracle."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from sparsek_kernels.paged import (
    Indexers,
    InfLLM,
    PageRecords,
    SelectionPolicy,
    StepPolicy,
    paged_attention,
    select_blocks,
)
from sparsek_kernels.paged.lengths import batch_of_lengths, pages_of
from sparsek_kernels.paged.reference import (
    block_ranks_reference,
    gather_sequence,
    kernel_shares_reference,
    paged_attention_reference,
    select_infllm_reference,
)
from tests.kernels.paged.cache_cases import Case, make_case

SINGLE = partial(SelectionPolicy, query_tile=1)
INDEXERS = Indexers(InfLLM(), InfLLM())
POLICIES = {
    "blocks of 64": SINGLE(num_sink=64, window_size=64, top_k=2, sel_block_size=64),
    "blocks of 32": SINGLE(num_sink=32, window_size=64, top_k=3, sel_block_size=32),
    "blocks of 16": SINGLE(num_sink=16, window_size=1, top_k=4, sel_block_size=16),
    "dense below": SINGLE(num_sink=32, window_size=32, top_k=2, sel_block_size=32, dense_below=200),
}
SCALE = 32**-0.5


def attend(case: Case, policy: StepPolicy, indexers: Indexers = INDEXERS) -> torch.Tensor:
    return paged_attention(
        case.q,
        case.k_cache,
        case.v_cache,
        case.batch,
        policy,
        k_summary=case.k_summary,
        indexers=indexers,
    )


def choose(case: Case, policy: StepPolicy) -> list[torch.Tensor]:
    return select_blocks(
        case.q, case.k_cache, case.batch, policy, k_summary=case.k_summary, indexers=INDEXERS
    )


def test_five_averages_of_a_block_by_hand() -> None:
    """As OpenBMB's kernels pool: five of them every four, with one of padding."""
    policy = POLICIES["blocks of 64"]
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randn(*shape, generator=generator) for shape in ((4, 32), (700, 2, 32)))
    position = 690
    averages = k[: position + 1].double().unfold(0, 32, 16).mean(-1)  # [n, Hkv, D]
    assert len(averages) == (position + 1 - 32) // 16 + 1
    logits = torch.einsum("hgd,nhd->hgn", q.double().view(2, 2, 32), averages) * SCALE
    shares = logits.softmax(-1).sum(1)
    torch.testing.assert_close(kernel_shares_reference(q, k, position, SCALE), shares)
    pooled = F.max_pool1d(shares, kernel_size=5, stride=4, padding=1)
    ranks = block_ranks_reference(q, k, position, policy, SCALE)
    own = position // 64
    assert bool((ranks[:, [0, own - 1, own]] == float("inf")).all())
    torch.testing.assert_close(ranks[:, 1 : own - 1], pooled[:, 1 : own - 1])


def test_the_last_average_ends_at_the_query() -> None:
    q, k = torch.randn(2, 8), torch.randn(64, 1, 8)
    counts = [kernel_shares_reference(q, k, p, 1.0).shape[1] for p in (31, 46, 47, 62, 63)]
    assert counts == [1, 1, 2, 2, 3]


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
def test_attention_and_choice_equal_the_oracle(policy: SelectionPolicy, page_size: int) -> None:
    case = make_case([500, 33, 290, 410], [2, 1, 40, 90], 2, page_size=page_size)
    step = StepPolicy(policy, policy)
    found = attend(case, step)
    expected = paged_attention_reference(
        case.q, case.k_cache, case.v_cache, case.batch, step, select=select_infllm_reference
    )
    torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=1e-5)
    chosen = choose(case, step)
    starts, lengths = case.batch.cu_seqlens_q.tolist(), case.batch.seq_lens.tolist()
    for request, length in enumerate(lengths):
        rows = range(starts[request], starts[request + 1])
        keys = gather_sequence(case.k_cache, case.batch.block_table[request], length)
        for row, found_blocks in zip(rows, chosen[request], strict=True):
            position = length - (rows.stop - row)
            q = case.q[row : row + 1]
            wanted = select_infllm_reference(q, keys, [position], policy, SCALE)
            if wanted is None:
                assert bool((found_blocks == -1).all())
            else:
                assert found_blocks.tolist() == wanted


def test_tokens_of_sequences_far_apart_in_length_are_decoded_together() -> None:
    policy = POLICIES["blocks of 32"]
    case, step = make_case([290, 700, 411], [1, 3, 2], 3), StepPolicy(policy, policy)
    expected = paged_attention_reference(
        case.q, case.k_cache, case.v_cache, case.batch, step, select=select_infllm_reference
    )
    torch.testing.assert_close(attend(case, step).double(), expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("chunk", [1, 40, 624], ids=["decoded", "chunk", "prompt"])
def test_means_in_the_querys_own_block_have_a_share(chunk: int) -> None:
    """Most of one head's attention lies in the query's own block: its choice counts for little."""
    length, q, k = 624, torch.zeros(1, 2, 8), torch.zeros(624, 1, 8)
    k[192:256, 0, 0], k[576:, 0, 0], k[320:384, 0, 1] = 4.0, 12.0, 4.0
    q[0, 0, 0], q[0, 1, 1] = 2.0, 1.8
    policy = SINGLE(window_size=1, top_k=1, sel_block_size=64)
    k_cache, _v_cache, k_summary, table = pages_of(k[None], k[None], 64)
    batch = batch_of_lengths(table, [chunk], [length], decodes=int(chunk == 1))
    (found,) = select_blocks(
        q.expand(chunk, 2, 8),
        k_cache,
        batch,
        StepPolicy(policy, policy),
        k_summary=k_summary,
        softmax_scale=1.0,
        indexers=INDEXERS,
    )
    assert select_infllm_reference(q, k, [length - 1], policy, 1.0) == [[5]]
    assert found[-1].tolist() == [[5]]


def turned(x: torch.Tensor, positions: torch.Tensor, back: bool = False) -> torch.Tensor:
    """``[n, heads, D]`` turned by positions and made longer, as YaRN and LongRoPE do; float64."""
    half = x.shape[-1] // 2
    angles = positions[:, None, None] * 1e4 ** -(torch.arange(half, dtype=torch.float64) / half)
    turns = torch.polar(torch.tensor(1.3, dtype=torch.float64), angles)
    pairs = torch.complex(*x.double().chunk(2, -1))
    pairs = pairs / turns if back else pairs * turns
    return torch.cat([pairs.real, pairs.imag], -1)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
def test_scores_without_positions(policy: SelectionPolicy) -> None:
    """``use_nope``: attention is of rotated keys, the choice of what they were before."""
    case = make_case([500, 33, 290, 410], [2, 1, 40, 90], 2, page_size=32)
    places = torch.arange(512)
    ones = torch.tensor([1.0, 0.0]).repeat_interleave(16).expand(512, 1, 32)
    rotation = turned(ones, places)[:, 0].float()
    batch = replace(case.batch, rotation=rotation, _derived={})
    lengths, counts = case.batch.seq_lens.tolist(), case.batch.cu_seqlens_q.diff().tolist()
    at = [torch.arange(n - c, n) for n, c in zip(lengths, counts, strict=True)]
    case.q = turned(case.q, torch.cat(at)).float()
    for pages, length in zip(case.batch.block_table, lengths, strict=True):
        for index in range(-(-length // 32)):
            keys = case.k_cache[pages[index]]
            keys.copy_(turned(keys.transpose(0, 1), places[32 * index :][:32]).transpose(0, 1))

    def select(
        q: torch.Tensor, k: torch.Tensor, positions: list[int], *rest: Any
    ) -> list[list[int]] | None:
        q = turned(q, torch.tensor(positions), back=True)
        k = turned(k, torch.arange(len(k)), back=True)
        return select_infllm_reference(q, k, positions, *rest)

    step = StepPolicy(policy, policy)
    unturned = replace(case, batch=batch)
    found, rotated = (attend(x, step) for x in (unturned, case))
    expected = paged_attention_reference(
        case.q, case.k_cache, case.v_cache, case.batch, step, select=select
    )
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(rotated, found, atol=1e-2)
    inspected = choose(unturned, step)
    last = gather_sequence(case.k_cache, case.batch.block_table[0], 500)
    assert inspected[0][-1].tolist() == select(case.q[1:2], last, [499], policy, SCALE)


def test_it_is_another_choice_than_by_records() -> None:
    policy = POLICIES["blocks of 32"]
    step, case = StepPolicy(policy, policy), make_case([500], [1], 1)
    by_records = StepPolicy(policy, policy.by_records(policy.top_k * policy.sel_block_size))
    assert not torch.equal(
        attend(case, step), attend(case, by_records, Indexers(decode=PageRecords()))
    )


def test_it_is_per_token() -> None:
    policy, case = POLICIES["blocks of 32"], make_case([500], [40], 0)
    with pytest.raises(ValueError, match="policy: expected query_tile = 1 with InfLLM, got 64"):
        attend(case, StepPolicy(replace(policy, query_tile=64), policy))
