"""Filling caches and comparing attention with the float64 oracle."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from problems import Problem, attend_phases, select_phases

from sparsek_kernels.paged.api import write_kv
from sparsek_kernels.paged.index.base import Indexers
from sparsek_kernels.paged.index.two_step import TwoStep
from sparsek_kernels.paged.policy import SEGMENT, SelectionPolicy, StepPolicy
from sparsek_kernels.paged.reference import (
    candidates_reference,
    paged_attention_reference,
    select_blocks_reference,
    select_tile_reference,
)
from sparsek_kernels.paged.sample_reference import list_error
from tests.kernels.launched import run_launched, write_launched

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def fill(
    problem: Problem,
    cuts: tuple[float, ...] = (0.37, 0.71, 1.0),
    scales: tuple[float, float] = (1.0, 1.0),
    write: Callable[..., None] | None = None,
) -> None:
    """Write every request's rows in several batches, with padding slots between.

    The kernel writes caches on a GPU, and the torch path those on a CPU, unless ``write`` says
    otherwise: in the interpreter the kernel takes longer than all that reads the cache.
    """
    write = write or (write_launched if problem.k_cache.is_cuda else write_kv)
    has_records = problem.k_cache.shape[2] % SEGMENT == 0
    done = [0] * len(problem.keys)
    for cut in cuts:
        keys, values, slots = [], [], []
        for row, k in enumerate(problem.keys):
            end = int(k.shape[0] * cut)
            keys.append(k[done[row] : end])
            values.append(problem.values[row][done[row] : end])
            slots.append(problem.slots[row][done[row] : end])
            done[row] = end
        pad = torch.full((2,), -1, dtype=torch.int64, device=problem.q.device)
        nothing = torch.full_like(problem.keys[0][:1], float("nan")).expand(2, -1, -1)
        write(
            torch.cat([*keys, nothing]),
            torch.cat([*values, nothing]),
            problem.k_cache,
            problem.v_cache,
            problem.k_summary if has_records else None,
            torch.cat([*slots, pad]),
            k_scale=scales[0],
            v_scale=scales[1],
        )


def check_cache(problem: Problem) -> None:
    """Rows are stored exactly, and the rest is untouched."""
    page_size = problem.k_cache.shape[2]
    for request, (k, v) in enumerate(zip(problem.keys, problem.values, strict=True)):
        slot = problem.slots[request]
        page, row = slot // page_size, slot % page_size
        torch.testing.assert_close(problem.k_cache[page, :, row], k, rtol=0, atol=0)
        torch.testing.assert_close(problem.v_cache[page, :, row], v, rtol=0, atol=0)
    used = torch.cat([slot // page_size for slot in problem.slots]).unique()
    spare = torch.ones(problem.k_cache.shape[0], dtype=torch.bool, device=problem.q.device)
    spare[used] = False
    assert problem.k_cache[spare].isnan().all()
    assert (problem.k_summary[spare] == 255).all()


def attend(
    problem: Problem,
    policy: SelectionPolicy | StepPolicy,
    sinks: torch.Tensor | None = None,
    indexers: Indexers | None = None,
    *,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """Output of the kernels; rows nobody wrote stay NaN."""
    out = torch.full_like(problem.q, float("nan"))
    operands = problem.operands(out, sinks=sinks)
    if batch_invariant:
        run_launched(operands, problem.batch, policy, indexers, batch_invariant=True)
    else:
        attend_phases(operands, problem.batch, policy, indexers)
    return out


def expected(
    problem: Problem,
    policy: SelectionPolicy | StepPolicy,
    sinks: torch.Tensor | None = None,
    chosen: Chosen | None = None,
) -> torch.Tensor:
    """The oracle's output, computed on the CPU.

    Args:
        chosen: blocks of the kernels' choice to attend; by default the oracle's own.
    """
    batch = dataclasses.replace(
        problem.batch,
        block_table=problem.batch.block_table.cpu(),
        seq_lens=problem.batch.seq_lens.cpu(),
        cu_seqlens_q=problem.batch.cu_seqlens_q.cpu(),
        _derived={},
    )
    return paged_attention_reference(
        problem.q.cpu(),
        problem.k_cache.cpu(),
        problem.v_cache.cpu(),
        batch,
        policy,
        sinks=None if sinks is None else sinks.cpu(),
        select=select_blocks_reference if chosen is None else chosen,
    )


class Chosen:
    """The kernels' choice of prefills' blocks, found to follow the rule but for rounding.

    Means of keys are rounded to the dtype of q, and sums have another order: scores are a little
    off, and then other samples are drawn.  The kernels' own candidates must be a sample by such
    scores (``list_error``), and their blocks a sample of these candidates.
    """

    LIST_ERROR, MASS_ERROR = 0.1, 0.03

    def __init__(
        self, problem: Problem, policy: SelectionPolicy | StepPolicy, k_scale: float = 1.0
    ) -> None:
        operands = problem.operands(problem.q, k_scale=k_scale)
        batch = problem.batch
        prefills = batch.part(batch.num_decodes, batch.num_requests)
        kept: list[torch.Tensor] = []
        chosen = select_phases(operands, prefills, policy, Indexers(TwoStep(kept)))
        self._listed = iter(torch.cat(kept).tolist() if kept else [])
        self._tiles = iter([tile for mine in chosen for tile in mine.cpu()])

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        positions: list[int],
        policy: SelectionPolicy,
        softmax_scale: float,
    ) -> list[list[int]] | None:
        if policy.alignment:  # a decoded token's
            return select_blocks_reference(q, k, positions, policy, softmax_scale)
        found = next(self._tiles)  # [Hkv, scored_blocks]
        listed = next(self._listed, [])
        if policy.sees_all(positions[0]):
            assert (found == -1).all()
            return None
        if policy.scored_blocks == 0:
            return [[] for _ in found]
        places = policy.places(positions[0])
        most = policy.listed_places(places)
        assert (found[:, places:] == -1).all()  # the room of deeper tiles
        found, listed = found[:, :places], [row[:most] for row in listed]
        rule = (q, k, positions, policy, softmax_scale)
        named = candidates_reference(*rule)
        wrong = [list_error(named, head, mine, self.LIST_ERROR) for head, mine in enumerate(listed)]
        ranked = select_tile_reference(*rule, listed)
        mine = found.tolist()
        wrong += [list_error(ranked, head, row, self.MASS_ERROR) for head, row in enumerate(mine)]
        assert not any(wrong), wrong
        return mine


def without_records(policy: SelectionPolicy) -> StepPolicy:
    """The policy of prompts; decoded tokens attend everything where these select blocks."""
    if not policy.selects_blocks:
        return StepPolicy.of(policy)
    return StepPolicy(policy, SelectionPolicy(sel_block_size=policy.sel_block_size))


def check(problem: Problem, policy: SelectionPolicy, sinks: torch.Tensor | None = None) -> None:
    """Kernels against the oracle, at the dtype's tolerance, every row written.

    Where prompts select blocks, decoded tokens attend everything: ``test_page_records`` has theirs.
    """
    fill(problem)
    check_cache(problem)
    rule = without_records(policy)
    got = attend(problem, rule, sinks).double().cpu()
    prefills = problem.batch.num_prefills > 0
    chosen = Chosen(problem, rule) if policy.selects_blocks and prefills else None
    want = expected(problem, rule, sinks, chosen)
    assert got.isfinite().all()
    error = (got - want).abs().max().item()
    limit = TOLERANCE[problem.q.dtype]
    assert error <= limit, f"largest error {error:.3g} over the limit {limit:.3g}"
