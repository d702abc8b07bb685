"""Serving ops: decode with selection, selection alone, and a prompt prefilled in chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F

from sparsek_backend.bench.ops.paged_inputs import (
    DEFAULTS,
    PagedInputs,
    Step,
    Tile,
    attend_tile,
    make_inputs,
    wrong_selection,
)
from sparsek_backend.bench.ops.paged_lists import Lists, make_lists
from sparsek_backend.bench.ops.paged_records import gate_records, oracle_of, wrong_cells
from sparsek_backend.bench.ops.peers import cpu_attn_paged, fa3_paged
from sparsek_backend.bench.oracle import compare
from sparsek_backend.bench.registry import (
    OURS,
    BenchOp,
    Case,
    GateResult,
    Outputs,
    Provider,
    Unavailable,
)
from sparsek_kernels.paged.api import paged_attention, select_blocks
from sparsek_kernels.paged.index.base import Indexers
from sparsek_kernels.paged.index.two_step import TwoStep
from sparsek_kernels.paged.policy import CELL, CELL_SIZE, SelectionPolicy, StepPolicy, ceil_div
from sparsek_kernels.paged.reference import ranking_queries, sampled_queries

DENSE = SelectionPolicy()
BY_LIST = "sparsek_by_list"
"""Provider name of our kernels where prefills follow lists."""
_GATHER_LIMIT = 1 << 18
"""Most keys over all requests that `sdpa_gather` is asked to gather."""


def _spread(count: int, most: int = 3) -> list[int]:
    picked = min(most, count)
    return sorted({round(i * (count - 1) / max(picked - 1, 1)) for i in range(picked)})


def decode_tiles(inputs: PagedInputs) -> list[Tile]:
    """The last token of a few requests, a KV head each."""
    heads, tiles = inputs.k_cache.shape[1], []
    for turn, request in enumerate(_spread(len(inputs.seq_lens))):
        row, position = sum(inputs.query_lens[: request + 1]) - 1, inputs.seq_lens[request] - 1
        last = (range(row, row + 1), range(position, position + 1))
        tiles.append(Tile(request, turn % heads, *last))
    return tiles


def first_exempt(inputs: PagedInputs) -> int:
    """Position of the first token of the only prompt that ``dense_last`` exempts, or its length."""
    first, _ = inputs.policy.last_rows(inputs.seq_lens[0], inputs.seq_lens[0])
    return int(first)


def prefill_tiles(inputs: PagedInputs) -> list[Tile]:
    """A few whole tiles of the only request, and the last one that ``dense_last`` exempts."""
    size, heads = inputs.policy.query_tile, inputs.k_cache.shape[1]
    tiles = range(inputs.seq_lens[0] // size)
    sparse = [tile for tile in tiles if (tile + 1) * size <= first_exempt(inputs)]
    picked = [sparse[place] for place in _spread(len(sparse), 4)]
    picked += tiles[-1:] if len(sparse) < len(tiles) else []
    return [
        Tile(0, turn % heads, *(2 * [range(tile * size, (tile + 1) * size)]))
        for turn, tile in enumerate(picked)
    ]


def gate_tiles(
    inputs: PagedInputs,
    tiles: Sequence[Tile],
    entry: Entry,
    out: torch.Tensor,
    steps: Sequence[Step],
) -> GateResult:
    """Check a few tiles: the selection by exact scores or lists, then the output over it."""
    policy, lists = entry.policy, entry.lists
    verdict = GateResult(False, "no tile was checked")
    for tile in tiles:
        chosen = torch.empty(0, dtype=torch.int64)
        step = next(step for step in steps if tile.rows.start < step[1].stop)
        is_exempt = policy.dense_last > 0 and tile.rows.start >= first_exempt(inputs)
        rule = DENSE if is_exempt else replace(policy, dense_last=0)
        if rule.selects_blocks and not rule.sees_all(tile.positions[-1]):
            chosen, listed = _chosen(inputs, tile, rule, step, lists)
            if lists is not None:
                wrong = lists.wrong(chosen, inputs, tile, rule)
            else:
                wrong = wrong_selection(chosen, listed, inputs, tile, rule)
            if wrong:
                return GateResult(False, f"request {tile.request} head {tile.head}: {wrong}")
        dtypes = (torch.float64, inputs.q.dtype)
        exact, plain = (attend_tile(inputs, tile, chosen, rule, dtype) for dtype in dtypes)
        verdict = compare(["out"], [inputs.tile_rows(out, tile)], [exact], [plain])
        if not verdict.passed:
            return verdict
    return verdict


def _chosen(
    inputs: PagedInputs, tile: Tile, policy: SelectionPolicy, step: Step, lists: Lists | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Entries of the blocks that our kernels choose for one tile in the step that has it, and of
    its candidates; with ``lists`` there are none.

    The tile alone could be scored by another kernel, whose rounding decides other draws.
    """
    batch, rows = step
    kept: list[torch.Tensor] = []
    found = select_blocks(
        inputs.q[rows], inputs.k_cache, batch, policy, k_summary=inputs.k_summary,
        indexers=Indexers(TwoStep(kept)) if lists is None else lists.indexers,
    )  # fmt: skip
    row = (tile.rows.start - rows.start) // policy.query_tile
    places = policy.places(tile.positions[0])  # lists have room for the deepest tile
    chosen = found[tile.request][row, tile.head, :places].long().cpu()
    if lists is not None:
        return chosen, chosen[:0]
    listed = torch.cat(kept)[row, tile.head, : policy.listed_places(places)]
    return chosen, listed.long().cpu()


