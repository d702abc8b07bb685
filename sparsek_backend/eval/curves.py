"""Exact attention mass that each KV head misses, as a function of its budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch

from sparsek_backend.eval.layers import LayerReader
from sparsek_backend.eval.mass import block_masses
from sparsek_kernels.paged import PagedBatch, select_blocks, summary_bytes, write_kv
from sparsek_kernels.paged.policy import SelectionPolicy, ceil_div

Head = tuple[int, int]
"""Layer and KV head."""

_TILES = 8
"""Tiles of a prompt whose selection is measured, evenly spread."""
_TILE_ROWS = 8
"""Queries of such a tile whose masses are computed."""
_TOKENS = 8
"""Single tokens that are measured, evenly spread; and as many at the prompt's end."""


@dataclass(frozen=True)
class Curves:
    """Missed mass of every KV head at some budgets.

    Args:
        levels: budgets (``top_k``), ascending.
        missed: for each head, what it misses at each level: 0 is nothing, 1 everything.
    """

    levels: tuple[int, ...]
    missed: dict[Head, list[float]] = field(default_factory=dict)


def sampled_positions(length: int, policy: SelectionPolicy) -> tuple[list[int], list[int]]:
    """First positions of the sampled tiles, and positions of the sampled tokens.

    None of them sees everything under ``policy``, which has the smallest budget.

    Raises:
        ValueError: every query of a prompt of this length does.
    """
    tile = policy.query_tile
    tiles = [base for base in range(0, length - tile + 1, tile) if not policy.sees_all(base)]
    single = policy.per_token()
    first = next((i for i in range(length) if not single.sees_all(i)), length)
    if not tiles or first == length:
        raise ValueError(
            f"length: expected more tokens than the smallest budget covers, got {length}; raise "
            "--length or lower the budget"
        )
    spread = torch.linspace(0, len(tiles) - 1, min(_TILES, len(tiles))).long().tolist()
    tokens = torch.linspace(first, length - 1, min(_TOKENS, length - first)).long().tolist()
    last = range(max(length - _TOKENS, first), length)
    return [tiles[i] for i in spread], sorted({*tokens, *last})


def missed_masses(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    policies: Sequence[SelectionPolicy],
    softmax_scale: float,
) -> torch.Tensor:
    """Mass that one layer's selections miss, ``[Hkv, policies]``, mean of tiles and single tokens.

    Args:
        q: ``[1, N, Hq, D]``; k, v: ``[1, N, Hkv, D]``.
        policies: the same but for ``top_k``, which ascends.
    """
    tiles, tokens = sampled_positions(q.shape[1], policies[0])
    tile = policies[0].query_tile
    within = torch.linspace(0, tile - 1, min(_TILE_ROWS, tile)).long().tolist()
    pages = _Pages(k, v, policies[0].sel_block_size)
    rows = torch.tensor([base + row for base in tiles for row in within], device=q.device)
    by_tile = _missed(pages.lists(tiles, policies[0]), q, k, rows, policies, softmax_scale, pages)
    single = [policy.per_token() for policy in policies]
    rows = torch.tensor(tokens, device=q.device)
    by_token = _missed(pages.tokens(tokens), q, k, rows, single, softmax_scale, pages)
    return (by_tile + by_token) / 2


