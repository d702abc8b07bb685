"""Filling pages with the means of InfLLM-v2's scores, and the kernels' choice held to the rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import oracle_check
import torch
import torch.nn.functional as F
from problems import Problem, select_phases

from sparsek_kernels.paged.api import write_kv
from sparsek_kernels.paged.batch import PagedBatch, host_lengths
from sparsek_kernels.paged.index.base import Indexers
from sparsek_kernels.paged.index.infllm import InfLLM
from sparsek_kernels.paged.index.infllm import launch as infllm_launch
from sparsek_kernels.paged.index.infllm.means import view_means
from sparsek_kernels.paged.policy import CELL_SIZE, SelectionPolicy, StepPolicy
from sparsek_kernels.paged.reference import (
    kernel_shares_reference,
    paged_attention_reference,
    visible_reference,
)
from tests.kernels.launched import write_launched

INDEXERS = Indexers(InfLLM(), InfLLM())
SLACK = 1e-3
"""Relative difference of scores that is a tie: sums are float32, and powers of two are rounded."""


def rotation(positions: int, dim: int, device: str, length: float = 1.3) -> torch.Tensor:
    """``[positions, D]`` float32: cosines and sines, made longer as YaRN and LongRoPE do."""
    half = dim // 2
    angles = torch.arange(positions)[:, None] * 1e4 ** -(torch.arange(half).double() / half)
    turns = torch.cat([angles.cos(), angles.sin()], dim=1)
    return (length * turns).float().to(device)


def turned_back(x: torch.Tensor, table: torch.Tensor | None, positions: torch.Tensor) -> Any:
    """``[n, heads, D]`` float64 as they were before their positions turned them."""
    if table is None:
        return x.double()
    cos, sin = table.double().cpu()[positions].chunk(2, dim=1)
    turns = torch.complex(cos, sin)[:, None]
    pairs = torch.complex(*x.double().chunk(2, dim=-1)) / turns
    return torch.cat([pairs.real, pairs.imag], dim=-1)


def part_of(batch: PagedBatch, done: Sequence[int], ends: Sequence[int], device: str) -> PagedBatch:
    """The tokens ``done[r] .. ends[r] - 1`` of each request as prefills."""
    counts = [end - begin for begin, end in zip(done, ends, strict=True)]
    starts = torch.tensor([0, *counts]).cumsum(0)
    return PagedBatch(
        block_table=batch.block_table,
        seq_lens=torch.tensor(ends, dtype=torch.int32, device=device),
        cu_seqlens_q=starts.to(torch.int32).to(device),
        num_decodes=0,
        num_decode_tokens=0,
        decode_query_len=1,
        max_query_len=max(counts),
        max_seq_len=max(ends),
        seq_lens_host=tuple(ends),
        query_lens_host=tuple(counts),
        rotation=batch.rotation,
    )


def write_pages(*arguments: Any, **scales: float) -> None:
    """Keys and values without records, by the kernel where it does not take long."""
    *first, _summary, slots = arguments
    on_gpu = first[0].is_cuda or first[2].dtype == torch.float8_e4m3fn
    (write_launched if on_gpu else write_kv)(*first, None, slots, **scales)


def fill(
    problem: Problem,
    cuts: Sequence[float] = (1.0,),
    scales: tuple[float, float] = (1.0, 1.0),
) -> None:
    """Write every request in parts, each with the means of the cells that it completes."""
    device = str(problem.q.device)
    lengths = [len(keys) for keys in problem.keys]
    done = [0] * len(lengths)
    oracle_check.fill(problem, (1.0,), scales, write=write_pages)
    for cut in cuts:
        ends = [int(length * cut) for length in lengths]
        batch = part_of(problem.batch, done, ends, device)
        infllm_launch.write_means(problem.k_cache, problem.k_summary, batch)
        done = ends


def kept_means(problem: Problem, request: int) -> torch.Tensor:
    """Means ``[cells, Hkv, D]`` float64 that the pages of a request keep of its complete cells."""
    page_size, dim = problem.k_cache.shape[2:]
    slots = problem.slots[request].cpu()
    cells = slots[: len(slots) // CELL_SIZE * CELL_SIZE : CELL_SIZE]
    means = view_means(problem.k_summary.cpu(), page_size, dim)
    return means[cells // page_size, :, cells % page_size // CELL_SIZE].double()


def stored_keys(problem: Problem, request: int) -> torch.Tensor:
    """The request's keys ``[N, Hkv, D]`` float32 as its pages hold them."""
    page_size = problem.k_cache.shape[2]
    slots = problem.slots[request]
    return problem.k_cache.float()[slots // page_size, :, slots % page_size].cpu()


def check_means(problem: Problem) -> None:
    """Every complete cell has the mean of its keys, rounded; other bytes are as they were."""
    page_size, dim = problem.k_cache.shape[2:]
    kept = view_means(problem.k_summary.cpu(), page_size, dim)
    untouched = torch.ones(kept.shape[0], kept.shape[2], dtype=torch.bool)
    for request, slots in enumerate(problem.slots):
        keys = stored_keys(problem, request)
        keys = turned_back(keys, problem.batch.rotation, torch.arange(len(keys)))
        count = len(keys) // CELL_SIZE
        expected = keys[: count * CELL_SIZE].unflatten(0, (-1, CELL_SIZE)).mean(1)
        found = kept_means(problem, request)
        rounding = 2**-8 if problem.q.is_cuda else 2**-7  # the interpreter cuts off
        torch.testing.assert_close(found, expected, rtol=rounding, atol=1e-6)
        cells = slots.cpu()[: count * CELL_SIZE : CELL_SIZE]
        untouched[cells // page_size, cells % page_size // CELL_SIZE] = False
    same = kept.view(torch.int16) == -1
    assert same.transpose(1, 2)[untouched].all()


class Chosen:
    """The kernels' choice of blocks, held to the oracle's scores of the means that pages keep.

    A mean is rounded to bfloat16, which may change a choice between near ties.  So
    the oracle gets, for each key, the rounded mean of its cell: it then averages what kernels do.

    Called as the oracle calls what chooses blocks, it checks the tokens in their order.
    """

    def __init__(self, problem: Problem, policy: SelectionPolicy, k_scale: float = 1.0) -> None:
        self._problem, self._policy, self._k_scale = problem, policy, k_scale
        lengths = zip(*host_lengths(problem.batch), strict=True)
        self.tokens = [
            (request, position)
            for request, (length, count) in enumerate(lengths)
            for position in range(length - count, length)
        ]
        operands = problem.operands(problem.q, k_scale=k_scale)
        both = StepPolicy(policy, policy)
        found = torch.cat(select_phases(operands, problem.batch, both, INDEXERS))
        self.rows = list(found.cpu().clamp(min=-1))
        self._next = iter(range(len(self.tokens)))

    @property
    def _scale(self) -> float:
        return float(self._problem.q.shape[-1] ** -0.5)

    def __call__(self, *_: object) -> list[list[int]] | None:
        return self.of_row(next(self._next))

    def of_row(self, row: int) -> list[list[int]] | None:
        """Blocks that the token in a row of q chose, found to be the best."""
        policy, (request, position), found = self._policy, self.tokens[row], self.rows[row]
        if policy.sees_all(position):
            assert (found == -1).all()
            return None
        table = self._problem.batch.rotation
        q = turned_back(self._problem.q[row : row + 1].cpu(), table, torch.tensor([position]))
        means = kept_means(self._problem, request) * self._k_scale
        keys = means.repeat_interleave(CELL_SIZE, dim=0)
        shares = kernel_shares_reference(q[0], keys, position, self._scale)
        per_block = policy.sel_block_size // CELL_SIZE
        ranks = F.pad(shares, (1, per_block)).unfold(1, per_block + 1, per_block).amax(-1)
        first, last = policy.candidate_range(position)
        for mine, of_head in zip(found.tolist(), ranks, strict=True):
            assert mine == sorted(set(mine))
            assert len(mine) == policy.scored_blocks
            assert set(mine) <= set(range(first, last))
            left = [block for block in range(first, last) if block not in mine]
            assert of_head[mine].min() >= (1 - SLACK) * of_head[left].max()
        return found.tolist()  # type: ignore[no-any-return]


def attend(problem: Problem, policy: SelectionPolicy) -> torch.Tensor:
    """Output of the kernels, whose prefills choose as decodes do."""
    return oracle_check.attend(problem, StepPolicy(policy, policy), indexers=INDEXERS)


def check_rows(
    problem: Problem, policy: SelectionPolicy, out: torch.Tensor, rows: Sequence[int]
) -> None:
    """Some tokens' choice follows the rule, and their output is the attention to what they chose.

    Args:
        out: ``[T, Hq, D]`` of the kernels.
    """
    chosen = Chosen(problem, policy)
    page_size, heads = problem.k_cache.shape[2], problem.k_cache.shape[1]
    for row in rows:
        request, position = chosen.tokens[row]
        slots = problem.slots[request][: position + 1]
        k, v = (
            cache[slots // page_size, :, slots % page_size].double().cpu()
            for cache in (problem.k_cache, problem.v_cache)
        )
        q = problem.q[row : row + 1].cpu().double()
        scale = q.shape[-1] ** -0.5

        def select(*_: object, row: int = row) -> list[list[int]] | None:
            return chosen.of_row(row)

        visible = visible_reference(q, k, [position], policy, scale, select)[0]
        for head, mine in enumerate(q[0].unflatten(0, (heads, -1))):
            logits = mine @ k[visible[head], head].T * scale
            want = logits.softmax(-1) @ v[visible[head], head]
            got = out[row].unflatten(0, (heads, -1))[head].double().cpu()
            assert (got - want).abs().max() <= oracle_check.TOLERANCE[problem.q.dtype]


def check(problem: Problem, policy: SelectionPolicy) -> None:
    """The kernels' choice follows the rule, and their output is attention to what they chose."""
    batch = replace(
        problem.batch,
        block_table=problem.batch.block_table.cpu(),
        seq_lens=problem.batch.seq_lens.cpu(),
        cu_seqlens_q=problem.batch.cu_seqlens_q.cpu(),
        _derived={},
    )
    got = attend(problem, policy).double().cpu()
    want = paged_attention_reference(
        problem.q.cpu(),
        problem.k_cache.cpu(),
        problem.v_cache.cpu(),
        batch,
        StepPolicy(policy, policy),
        select=Chosen(problem, policy),
    )
    assert got.isfinite().all()
    assert (got - want).abs().max() <= oracle_check.TOLERANCE[problem.q.dtype]
