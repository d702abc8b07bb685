"""What the queries of a prompt attend under a rule, exactly."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from .blocks import attend_blocks, block_logits
from .decode import dense_logits
from .sketches import PAGE, SKETCHES, Pages

CHUNK = 4096
SPREAD, SECOND_SPREAD = 0.6180339887, 0.4142135624
"""Pairs of multiples fill a square evenly: a draw does not decide on the draw that follows it."""


@dataclass(frozen=True)
class PromptRule:
    """How a tile of a prompt's queries chooses the blocks of 64 keys that it attends.

    Args:
        scores: ``dense`` attends everything; ``all`` makes every block a candidate; else what names
            candidates: a sketch (by the best of its vectors where it is made of exact means, else
            by their sum), or ``page``, mean and variance of a page.
        blocks: the most blocks that a tile chooses, beside sinks and window.
        growth: the power of a tile's depth, in units of 16,384 keys, that multiplies ``blocks``.
        deepens: the power of a tile's depth, in units of 32,768 keys and 1 at least, that
            multiplies ``blocks`` and ``candidates``.
        tile: consecutive queries that share a choice.
        candidates: blocks among which ``ranks`` chooses.
        neighbours: tiles that share their candidates, which the rows of all of them name.
        name_stride: of so many rows the last names candidates.
        name_by: what a candidate counts: the ``sum`` of what rows give it, the ``largest``, or
            ``squares``, the root of the mean square.
        name_sums: whether a block of a sketch of exact means counts by the sum of its vectors.
        ranks: what ranks candidates.  ``exact``: their masses by the logits of their keys.  A
            sketch, or ``page``: their masses by its logits, beside those of the keys of sinks and
            window.  Empty: nothing does, and all ``candidates`` are attended.
        rank_rows: rows of a tile, evenly spaced, whose masses rank.
        rank_by: what a block counts, as ``name_by``.
        draws: whether blocks are drawn by what they count.  The largest are chosen for certain, and
            one that was not likely to be drawn stands for as many as it (Madow and Madow 1944).
        draws_candidates: whether candidates are drawn too, by what names them.
        name_power: the power of what names them that they are drawn by.  Below 1 those that means
            of keys say too little of come in more often.
        variance: whether spread within a sketch's vectors adds to its logits.
        sure: a drawn block is certain from this share on, in the mean of a row's heads.  A tile
            draws no more blocks than that takes, and ``blocks`` at most.
        min_mass: a chosen block gives some row at least this share in the mean of its heads.
        tail: what gives the logits of one key for each block that is not attended, whose value is
            the mean in 8 bits: a sketch, ``page``, the mean alone, or ``variance``, mean and
            variance of a page; else nothing stands in.
        dense_last: rows at the prompt's end that attend everything.
        anchors: of every aligned group of so many rows the first attends everything, and what that
            changes is added to the others.  No row depends on later ones.
        window: keys before a tile that are always attended; a multiple of 64.
        dense_quarters: quarters of the model's layers, from 0, that attend everything.
    """

    scores: str = "dense"
    blocks: int = 96
    growth: float = 0.0
    deepens: float = 0.0
    tile: int = 64
    candidates: int = 192
    neighbours: int = 1
    name_stride: int = 4
    name_by: Literal["sum", "largest", "squares"] = "sum"
    name_sums: bool = False
    ranks: str = "exact"
    rank_rows: int = 32
    rank_by: Literal["sum", "largest", "squares"] = "largest"
    draws: bool = False
    draws_candidates: bool = False
    name_power: float = 1.0
    sure: float = 0.0
    variance: bool = False
    min_mass: float = 0.0
    tail: str = ""
    dense_last: int = 0
    anchors: int = 0
    window: int = 512
    dense_quarters: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Refuse what has no meaning."""
        for name, others in (
            ("scores", ("page", "all", "dense")),
            ("ranks", ("page", "exact", "")),
            ("tail", ("page", "variance", "")),
        ):
            if (found := getattr(self, name)) not in (*others, *SKETCHES):
                raise ValueError(f"{name}: expected a sketch or one of {others}, got {found!r}")
        if self.window % PAGE or CHUNK % self.tile or self.tile % min(self.rank_rows, self.tile):
            raise ValueError("expected a window of 64s, a tile in 4096 and rank_rows in the tile")
        if CHUNK % (self.tile * self.neighbours):
            raise ValueError(f"neighbours: expected whole chunks of them, got {self.neighbours}")
        if self.tile % self.name_stride:
            raise ValueError(f"name_stride: expected one in the tile, got {self.name_stride}")

    def places(self, first: torch.Tensor, count: float | torch.Tensor) -> torch.Tensor:
        """``count`` places, and more for tiles whose ``first`` row lies deep; whole numbers."""
        return (count * ((first + 1) / 32768).clamp(min=1.0) ** self.deepens).round().int()


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
    k, v = k.contiguous(), v.contiguous()
    pages = Pages(k, v)
    parts = [_chunk(rule, pages, q, k, v, start) for start in range(0, count, CHUNK)]
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
        logits = dense_logits(query[None], key[None]).mul_(k.shape[-1] ** -0.5)
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
        k: ``[H, P, D]``.
        v: ``[H, P, D]``.
        start: a multiple of ``CHUNK``.
    """
    end = min(start + CHUNK, q.shape[2])
    tiles = -(-(end - start) // rule.tile)
    k, v = k[:, :end], v[:, :end]
    real = torch.arange(start, start + tiles * rule.tile, device=q.device)
    rows = real.clamp(max=end - 1)
    query, rows = q[:, :, rows], rows.view(tiles, rule.tile)

    block = torch.arange((end - 1) // PAGE + 1, device=q.device)
    first = (rows[:, :1] // PAGE - rule.window // PAGE).clamp(min=1)
    always = ((block >= first) | (block < 1)) & (block <= rows[:, -1:] // PAGE)
    between = (block >= 1) & (block < first)  # [tiles, blocks]
    weights = _choose(rule, pages, query, k, rows, between, always) + always
    chosen = weights > 0
    out, lse = attend_blocks(query, k, v, weights, rule.tile, start)
    if rule.tail:
        left = (between & ~chosen).repeat_interleave(rule.tile, 1)
        out = _with_tail(rule, pages, query, out, lse, left)
    seen = (real.view(tiles, rule.tile, 1) + 1 - block * PAGE).clamp(0, PAGE)
    seen = seen.masked_fill_((real >= end).view(tiles, rule.tile, 1), 0).sum(1)
    return out[:, :, : end - start], (chosen.sum(0) * seen).sum()


def _choose(
    rule: PromptRule,
    pages: Pages,
    q: torch.Tensor,
    k: torch.Tensor,
    rows: torch.Tensor,
    between: torch.Tensor,
    always: torch.Tensor,
) -> torch.Tensor:
    """``[H, tiles, blocks]`` fp32: for how many each block that a tile chooses counts; else 0.

    Args:
        rule: what is attended.
        pages: what complete pages keep.
        q: ``[H, G, tiles * tile, D]``.
        k: ``[H, N, D]``.
        rows: ``[tiles, tile]``, their positions.
        between: ``[tiles, blocks]``, those that may be chosen.
        always: ``[tiles, blocks]``, those that are attended in any case.
    """
    candidates = between.expand(k.shape[0], -1, -1)
    weights = candidates.float()
    if rule.scores != "all":
        named = slice(rule.name_stride - 1, None, rule.name_stride)
        logits = _logits(rule, rule.scores, pages, q, None, rows, named)
        before = (
            torch.arange(between.shape[1], device=q.device) < (rows[:, named] // PAGE)[..., None]
        )
        share = logits.masked_fill_(~before, -math.inf).softmax(-1)
        # The first block has none before it.
        share = _over_rows(share.nan_to_num_(0).sum(1), rule.name_by) * between
        share = _together(share, rule.neighbours).pow(rule.name_power)
        first = rows[:: rule.neighbours, 0]
        places = rule.places(first, rule.candidates)
        weights = _picked(share, places, first, rule.draws_candidates)
        weights = weights.repeat_interleave(rule.neighbours, 1)[:, : len(rows)] * between
        candidates = weights > 0
    if not rule.ranks:
        return weights
    step = rule.tile // min(rule.rank_rows, rule.tile)
    ranked = slice(step - 1, None, step)
    logits = _logits(rule, "exact", pages, q, k, rows, ranked)
    if rule.ranks != "exact":
        sketched = _logits(rule, rule.ranks, pages, q, None, rows, ranked)
        logits = torch.where(between[:, None], sketched, logits)
    logits.masked_fill_(~(candidates | always)[:, None, :, None], -math.inf)
    mass = _over_rows(logits.softmax(-1).sum(1), rule.rank_by) * candidates
    places = rule.places(rows[:, 0], rule.blocks * ((rows[:, 0] + 1) / 16384) ** rule.growth)
    least = rule.min_mass * q.shape[1]
    sure = rule.sure * q.shape[1]
    picked = _picked(mass * weights, places, rows[:, 0], rule.draws, SECOND_SPREAD, sure)
    return picked * weights * (mass > least)


def _over_rows(share: torch.Tensor, by: str) -> torch.Tensor:
    if by == "squares":
        return share.pow(2).mean(2).sqrt()
    return share.sum(2) if by == "sum" else share.amax(2)


def _together(share: torch.Tensor, neighbours: int) -> torch.Tensor:
    """``[H, tiles / neighbours, blocks]``: sums of ``share [H, tiles, blocks]``."""
    padded = F.pad(share, (0, 0, 0, -share.shape[1] % neighbours))
    return padded.unflatten(1, (-1, neighbours)).sum(2)


def _picked(
    mass: torch.Tensor,
    places: torch.Tensor,
    position: torch.Tensor,
    draws: bool,
    spread: float = SPREAD,
    sure: float = 0.0,
) -> torch.Tensor:
    """``[H, tiles, blocks]`` fp32: 1 over the probability of blocks that are picked; else 0.

    Args:
        mass: ``[H, tiles, blocks]``.
        places: ``[tiles]``, how many are picked.
        position: ``[tiles]``, the first row's; where a sample starts follows from it.
        draws: whether the sample is random; else the largest are picked.
        spread: what is added to where a sample starts from tile to tile.
        sure: the mass from which a drawn block is certain, though there were places for more.
    """
    if not draws:
        return _best(mass, places).float()
    size = mass.double().clamp(min=1e-30)
    ordered = size.sort(-1, descending=True).values
    rest = ordered.flip(-1).cumsum(-1).flip(-1)
    left = places[:, None] - torch.arange(size.shape[-1], device=size.device)  # if so many are sure
    threshold = rest / left.clamp(min=1)
    certain = (ordered > threshold).int().cumprod(-1).sum(-1, keepdim=True)
    covered = (places >= (mass > 0).sum(-1))[..., None]
    threshold = threshold.gather(-1, certain.clamp(max=size.shape[-1] - 1))
    threshold = torch.where(covered, 0.0, threshold).clamp(min=max(sure, 1e-30))
    share = torch.where(mass > 0, (size / threshold).clamp(max=1.0), 0.0)
    start = position.double()[:, None] / 64 * spread % 1.0
    until = share.cumsum(-1) + start
    drawn = until.floor() > (until - share).floor()
    return torch.where(drawn & (mass > 0), 1.0 / share, 0.0).float()


def _best(mass: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """A mask of the ``places [tiles]`` largest of ``mass [H, tiles, blocks]``."""
    best = mass.argsort(-1, descending=True)
    there = torch.arange(mass.shape[-1], device=mass.device) < places[:, None]
    return torch.zeros_like(mass, dtype=torch.bool).scatter_(-1, best, there.expand_as(best))


def _logits(
    rule: PromptRule,
    name: str,
    pages: Pages,
    q: torch.Tensor,
    k: torch.Tensor | None,
    rows: torch.Tensor,
    some: slice,
) -> torch.Tensor:
    """``[H, G, tiles, some rows, blocks]``: logs of the sums of exps of blocks for some rows.

    Args:
        rule: what is attended.
        name: ``exact``, ``page`` or a sketch.
        pages: what complete pages keep.
        q: ``[H, G, tiles * tile, D]``.
        k: ``[H, N, D]``, of exact logits.
        rows: ``[tiles, tile]``, their positions.
        some: of a tile's rows.
    """
    scale, blocks = pages.head_dim**-0.5, int(rows[-1, -1]) // PAGE + 1
    query = q.unflatten(2, rows.shape)[:, :, :, some]  # [H, G, tiles, some, D]
    flat, groups = query.flatten(1, 3), q.shape[1]
    if k is not None:
        x = F.pad(k, (0, 0, 0, -k.shape[1] % PAGE)).unflatten(1, (-1, PAGE))
        made = block_logits(flat, x, scale, rows=rows[:, some].flatten().repeat(groups))
    elif name == "page":
        made = pages.logits(flat[:, None], scale)[:, 0, :, :blocks]
    else:
        sketch, vectors = SKETCHES[name], pages.vectors(name)
        base = scale * (flat.float() @ vectors.centre[:, :blocks].mT) + math.log(sketch.keys)
        if rule.variance:
            base += pages.gain(flat[:, None], scale, sketch.keys)[:, 0, :, :blocks, 0]
        x, largest = vectors.rest[:, :blocks], sketch.bits == 0 and not rule.name_sums
        made = block_logits(flat, x, scale, base=base, largest=largest)
    return F.pad(made, (0, blocks - made.shape[-1])).unflatten(1, query.shape[1:4])


def _with_tail(
    rule: PromptRule,
    pages: Pages,
    q: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    left: torch.Tensor,
) -> torch.Tensor:
    """``[H, G, R, D]``: attention over what is attended and one key for each block that is not.

    Args:
        rule: what is attended.
        pages: what complete pages keep.
        q: ``[H, G, R, D]``.
        out: ``[H, G, R, D]`` over what is attended.
        lse: ``[H, G, R]``, the logs of its sums of exps.
        left: ``[H, R, blocks]``, what is not attended.
    """
    scale, count = pages.head_dim**-0.5, min(pages.count, left.shape[-1])
    if rule.tail == "page":
        logits = scale * (q.float() @ pages.mean()[:, None, :count].mT) + math.log(PAGE)
    elif rule.tail == "variance":
        logits = pages.logits(q, scale)[..., :count]
    else:
        keys, vectors = SKETCHES[rule.tail].keys, pages.vectors(rule.tail)
        flat = q.flatten(1, 2)
        base = scale * (flat.float() @ vectors.centre[:, :count].mT) + math.log(keys)
        logits = block_logits(flat, vectors.rest[:, :count], scale, base=base)
        logits = logits.unflatten(1, q.shape[1:3])
    logits = logits.masked_fill(~left[:, None, :, :count], -math.inf)
    tail = logits.logsumexp(-1)
    total = torch.logaddexp(lse, tail)
    stands = (logits - total[..., None]).exp() @ pages.value_means(8)[:, None, :count]
    return (out.float() * (lse - total).exp()[..., None] + stands).to(out.dtype)
