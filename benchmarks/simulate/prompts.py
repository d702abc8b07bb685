"""What the queries of a prompt attend under a rule, exactly."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .decode import dense_logits
from .sketches import PAGE, SKETCHES, Pages, Vectors

CHUNK = 1024


@dataclass(frozen=True)
class PromptRule:
    """How a tile of a prompt's queries chooses the blocks of 64 keys that it attends.

    Args:
        scores: ``dense`` attends everything; ``exact`` ranks all blocks by the masses of all rows
            of the tile; else what names candidates: a sketch (by the best of its vectors where it
            is made of exact means, else by their sum), or ``page``, mean and variance of a page.
        blocks: the most blocks that a tile chooses, beside sinks and window.
        tile: consecutive queries that share a choice.
        candidates: blocks among which exact masses choose.
        rank_rows: rows of a tile, evenly spaced, whose exact masses choose; the largest counts.
        min_mass: a chosen block gives some row at least this share in the mean of its heads.
        dense_last: rows at the prompt's end that attend everything.
        anchors: of every aligned group of so many rows the first attends everything, and what that
            changes is added to the others.  No row depends on later ones.
        window: keys before a tile that are always attended; a multiple of 64.
    """

    scores: str = "dense"
    blocks: int = 96
    tile: int = 64
    candidates: int = 192
    rank_rows: int = 32
    min_mass: float = 0.0
    dense_last: int = 0
    anchors: int = 0
    window: int = 512

    def __post_init__(self) -> None:
        """Refuse what has no meaning."""
        if self.scores not in ("dense", "exact", "page", *SKETCHES):
            raise ValueError(
                f"scores: expected a sketch, page, exact or dense, got {self.scores!r}"
            )
        if self.window % PAGE or CHUNK % self.tile or self.tile % min(self.rank_rows, self.tile):
            raise ValueError("expected a window of 64s, a tile in 1024 and rank_rows in the tile")


def attend(
    rule: PromptRule, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """``[H, G, P, D]`` of a whole prompt, and the mean number of keys that a row attends.

    Args:
        rule: what is attended.
        q: ``[H, G, P, D]``.
        k: ``[H, P, D]``.
        v: ``[H, P, D]``.
    """
    count = q.shape[2]
    if rule.scores == "dense":
        attended = torch.tensor((count + 1) / 2, device=q.device)
        shape = (k.shape[0], q.shape[1], *k.shape[1:])
        keys, values = (x[:, None].expand(shape) for x in (k, v))
        return F.scaled_dot_product_attention(q, keys, values, is_causal=True), attended
    pages = Pages(k, v)
    pad = (0, 0, 0, -count % PAGE)
    blocks = [F.pad(x, pad).unflatten(1, (-1, PAGE)) for x in (k, v)]
    parts = [_chunk(rule, pages, q, *blocks, a) for a in range(0, count, CHUNK)]
    out = torch.cat([part for part, _ in parts], 2)
    attended = sum(seen for _, seen in parts) / (k.shape[0] * count)
    if rule.anchors:
        rows = torch.arange(0, count, rule.anchors, device=q.device)
        change = _dense_rows(q, k, v, rows) - out[:, :, rows]
        out = out + change.repeat_interleave(rule.anchors, 2)[:, :, :count]
    if rule.dense_last:
        rows = torch.arange(max(count - rule.dense_last, 0), count, device=q.device)
        out[:, :, rows] = _dense_rows(q, k, v, rows)
    return out, attended


def _dense_rows(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: torch.Tensor
) -> torch.Tensor:
    """``[H, G, len(rows), D]``: dense attention of some rows, a KV head at a time."""
    later = torch.arange(k.shape[1], device=k.device) > rows[:, None]
    out = []
    for query, key, value in zip(q[:, :, rows], k, v, strict=True):
        logits = dense_logits(query[None], key[None]) * k.shape[-1] ** -0.5
        weights = logits.masked_fill_(later, -math.inf).softmax(-1)
        out.append(weights[0] @ value.float())
    return torch.stack(out).to(q.dtype)


def _chunk(
    rule: PromptRule,
    pages: Pages,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    start: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``[H, G, rows, D]`` of the rows from ``start`` on, and how many keys they attend in all.

    Args:
        rule: what is attended.
        pages: what complete pages keep.
        q: ``[H, G, P, D]``.
        k: ``[H, blocks, 64, D]``, padded.
        v: ``[H, blocks, 64, D]``, padded.
        start: a multiple of the tile.
    """
    end = min(start + CHUNK, q.shape[2])
    tiles = -(-(end - start) // rule.tile)
    blocks = (end - 1) // PAGE + 1
    k, v = k[:, :blocks], v[:, :blocks]
    rows = torch.arange(start, start + tiles * rule.tile, device=q.device).clamp(max=end - 1)
    query, rows = q[:, :, rows].unflatten(2, (tiles, rule.tile)), rows.view(tiles, rule.tile)

    block = torch.arange(blocks, device=q.device)
    first = (rows[:, :1] // PAGE - rule.window // PAGE).clamp(min=1)
    always = ((block >= first) | (block < 1)) & (block <= rows[:, -1:] // PAGE)
    between = (block >= 1) & (block < first)
    if rule.scores == "exact":
        candidates, step = between.expand(k.shape[0], -1, -1), 1
    else:
        sampled = slice(3, None, 4)
        named = _named(rule, pages, query[:, :, :, sampled], rows[:, sampled], blocks)
        candidates = _best(named * between, rule.candidates) & between
        step = rule.tile // min(rule.rank_rows, rule.tile)
    ranked = slice(step - 1, None, step)
    mass = _masses(query[:, :, :, ranked], k, rows[:, ranked], candidates | always, start)
    mass = mass * candidates
    chosen = _best(mass, rule.blocks) & (mass > rule.min_mass * q.shape[1])
    out, attended = _attend_blocks(query, k, v, rows, chosen | always, end - start)
    return out.flatten(2, 3)[:, :, : end - start], attended


def _best(mass: torch.Tensor, places: int) -> torch.Tensor:
    best = mass.topk(min(places, mass.shape[-1]), -1).indices
    return torch.zeros_like(mass, dtype=torch.bool).scatter_(-1, best, True)


def _named(
    rule: PromptRule, pages: Pages, q: torch.Tensor, rows: torch.Tensor, blocks: int
) -> torch.Tensor:
    """``[H, tiles, blocks]``: probabilities by what pages keep, summed over rows and heads.

    A row's softmax is over the blocks before its own, which are complete.
    """
    scale, flat = pages.head_dim**-0.5, q.flatten(2, 3)
    if rule.scores == "page":
        logits = pages.logits(flat, scale)
    else:
        vectors = Vectors(*(x[:, :blocks] for x in pages.vectors(rule.scores)))
        products = vectors.logits(flat) * scale
        exact = SKETCHES[rule.scores].bits == 0
        logits = products.amax(-1) if exact else products.logsumexp(-1)
    logits = F.pad(logits, (0, max(blocks - logits.shape[-1], 0)))[..., :blocks]
    before = torch.arange(blocks, device=q.device) < (rows // PAGE)[..., None]
    logits = logits.unflatten(2, q.shape[2:4]).masked_fill(~before, -math.inf)
    return logits.softmax(-1).nan_to_num(0).sum((1, 3))  # the first block has none before it


def _masses(
    q: torch.Tensor, k: torch.Tensor, rows: torch.Tensor, allowed: torch.Tensor, start: int
) -> torch.Tensor:
    """``[H, tiles, blocks]``: the largest exact mass of a row, summed over its heads.

    Args:
        q: ``[H, G, tiles, rows, D]``.
        k: ``[H, blocks, 64, D]``.
        rows: ``[tiles, rows]``, their positions.
        allowed: ``[H, tiles, blocks]``, over which the softmax runs.
        start: the first position that a row may have.
    """
    aligned = start // PAGE * PAGE
    late = torch.arange(aligned, k.shape[1] * PAGE, device=k.device) > rows[..., None]
    found = []
    for query, key, over in zip(q, k, allowed, strict=True):
        logits = dense_logits(query.flatten(1, 2)[None], key.flatten(0, 1)[None])[0]
        logits = logits.mul_(k.shape[-1] ** -0.5).unflatten(1, rows.shape)
        logits[..., aligned:].masked_fill_(late, -math.inf)
        mass = logits.softmax(-1).unflatten(-1, k.shape[1:3]).sum(-1) * over[:, None]
        mass = mass / mass.sum(-1, keepdim=True)
        found.append(mass.sum(0).amax(1))
    return torch.stack(found)


def _attend_blocks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rows: torch.Tensor,
    chosen: torch.Tensor,
    real_rows: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``[H, G, tiles, tile, D]`` over the chosen blocks, and how many keys real rows attend.

    Args:
        q: ``[H, G, tiles, tile, D]``.
        k: ``[H, blocks, 64, D]``.
        v: ``[H, blocks, 64, D]``.
        rows: ``[tiles, tile]``, their positions.
        chosen: ``[H, tiles, blocks]``.
        real_rows: how many rows are no padding.
    """
    heads, groups, tiles = q.shape[:3]
    most = int(chosen.sum(-1).max())
    there, index = chosen.byte().topk(most, -1)
    head = torch.arange(heads, device=q.device)[:, None, None]
    keys, values = (x[head, index].flatten(2, 3).flatten(0, 1)[:, None] for x in (k, v))
    position = index[..., None] * PAGE + torch.arange(PAGE, device=q.device)
    seen = (position.flatten(2)[:, :, None] <= rows[..., None]) & there.bool().repeat_interleave(
        PAGE, -1
    )[:, :, None]  # [H, tiles, tile, keys]
    bias = torch.zeros_like(seen, dtype=q.dtype).masked_fill_(~seen, -math.inf)
    shape = (heads * tiles, groups, -1, -1)
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2).flatten(0, 1),
        keys.expand(shape),
        values.expand(shape),
        attn_mask=bias.flatten(0, 1)[:, None].expand(shape),
    )
    attended = seen.sum(-1).flatten(1)[:, :real_rows].sum()
    return out.unflatten(0, (heads, tiles)).transpose(1, 2), attended
