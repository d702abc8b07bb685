"""Filling caches and comparing attention with the float64 oracle."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from problems import Problem

from sparsek_kernels.paged.api import write_kv
from sparsek_kernels.paged.batch import host_lengths
from sparsek_kernels.paged.launch import attend as launch
from sparsek_kernels.paged.policy import SelectionPolicy
from sparsek_kernels.paged.reference import (
    best,
    candidate_scores_reference,
    competing_reference,
    exact_scores_reference,
    hadamard_reference,
    list_range_reference,
    paged_attention_reference,
    sampled_queries,
    select_blocks_reference,
    sketch_reference,
    tiles_of,
)
from sparsek_kernels.paged.sketch import (
    VECTOR_SIZE,
    checksums,
    code_scales,
    read_vectors,
    view_rows,
)
from tests.kernels.rounded_query import rounded
from tests.kernels.worst_sketch import worst_sketch

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
    write = write or (launch.write_kv if problem.k_cache.is_cuda else write_kv)
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
            problem.k_summary,
            torch.cat([*slots, pad]),
            k_scale=scales[0],
            v_scale=scales[1],
        )


def check_sketch(problem: Problem, keys: list[torch.Tensor]) -> None:
    """Whole vectors equal the oracle's, but for one level in a thousand that was a tie.

    Args:
        keys: stored keys ``[N, Hkv, D]`` of each request.
    """
    page_size, dim = problem.k_cache.shape[2:]
    summary = problem.k_summary.cpu()
    scales = code_scales(checksums(view_rows(summary, page_size, dim)))
    kept = read_vectors(summary, page_size, dim)  # [P, Hkv, vectors, D]
    moved = []
    for rows, slots in zip(keys, problem.slots, strict=True):
        expected = sketch_reference(rows.cpu()) @ hadamard_reference(dim)
        slot = slots.cpu()
        page, vector = slot // page_size, slot % page_size // VECTOR_SIZE
        found = kept[page, :, vector][::VECTOR_SIZE][: expected.shape[0]].double()
        scale = scales[page, :, vector][::VECTOR_SIZE][: expected.shape[0], :, None]
        moved.append(((found - expected).abs() / scale).flatten())
    levels = torch.cat(moved)
    assert (levels < 1.01).all()
    assert (levels > 0.01).sum() <= 1e-3 * levels.numel()


def check_cache(problem: Problem) -> None:
    """Rows are stored exactly, the sketch equals the oracle's, and the rest is untouched."""
    page_size = problem.k_cache.shape[2]
    check_sketch(problem, problem.keys)
    for request, (k, v) in enumerate(zip(problem.keys, problem.values, strict=True)):
        slot = problem.slots[request]
        page, row = slot // page_size, slot % page_size
        torch.testing.assert_close(problem.k_cache[page, :, row], k, rtol=0, atol=0)
        torch.testing.assert_close(problem.v_cache[page, :, row], v, rtol=0, atol=0)
    used = torch.cat([slot // page_size for slot in problem.slots]).unique()
    spare = torch.ones(problem.k_cache.shape[0], dtype=torch.bool, device=problem.q.device)
    spare[used] = False
    assert problem.k_cache[spare].isnan().all()
    poison = worst_sketch(*problem.k_cache.shape[2:]).to(problem.q.device)
    assert (problem.k_summary[spare] == poison).all()


def attend(
    problem: Problem,
    policy: SelectionPolicy,
    sinks: torch.Tensor | None = None,
    *,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """Output of the kernels; rows nobody wrote stay NaN."""
    out = torch.full_like(problem.q, float("nan"))
    operands = problem.operands(out, sinks=sinks)
    rule = policy.per_token() if policy.query_tile == 1 else policy
    launch.paged_attention(operands, problem.batch, rule, batch_invariant=batch_invariant)
    return out


def expected(
    problem: Problem,
    policy: SelectionPolicy,
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
    """The kernels' choice of blocks, each found to follow the rule but for near ties.

    Means of keys are rounded to the dtype of q, and sums have another order: scores that differ by
    little may stand in for each other.
    """

    LIST_SLACK, MASS_SLACK = 0.1, 0.03

    def __init__(self, problem: Problem, policy: SelectionPolicy, k_scale: float = 1.0) -> None:
        self._k_scale = k_scale
        rule = policy.per_token() if policy.query_tile == 1 else policy
        decodes, prefills = launch.select_blocks(
            problem.q,
            problem.k_cache,
            problem.batch,
            rule,
            k_summary=problem.k_summary,
            softmax_scale=problem.q.shape[-1] ** -0.5,
            k_scale=k_scale,
        )
        _, counts = host_lengths(problem.batch)
        first = problem.batch.num_decodes
        self._tokens = iter(decodes[: sum(counts[:first])].cpu().clamp(min=-1))
        self._tiles = iter(prefills.cpu().clamp(min=-1).split(rule.tiles_per_list))
        self._single = sum(counts[:first])

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        positions: list[int],
        policy: SelectionPolicy,
        softmax_scale: float,
    ) -> dict[int, list[list[int]] | None]:
        if policy.query_tile == 1:
            (position,) = positions
            self._single -= 1
            found = next(self._tokens) if self._single >= 0 else next(self._tiles)[0]
            return {position: self._single_token(found, q, k, position, policy, softmax_scale)}
        selected: dict[int, list[list[int]] | None] = {}
        scores: torch.Tensor | None = None
        run = next(self._tiles)  # [tiles of the list, Hkv, scored_blocks]
        for tile, rows in tiles_of(positions, policy).items():
            found, mine = run[tile % policy.tiles_per_list], [positions[row] for row in rows]
            if policy.sees_all(mine[0]):
                assert (found == -1).all()
                selected[tile] = None
            elif policy.scored_blocks == 0:
                selected[tile] = [[] for _ in found]
            else:
                if scores is None:
                    scores = candidate_scores_reference(q, k, positions, policy, softmax_scale)
                floor = self._floor(q, k, positions, policy)
                selected[tile] = self._of_tile(
                    found, scores, floor, q[rows], k, mine, policy, softmax_scale
                )
        return selected

    def _floor(
        self, q: torch.Tensor, k: torch.Tensor, positions: list[int], policy: SelectionPolicy
    ) -> float:
        """Least score of a candidate."""
        samples = [positions[row] for row in sampled_queries(positions, policy)]
        scored = sum(not policy.sees_all(position) for position in samples)
        return policy.min_mass * scored * q.shape[1] / k.shape[1]

    def _single_token(
        self,
        found: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        position: int,
        policy: SelectionPolicy,
        softmax_scale: float,
    ) -> list[list[int]] | None:
        if policy.sees_all(position):
            assert (found == -1).all()
            return None
        if policy.scored_blocks == 0:
            return [[] for _ in found]
        # the sketch is of what the cache holds
        stored, scaled = k.double() / self._k_scale, rounded(q) * self._k_scale
        scores = candidate_scores_reference(scaled, stored, [position], policy, softmax_scale)
        return self._of_token(found, scores, position, policy, q.shape[1] // k.shape[1])

    def _of_tile(
        self,
        found: torch.Tensor,
        scores: torch.Tensor,
        listed_floor: float,
        q: torch.Tensor,
        k: torch.Tensor,
        positions: list[int],
        policy: SelectionPolicy,
        softmax_scale: float,
    ) -> list[list[int]]:
        """Blocks of one tile: the best, by exact masses, of what is surely listed.

        Args:
            scores: ``[Hkv, blocks]``, by which candidates are found.
            listed_floor: least score of a candidate.
        """
        first, last = list_range_reference(positions, policy)
        between = set(competing_reference([[]], positions[0], policy)[0])
        count = min(policy.listed_blocks, last - first)
        places = policy.head_places or (policy.scored_blocks,) * len(found)
        kept = [[block for block in row if block >= 0] for row in found.tolist()]
        samples = sampled_queries(positions, policy)
        floor = policy.min_mass * len(samples) * q.shape[1] / k.shape[1]
        for head, mine in enumerate(kept):
            assert mine == sorted(set(mine))
            assert len(mine) == places[head] or (floor and len(mine) < places[head])
            assert (found[head, len(mine) :] == -1).all()
            row = scores[head, first:last]
            least = max(float(row.topk(count).values[-1]) if count else 0.0, listed_floor)
            low, high = (1 - self.LIST_SLACK) * least, (1 + self.LIST_SLACK) * least
            everything = count == last - first and not floor
            surely, perhaps = (
                between | {first + int(b) for b in (everything | (row >= bound)).nonzero()}
                for bound in (high, low)
            )
            assert set(mine) <= perhaps
            # shares depend a little on which of the near ties are listed
            lists = (
                perhaps,
                surely | set(mine),
                between | (set(best(scores[head], range(first, last), count)) & perhaps),
            )
            assert any(
                self._are_best(
                    mine,
                    surely,
                    exact_scores_reference(
                        q, k, positions, [sorted(some)] * len(scores), policy, softmax_scale
                    )[head],
                    floor,
                    len(mine) == places[head],
                    self.MASS_SLACK,
                )
                for some in lists
            )
        return kept

    def _of_token(
        self,
        found: torch.Tensor,
        scores: torch.Tensor,
        position: int,
        policy: SelectionPolicy,
        group: int,
    ) -> list[list[int]]:
        """Blocks of one token, which are the best by the sketch for its rounded query."""
        first, last = policy.candidate_range(position)
        everyone = set(range(first, last))
        chosen = []
        for head, row in enumerate(found.tolist()):
            mine = [block for block in row if block >= 0]
            places = (policy.head_places or (policy.scored_blocks,) * len(found))[head]
            floor = policy.min_mass * group
            assert mine == sorted(set(mine))
            assert set(mine) <= everyone
            assert len(mine) == places or (floor and len(mine) < places)
            assert row[len(mine) :] == [-1] * (len(row) - len(mine))
            full = len(mine) == places
            assert self._are_best(mine, everyone, scores[head], floor, full, self.MASS_SLACK)
            chosen.append(mine)
        return chosen

    def _are_best(
        self,
        mine: list[int],
        surely: set[int],
        masses: torch.Tensor,
        floor: float,
        full: bool,
        slack: float,
    ) -> bool:
        """Whether no block that is surely listed has clearly more mass than one of ``mine``.

        Nor has one of ``mine`` clearly less than ``floor``, or, where places are left, another
        clearly more.
        """
        rest = sorted(surely - set(mine))
        low, high = 1 - slack, 1 + slack
        worst = float(masses[mine].min()) if mine else float("inf")
        best_left = float(masses[rest].max()) if rest else 0.0
        if worst < low * floor:
            return False
        return worst >= low * best_left if full else best_left <= high * floor


def check(problem: Problem, policy: SelectionPolicy, sinks: torch.Tensor | None = None) -> None:
    """Kernels against the oracle, at the dtype's tolerance, every row written."""
    fill(problem)
    check_cache(problem)
    got = attend(problem, policy, sinks).double().cpu()
    chosen = Chosen(problem, policy) if policy.selects_blocks else None
    want = expected(problem, policy, sinks, chosen)
    assert got.isfinite().all()
    error = (got - want).abs().max().item()
    limit = TOLERANCE[problem.q.dtype]
    assert error <= limit, f"largest error {error:.3g} over the limit {limit:.3g}"
