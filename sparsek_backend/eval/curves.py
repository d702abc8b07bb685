"""Exact attention mass that each KV head misses, as a function of its budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from sparsek_backend.eval.layers import LayerReader
from sparsek_backend.eval.mass import block_masses
from sparsek_kernels.paged import PagedBatch, select_blocks
from sparsek_kernels.paged.lengths import batch_of_lengths, pages_of
from sparsek_kernels.paged.policy import SelectionPolicy

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
    batch = pages.batch([base + tile for base in tiles], tile, decodes=0)
    by_tile = _missed(batch, q, k, rows, len(within), policies, softmax_scale, pages)
    single = [policy.per_token() for policy in policies]
    rows = torch.tensor(tokens, device=q.device)
    batch = pages.batch([position + 1 for position in tokens], 1, decodes=len(tokens))
    by_token = _missed(batch, q, k, rows, 1, single, softmax_scale, pages)
    return (by_tile + by_token) / 2


def _missed(
    batch: PagedBatch,
    q: torch.Tensor,
    k: torch.Tensor,
    rows: torch.Tensor,
    rows_each: int,
    rules: Sequence[SelectionPolicy],
    softmax_scale: float,
    pages: _Pages,
) -> torch.Tensor:
    """Missed mass ``[Hkv, rules]`` of the requests of a batch, each with a selection of its own.

    Args:
        rows: positions whose masses are computed, ``rows_each`` for each request.
    """
    size = rules[0].sel_block_size
    masses = block_masses(q[0], k[0], rows, size=size, softmax_scale=softmax_scale)
    masses = masses.unflatten(0, (-1, rows_each))  # [R, rows_each, Hkv, blocks]
    position = rows.view(-1, rows_each)
    block = torch.arange(masses.shape[-1], device=q.device)
    first_local, _ = rules[0].local_range(position)
    forced = (block < rules[0].sink_blocks) | (block >= first_local[..., None])
    kept = (masses * forced[:, :, None]).sum(-1)  # [R, rows_each, Hkv]
    states = q[0, pages.query_rows(batch)]
    found = []
    for rule in rules:
        chosen = select_blocks(
            states, pages.keys, batch, rule, k_summary=pages.summary, softmax_scale=softmax_scale
        )
        picked = torch.cat(chosen)  # [R, Hkv, scored_blocks]
        sees_all = rule.sees_all(batch.seq_lens.long() - batch.max_query_len)[:, None, None]
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
        self.keys, _, self.summary, self._table = pages_of(k, v, page_size)

    def query_rows(self, batch: PagedBatch) -> torch.Tensor:
        """Positions of a batch's queries."""
        ends = batch.seq_lens.long()[:, None]
        return (ends - torch.arange(batch.max_query_len, 0, -1, device=self.keys.device)).flatten()

    def batch(self, lengths: Sequence[int], queries: int, *, decodes: int) -> PagedBatch:
        """Requests of the last ``queries`` tokens of so many first ones; the first are decodes."""
        table = self._table.expand(len(lengths), -1).contiguous()
        return batch_of_lengths(table, (queries,) * len(lengths), lengths, decodes=decodes)


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
