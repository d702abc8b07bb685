"""Paged inputs of the serving ops, and a check of a few tiles of them against the fp64 oracles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from sparsek_backend.bench.oracle import MaskRule, attend_head
from sparsek_backend.bench.registry import HEADS, Case
from sparsek_kernels.paged.batch import PagedBatch
from sparsek_kernels.paged.index.page_records import write_records
from sparsek_kernels.paged.lengths import batch_of_lengths
from sparsek_kernels.paged.pages import summary_bytes
from sparsek_kernels.paged.policy import SEGMENT, Growth, SelectionPolicy, ceil_div
from sparsek_kernels.paged.reference import (
    candidates_reference,
    logs_reference,
    select_tile_reference,
)
from sparsek_kernels.paged.sample_reference import Choice, list_error

DEFAULTS = HEADS | {
    "page_size": 64,
    "num_sink": 64,
    "window_size": 512,
    "top_k": 32,
    "top_k_deep": 0,  # 0: all tiles choose top_k
    "sel_block_size": 64,
    "query_tile": 64,
    "dense_below": 0,
    "dense_last": 0,
    "max_len": 0,
    "seed": 0,
}

_POLICY_SIZES = (
    *("num_sink", "window_size", "top_k", "sel_block_size"),
    *("dense_below", "dense_last", "query_tile"),
)
_PAGES_AT_A_TIME = 1 << 12


@dataclass(frozen=True)
class Tile:
    """Query rows that share one selection, on one KV head."""

    request: int
    head: int
    rows: range
    positions: range


Step = tuple[PagedBatch, slice]
"""One call of a serving op: its batch, and its rows of the queries."""


@dataclass(frozen=True)
class PagedInputs:
    """A filled cache and the queries over it."""

    q: torch.Tensor  # [T, Hq, D], packed
    k_cache: torch.Tensor  # [P, Hkv, page_size, D], a strided view of the pages
    v_cache: torch.Tensor  # [P, Hkv, page_size, D], a strided view of the same pages
    # [P, Hkv, summary_bytes] uint8, a strided view of the tail of each page: records where pages
    # hold whole segments
    k_summary: torch.Tensor
    block_table: torch.Tensor  # [R, max pages] int32, pages in random order
    query_lens: tuple[int, ...]  # new tokens of each request
    seq_lens: tuple[int, ...]  # keys of each request
    policy: SelectionPolicy  # what a query attends
    # longest context that a launch must serve, as in a graph that a server captures; the longest of
    # the batch where that is longer
    max_len: int = 0

    @property
    def page_size(self) -> int:
        return self.k_cache.shape[2]

    @property
    def group(self) -> int:
        return self.q.shape[1] // self.k_cache.shape[1]

    @property
    def softmax_scale(self) -> float:
        return float(self.q.shape[2] ** -0.5)

    def batch(
        self, query_lens: tuple[int, ...], seq_lens: tuple[int, ...], decodes: int
    ) -> PagedBatch:
        """A step over the first requests of the block table."""
        return batch_of_lengths(
            self.block_table, query_lens, seq_lens, decodes=decodes, max_len=self.max_len
        )

    def whole_step(self, decodes: int) -> list[Step]:
        """All requests in one step, the first ``decodes`` of which are decodes."""
        batch = self.batch(self.query_lens, self.seq_lens, decodes)
        return [(batch, slice(0, self.q.shape[0]))]

    def chunks(self, bounds: Sequence[tuple[int, int]]) -> list[Step]:
        """The only request, prefilled from bound to bound."""
        steps = []
        for start, end in bounds:
            batch = self.batch((end - start,), (end,), 0)
            batch = replace(batch, prompt_left_host=(self.seq_lens[0] - end,))
            steps.append((batch, slice(start, end)))
        return steps

    def tile_rows(self, x: torch.Tensor, tile: Tile) -> torch.Tensor:
        """A tile's rows of a tensor [T, Hq, D], and the query heads of its KV head."""
        heads = slice(tile.head * self.group, (tile.head + 1) * self.group)
        return x[tile.rows.start : tile.rows.stop, heads]

    def keys_of(self, request: int, head: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one request and KV head, contiguous: [seq_len, D] each."""
        length = self.seq_lens[request]
        pages = self.block_table[request, : ceil_div(length, self.page_size)].long()
        k, v = (cache[pages, head].flatten(0, 1)[:length] for cache in (self.k_cache, self.v_cache))
        return k, v

    def of_tile(self, tile: Tile) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        """Queries [rows, G, D], keys [seq_len, 1, D] and positions, as the oracles take them."""
        k, _ = self.keys_of(tile.request, tile.head)
        return self.tile_rows(self.q, tile), k[:, None], list(tile.positions)


def shuffled_pages(counts: Sequence[int], width: int, generator: torch.Generator) -> torch.Tensor:
    """Block table ``[requests, width]`` int32 of requests with ``counts`` pages in random order."""
    device = generator.device
    order = torch.randperm(sum(counts), generator=generator, device=device).to(torch.int32)
    table = torch.zeros(len(counts), width, dtype=torch.int32, device=device)
    for request, own in enumerate(torch.split(order, list(counts))):
        table[request, : len(own)] = own
    return table


def make_inputs(case: Case, device: torch.device) -> PagedInputs:
    """Random pages in random order, and their summaries.

    Random keys give every head a selection of its own: no block is shared by luck.
    """
    sizes: dict[str, Any] = {name: case.int_param(name) for name in _POLICY_SIZES}
    if deep := case.int_param("top_k_deep"):
        sizes["growth"] = Growth.by(deep - sizes["top_k"], sizes["sel_block_size"])
    policy = SelectionPolicy(**sizes)
    heads, dim, page = (case.int_param(n) for n in ("num_kv_heads", "head_dim", "page_size"))
    counts = [ceil_div(length, page) for length in case.spec.seq_lens]
    generator = torch.Generator(device=device).manual_seed(case.int_param("seed"))
    dtype, tail = case.dtype(), summary_bytes(page, dim)
    kv_size, kept = heads * page * 2 * dim, heads * tail // dtype.itemsize
    tail_size = ceil_div(kept, 2 * dim) * 2 * dim  # whole rows of K and V, as in a server's pages
    pages = torch.empty(sum(counts), kv_size + tail_size, device=device, dtype=dtype)
    kv = pages[:, :kv_size].view(-1, heads, page, 2 * dim)
    k_cache, v_cache = kv[..., :dim], kv[..., dim:]
    k_summary = pages[:, kv_size : kv_size + kept].view(torch.uint8)
    k_summary = torch.unflatten(k_summary, 1, (heads, tail))
    for start in range(0, len(pages), _PAGES_AT_A_TIME):
        part = slice(start, start + _PAGES_AT_A_TIME)
        kv[part] = torch.randn(kv[part].shape, generator=generator, device=device).to(pages.dtype)
    if page % SEGMENT == 0:
        write_records(k_cache, k_summary, torch.arange(len(pages) * page, device=device))
    max_len = case.int_param("max_len")
    table = shuffled_pages(counts, max(*counts, ceil_div(max_len, page)), generator)
    tokens = case.spec.total_query_tokens
    shape = (tokens, case.int_param("num_heads"), dim)
    q = torch.randn(shape, generator=generator, device=device)
    return PagedInputs(
        q=q.to(pages.dtype),
        k_cache=k_cache,
        v_cache=v_cache,
        k_summary=k_summary,
        block_table=table,
        query_lens=case.spec.query_lens,
        seq_lens=case.spec.seq_lens,
        policy=policy,
        max_len=max_len,
    )


_LIST_ERROR, _MASS_ERROR = 0.05, 0.02
"""Most relative errors of scores: means are rounded, and products have 16 bits."""


def wrong_selection(
    chosen: torch.Tensor,
    listed: torch.Tensor,
    inputs: PagedInputs,
    tile: Tile,
    policy: SelectionPolicy,
) -> str:
    """Why a tile's chosen blocks do not follow the rule, or an empty string.

    Args:
        chosen: ``[scored_blocks]`` entries.
        listed: ``[listed_blocks]`` entries of the tile's candidates.
    """
    of_tile = (*inputs.of_tile(tile), policy, inputs.softmax_scale)
    with inputs.q.device:
        named = on_cpu(candidates_reference(*of_tile))
        ranked = on_cpu(select_tile_reference(*of_tile, [listed.tolist()]))
    wrong = list_error(named, 0, listed.tolist(), _LIST_ERROR)
    return wrong or list_error(ranked, 0, chosen.tolist(), _MASS_ERROR)


def on_cpu(choice: Choice) -> Choice:
    """The choice with its tensors on the CPU."""
    moved: dict[str, Any] = {k: x.cpu() for k, x in choice._asdict().items() if torch.is_tensor(x)}
    return choice._replace(**moved)


def attend_tile(
    inputs: PagedInputs,
    tile: Tile,
    chosen: torch.Tensor,
    policy: SelectionPolicy,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Attention of one tile over sinks, chosen and local blocks in `dtype`: [rows, G, D].

    Args:
        chosen: ``[scored_blocks]`` entries.
    """
    q, k, positions = inputs.of_tile(tile)
    _, v = inputs.keys_of(tile.request, tile.head)
    listed, scale = [chosen.tolist()], inputs.softmax_scale
    with q.device:
        logs = logs_reference(q, k, positions, policy, scale, lambda *_: listed)[:, 0]
    every = MaskRule(causal=False)
    outputs = []
    for row, mine in zip(q, logs, strict=True):
        seen = mine > -math.inf
        options = {"dtype": dtype, "softmax_scale": scale, "logs": mine[seen]}
        outputs += attend_head(row[None], k[seen, 0], v[seen], every, **options)
    return torch.cat(outputs)