def _missed(
    batch: PagedBatch,
    q: torch.Tensor,
    k: torch.Tensor,
    rows: torch.Tensor,
    rules: Sequence[SelectionPolicy],
    softmax_scale: float,
    pages: _Pages,
) -> torch.Tensor:
    """Missed mass ``[Hkv, rules]`` of one tile of each request of a batch, or of its one token.

    Args:
        rows: positions whose masses are computed, as many of each tile, its first one ahead.
    """
    rows_each = len(rows) // batch.num_requests
    size = rules[0].sel_block_size
    masses = block_masses(q[0], k[0], rows, size=size, softmax_scale=softmax_scale)
    masses = masses.unflatten(0, (-1, rows_each))  # [R, rows_each, Hkv, blocks]
    position = rows.view(-1, rows_each)
    block = torch.arange(masses.shape[-1], device=q.device)
    first_local, _ = rules[0].local_range(position)
    forced = (block < rules[0].sink_blocks) | (block >= first_local[..., None])
    kept = (masses * forced[:, :, None]).sum(-1)  # [R, rows_each, Hkv]
    states = q[0, pages.query_rows(batch)]
    starts = batch.seq_lens.cpu() - torch.tensor(batch.query_lens)
    tiles = ((position[:, 0].cpu() - starts) // rules[0].query_tile).tolist()
    found = []
    for rule in rules:
        chosen = select_blocks(
            states, pages.keys, batch, rule, k_summary=pages.summary, softmax_scale=softmax_scale
        )
        picked = torch.stack([of[n] for of, n in zip(chosen, tiles, strict=True)])
        sees_all = rule.sees_all(position[:, 0])[:, None, None]
        index = picked.clamp(min=0)[:, None].expand(-1, rows_each, -1, -1)
        caught = kept + (masses.gather(-1, index) * (picked >= 0)[:, None]).sum(-1)
        missed = (1.0 - caught).masked_fill(sees_all, 0.0)
        found.append(missed.mean((0, 1)))
    return torch.stack(found, dim=-1).cpu()


class _Pages:
    """Keys of one sequence as pages, and batches of samples of it.

    Args:
        k, v: ``[1, N, Hkv, D]``.
        page_size: tokens of a page.
    """

    def __init__(self, k: torch.Tensor, v: torch.Tensor, page_size: int) -> None:
        _, length, heads, dim = k.shape
        count = ceil_div(length, page_size)
        self.keys = k.new_zeros(count, heads, page_size, dim)
        self.summary = k.new_zeros(count, heads, summary_bytes(page_size, dim), dtype=torch.uint8)
        self._length, self._count, self._device = length, count, k.device
        values = v.new_zeros(count, heads, page_size, v.shape[-1])
        slots = torch.arange(length, device=k.device)
        write_kv(k[0], v[0], self.keys, values, self.summary, slots)

    def lists(self, bases: Sequence[int], policy: SelectionPolicy) -> PagedBatch:
        """Prefills of the tiles that share a list, one for each of the tiles at ``bases``."""
        starts = [base - base % policy.list_span for base in bases]
        return self._batch(
            [range(start, min(start + policy.list_span, self._length)) for start in starts]
        )

    def tokens(self, positions: Sequence[int]) -> PagedBatch:
        """Decodes of one token each."""
        return self._batch([range(p, p + 1) for p in positions], decodes=len(positions))

    def query_rows(self, batch: PagedBatch) -> torch.Tensor:
        """Positions of a batch's queries."""
        spans = zip(batch.seq_lens.tolist(), batch.query_lens, strict=True)
        parts = [torch.arange(end - count, end, device=self._device) for end, count in spans]
        return torch.cat(parts)

    def _batch(self, queries: Sequence[range], decodes: int = 0) -> PagedBatch:
        requests = len(queries)
        lengths, counts = [of.stop for of in queries], [len(of) for of in queries]

        def integers(values: Sequence[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=self._device)

        return PagedBatch(
            block_table=integers(range(self._count)).expand(requests, -1).contiguous(),
            seq_lens=integers(lengths),
            cu_seqlens_q=integers(list(accumulate(counts, initial=0))),
            num_decodes=decodes,
            num_decode_tokens=decodes,
            decode_query_len=1,
            max_query_len=max(counts),
            max_seq_len=max(lengths),
            seq_lens_host=tuple(lengths),
            query_lens_host=tuple(counts),
        )


def measure_curves(
    reader: LayerReader,
    prompts: Sequence[Sequence[int]],
    policy: SelectionPolicy,
    levels: Sequence[int],
    on_layer: Callable[[], None] = lambda: None,
) -> Curves:
    """Missed mass of every KV head of a model, mean over prompts.

    Args:
        prompts: token ids.
        policy: what is measured, at each of the ``levels`` in place of its ``top_k``.

    Raises:
        ValueError: a prompt is so short that the smallest budget covers it.
    """
    if policy.query_tile == 1:
        raise ValueError(
            "query_tile: expected more than 1, got 1; single tokens follow the same budgets"
        )
    found = Curves(tuple(sorted(set(levels))))
    rule = replace(policy, dense_last=0, dense_below=0, decode_top_k=None)
    policies = [replace(rule, top_k=level) for level in found.levels]
    totals: dict[int, torch.Tensor] = {}

    def record(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> None:
        missed = missed_masses(q, k, v, policies, scale).double()
        totals[layer] = totals[layer] + missed if layer in totals else missed
        on_layer()

    for ids in prompts:
        reader.read(ids, record)
    for layer, total in sorted(totals.items()):
        for head, row in enumerate((total / len(prompts)).tolist()):
            found.missed[layer, head] = [round(value, 6) for value in row]
    return found