def attended_pairs(
    policy: SelectionPolicy, positions: Sequence[int] | range, *, prompt: int = 0
) -> int:
    """Visible (query, key) pairs of one head.

    Args:
        prompt: tokens of the prompt whose last ones ``dense_last`` exempts; 0 for decoded tokens.
    """
    exempt = range(*policy.last_rows(prompt, prompt))
    return sum(p + 1 if p in exempt else policy.attended_tokens(p) for p in positions)


def _decode_positions(inputs: PagedInputs) -> list[int]:
    return [
        position
        for query_len, seq_len in zip(inputs.query_lens, inputs.seq_lens, strict=True)
        for position in range(seq_len - query_len, seq_len)
    ]


def decode_cost(inputs: PagedInputs, policy: SelectionPolicy) -> tuple[float, float]:
    """FLOPs and least bytes: attended K and V, records, queries and outputs."""
    positions = _decode_positions(inputs)
    kv_heads, dim = inputs.k_cache.shape[1], inputs.q.shape[2]
    width = inputs.q.element_size()
    pairs = attended_pairs(policy, positions)
    flops = 4.0 * dim * inputs.q.shape[1] * pairs
    last = [seq_len - 1 for seq_len in inputs.seq_lens]
    kv_bytes = 2.0 * dim * kv_heads * width * attended_pairs(policy, last)
    record_bytes = 0.0
    if policy.selects_blocks:
        vectors = [p // CELL for p in positions if not policy.sees_all(p)]
        flops += 2.0 * dim * inputs.q.shape[1] * sum(vectors)
        scored = sum(p for p in last if not policy.sees_all(p))
        record_bytes = float(kv_heads * scored * inputs.k_summary.shape[2] / inputs.page_size)
    return flops, kv_bytes + record_bytes + 2.0 * inputs.q.numel() * width


def _ours(
    inputs: PagedInputs,
    steps: Sequence[Step],
    policy: SelectionPolicy,
    indexers: Indexers | None = None,
) -> Callable[[], Outputs]:
    out = torch.empty_like(inputs.q)
    k, v, k_summary = inputs.k_cache, inputs.v_cache, inputs.k_summary

    def call() -> Outputs:
        for batch, rows in steps:
            q, part = inputs.q[rows], out[rows]
            paged_attention(
                q, k, v, batch, policy, k_summary=k_summary, out=part, indexers=indexers
            )
        return (out,)

    return call


def _sdpa_gather(inputs: PagedInputs) -> Callable[[], Outputs]:
    """Dense decode without a paged kernel: gather every page, then SDPA."""
    if sum(inputs.seq_lens) > _GATHER_LIMIT:
        raise Unavailable(f"gathering {sum(inputs.seq_lens)} keys is too large")
    if len(set(inputs.seq_lens)) > 1 or set(inputs.query_lens) != {1}:
        raise Unavailable("one query token and equal lengths only")
    length = inputs.seq_lens[0]
    table = inputs.block_table[:, : ceil_div(length, inputs.page_size)].long()

    def call() -> Outputs:
        caches = (inputs.k_cache, inputs.v_cache)
        k, v = (x[table].transpose(1, 2).flatten(2, 3)[:, :, :length] for x in caches)
        out = F.scaled_dot_product_attention(inputs.q[:, :, None], k, v, enable_gqa=True)
        return (out[:, :, 0],)

    return call


@dataclass(frozen=True, eq=False)
class Entry:
    """A provider: its name, what prepares its call, and what it attends."""

    name: str
    prepare: Callable[[], Callable[[], Outputs]]
    policy: SelectionPolicy
    lists: Lists | None = None


def _providers(
    inputs: PagedInputs,
    entries: Sequence[Entry],
    cost: Callable[[Entry], tuple[float, float]],
    steps: Sequence[Step],
) -> list[Provider]:
    """Providers over the same inputs, ours first; a note marks each that attends more than ours.

    ``steps`` are the calls of ours.  With lists a note says what ours attends.
    """
    decode = steps[0][0].num_decodes > 0
    tiles = decode_tiles(inputs) if decode else prefill_tiles(inputs)
    ours = entries[0].policy
    positions = _decode_positions(inputs)
    pairs = attended_pairs(ours, positions, prompt=0 if decode else inputs.seq_lens[0])
    share = pairs / attended_pairs(DENSE, positions)
    says_share = any(entry.lists for entry in entries)

    def gate(outputs: Outputs, entry: Entry) -> GateResult:
        if entry.policy.alignment:
            return gate_records(inputs, tiles, entry.policy, outputs[0], steps[0][0])
        return gate_tiles(inputs, tiles, entry, outputs[0], steps)

    def provider(entry: Entry) -> Provider:
        policy = entry.policy
        flops, num_bytes = cost(entry)
        note = "dense" if policy.is_dense and not ours.is_dense else ""
        if policy is ours and says_share:
            note = f"attends {share:.1%} of the keys"
        return Provider(
            name=entry.name,
            prepare=entry.prepare,
            gate=lambda outputs: gate(outputs, entry),
            flops=flops,
            bytes=num_bytes,
            note=note,
            reads_only=decode,
        )

    return [provider(entry) for entry in entries]


def _of_tokens(inputs: PagedInputs) -> SelectionPolicy:
    """The policy of decoded tokens: as many tokens as a tile of the case, by records."""
    return StepPolicy.of(inputs.policy).decode


def _build_decode(case: Case, device: torch.device) -> list[Provider]:
    inputs = make_inputs(case, device)
    step = inputs.whole_step(len(inputs.seq_lens))
    dense = (inputs.q, inputs.k_cache, inputs.v_cache, inputs.whole_step(0))
    entries = [
        Entry(OURS, lambda: _ours(inputs, step, inputs.policy), _of_tokens(inputs)),
        Entry("sparsek_dense", lambda: _ours(inputs, step, DENSE), DENSE),
        Entry("fa3", lambda: fa3_paged(*dense), DENSE),
        Entry("cpu_attn", lambda: cpu_attn_paged(*dense), DENSE),
        Entry("sdpa_gather", lambda: _sdpa_gather(inputs), DENSE),
    ]
    return _providers(inputs, entries, lambda entry: decode_cost(inputs, entry.policy), step)


def _build_select(case: Case, device: torch.device) -> list[Provider]:
    inputs = make_inputs(case, device)
    policy = _of_tokens(inputs)
    batch = inputs.batch(inputs.query_lens, inputs.seq_lens, len(inputs.seq_lens))
    positions = _decode_positions(inputs)
    if any(policy.sees_all(position) for position in positions):
        raise ValueError(f"spec: {case.spec.text} is within the budget, nothing would be selected")
    flops = 2.0 * (sum(positions) // CELL) * inputs.q.shape[1] * inputs.q.shape[2]
    kept = inputs.k_cache.shape[1] * inputs.k_summary.shape[2] / inputs.page_size
    num_bytes = float(sum(positions) * kept)

    def call() -> Outputs:
        q, k, k_summary = inputs.q, inputs.k_cache, inputs.k_summary
        return tuple(select_blocks(q, k, batch, policy, k_summary=k_summary))

    def gate(outputs: Outputs) -> GateResult:
        for tile in decode_tiles(inputs):
            chosen = outputs[tile.request][-1, tile.head].cpu()
            if wrong := wrong_cells(chosen, oracle_of(inputs, tile, policy)):
                return GateResult(False, f"request {tile.request} head {tile.head}: {wrong}")
        return GateResult(True, "cells are the best by exact score")

    return [Provider(OURS, lambda: call, gate, flops, num_bytes, reads_only=True)]


def _build_prefill(case: Case, device: torch.device) -> list[Provider]:
    if case.spec.num_requests != 1 or case.spec.query_lens != case.spec.seq_lens:
        raise ValueError(f"spec: expected one whole prompt such as q128k, got {case.spec.text!r}")
    inputs = make_inputs(case, device)
    length, chunk = inputs.seq_lens[0], case.int_param("chunk")
    bounds = [(start, min(start + chunk, length)) for start in range(0, length, chunk)]
    if chunk % inputs.policy.query_tile:
        raise ValueError(
            f"chunk: expected a multiple of query_tile {inputs.policy.query_tile}, got {chunk}"
        )
    policy, tile = inputs.policy, inputs.policy.query_tile
    if tile == 1:
        raise ValueError("query_tile: expected more than 1, which shares a selection, got 1")
    if policy.dense_last and (policy.dense_last % tile or length % tile):
        raise ValueError(
            f"dense_last: expected 0, or whole tiles of {tile} in a prompt of whole tiles, got "
            f"{policy.dense_last} of {length} tokens"
        )
    chunks, lists = inputs.chunks(bounds), make_lists(case, inputs)
    tensors = (inputs.q, inputs.k_cache, inputs.v_cache)
    entries = [
        Entry(OURS, lambda: _ours(inputs, chunks, policy), policy),
        Entry("fa3", lambda: fa3_paged(*tensors, inputs.whole_step(0)), DENSE),
        Entry("fa3_chunked", lambda: fa3_paged(*tensors, chunks), DENSE),
    ]
    if lists is not None:
        followed = partial(_ours, inputs, chunks, policy, lists.indexers)
        by_list = Entry(BY_LIST, followed, policy, lists)
        entries.insert(1, by_list)

    def cost(entry: Entry) -> tuple[float, float]:
        """FLOPs and least bytes of the prompt, prefilled from bound to bound."""
        heads, kv_heads, dim = inputs.q.shape[1], inputs.k_cache.shape[1], inputs.q.shape[2]
        kv_bytes = 2.0 * kv_heads * length * dim
        pairs = attended_pairs(entry.policy, range(length), prompt=length)
        flops = 4.0 * dim * heads * pairs
        if entry.policy.selects_blocks and entry.lists is None:
            sparse = [(start, min(end, first_exempt(inputs))) for start, end in bounds]
            parts = [part for part in sparse if part[0] < part[1]]
            scored, read = scoring_cost(entry.policy, parts)
            flops += 2.0 * dim * heads * scored
            kv_bytes += kv_heads * dim * read
        return flops, (kv_bytes + 2.0 * inputs.q.numel()) * inputs.q.element_size()

    return _providers(inputs, entries, cost, chunks)


def scoring_cost(policy: SelectionPolicy, chunks: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Cost of choosing the blocks of a prompt: products of a query head, and keys read.

    Some queries score the means of the cells before their own block, for which the keys of a
    chunk's context are read once, some the keys of their tile's list.
    """
    scored = read = 0
    tile, size = policy.query_tile, policy.sel_block_size
    for start, end in chunks:
        if not policy.sees_all(end - 1):
            read += end
        for base in range(start - start % tile, end, tile):
            if policy.sees_all(base):
                continue
            positions = range(max(base, start), min(base + tile, end))
            samples = [positions[row] for row in sampled_queries(positions, policy)]
            scored += sum(p // size * (size // CELL_SIZE) for p in samples)
            first, last = policy.candidate_range(base)
            blocks = policy.sink_blocks + policy.local_blocks
            blocks += min(policy.listed_places(policy.places(base)), last - first)
            scored += len(ranking_queries(positions, policy)) * blocks * size
            read += blocks * size
    return scored, read


OPS = (
    BenchOp("paged_decode", "a decode step, selection included", DEFAULTS, _build_decode),
    BenchOp("paged_select", "the block selection of a decode step alone", DEFAULTS, _build_select),
    BenchOp(
        "paged_prefill",
        "one prompt prefilled in chunks, selection included",
        {**DEFAULTS, "chunk": 16384, "lists": "", "layer": 0},
        _build_prefill,
    ),
)
