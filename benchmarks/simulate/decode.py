"""What a decoded token attends under a rule, exactly."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from .sketches import PAGE, SKETCHES, Pages


@dataclass(frozen=True)
class DecodeRule:
    """How a decoded token chooses the keys that it attends.

    Args:
        scores: what ranks cells: ``exact`` masses or the name of a sketch; ``none`` chooses no
            cell, ``dense`` attends everything.
        tokens: keys that are chosen, beside sinks and window.
        cell: consecutive keys that are chosen together.
        sinks: keys at the start that are always attended; a multiple of 64.
        window: keys before the token's own page that are always attended; a multiple of 64.
        tail: whether what is not attended stands in: a key a page, whose logit is the log of the
            sum of exps of its cells that are not chosen, and whose value the page's mean.
        sampled: how much of what is not attended for certain stands for itself by a sample
            (:func:`sample`) and not by the tail: 0 for none, 1 for all.
        value_bits: bits a channel of that mean.
        best_vector: whether a cell counts what its best vector gives and not the sum of all.
        shares: what a head's masses are shares of: sinks and window by their keys and the cells in
            between (``context``), or the cells of every complete page (``pages``).
        pages: the share of the pages whose cells are scored, the best by level 1.
        level1: what ranks pages first: ``page``, by mean and variance; a sketch and what spread
            within its vectors adds; or ``cells``, as level 2 would, which is its ceiling.
        stand_in: whether pages whose cells are not scored are part of the tail, by level 1.
        variance: what spread within vectors adds to the ranking of cells: nothing, the ``page``'s,
            or that of each ``vector``.
        variance_counts: where: in the ``rank`` alone, in the ``sum`` that a head's masses are
            shares of too, or in both and the ``tail``.
    """

    scores: str
    tokens: int = 4096
    cell: int = 4
    sinks: int = PAGE
    window: int = 512
    tail: bool = True
    sampled: float = 0.0
    value_bits: int = 8
    best_vector: bool = False
    shares: Literal["context", "pages"] = "context"
    pages: float = 1.0
    level1: str = "page"
    stand_in: bool = True
    variance: Literal["", "page", "vector"] = ""
    variance_counts: Literal["rank", "sum", "tail"] = "rank"

    def __post_init__(self) -> None:
        """Refuse what has no meaning."""
        if self.scores not in ("exact", "none", "dense", *SKETCHES):
            raise ValueError(
                f"scores: expected a sketch, exact, none or dense, got {self.scores!r}"
            )
        for name in ("sinks", "window"):
            if getattr(self, name) % PAGE:
                raise ValueError(f"{name}: expected a multiple of 64, got {getattr(self, name)}")
        if self.level1 not in ("page", "cells", *SKETCHES):
            raise ValueError(f"level1: expected a sketch, page or cells, got {self.level1!r}")
        if self.shares == "pages" and self.pages < 1:
            raise ValueError("shares: expected context where level 2 reads some pages, got pages")
        if PAGE % self.cell or (self.scores in SKETCHES and self.cell % SKETCHES[self.scores].keys):
            raise ValueError(f"cell: expected whole vectors in a divisor of 64, got {self.cell}")

    def bytes_read(self, context: int, head_dim: int) -> float:
        """Bytes that one token reads for a KV head, of a bf16 cache.

        Sketches and what level 1 and the tail read count for every page between sinks and window,
        as do exact scores, which read all of K.
        """
        if self.scores == "dense":
            return 4.0 * head_dim * context
        between = max(context - self.sinks - self.window, 0)
        read = 4.0 * head_dim * min(self.sinks + self.window + self.tokens, context)
        if self.scores == "none":
            return read
        exact = self.scores == "exact"
        sketch = 2 * head_dim if exact else SKETCHES[self.scores].bytes_per_key(head_dim)
        mean, spread = 2 * head_dim / PAGE, head_dim / 2 / PAGE
        beside = (head_dim * self.value_bits / 8 + 2) / PAGE if self.tail else 0
        if self.pages < 1 or self.variance:
            beside += spread
        if self.variance == "vector" and not exact:
            sketch += 1 / SKETCHES[self.scores].keys
        if self.pages < 1:  # level 1 reads every page's mean and variance, level 2 the rest
            beside += mean
            sketch -= 0 if exact else mean
            if self.level1 in SKETCHES:
                beside += SKETCHES[self.level1].bytes_per_key(head_dim) - mean + spread
        return read + between * (sketch * self.pages + beside)


def attend(
    rule: DecodeRule, pages: Pages, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """``[H, G, R, D]`` in fp32, and the mean number of keys that a row attends, a tensor.

    Args:
        rule: what is attended.
        pages: the complete pages of the prompt.
        q: ``[H, G, R, D]``, the last ``R`` positions.
        k: ``[H, N, D]``.
        v: ``[H, N, D]``.
    """
    rows, (count, head_dim) = q.shape[2], k.shape[1:]
    scale = head_dim**-0.5
    position = torch.arange(count - rows, count, device=q.device)
    key = torch.arange(count, device=q.device)
    logits = dense_logits(q, k) * scale
    logits[..., -rows:].masked_fill_(key[-rows:] > position[:, None], -math.inf)
    if rule.scores == "dense":
        return _weighted(logits.softmax(-1), v), position.float().mean() + 1

    first = (position // PAGE * PAGE - rule.window).clamp(min=rule.sinks)  # of the window
    places = max((count - 1) // PAGE - (rule.window + rule.sinks) // PAGE, 0)
    if places + rule.sinks // PAGE > pages.count:
        raise ValueError(f"window: expected one that reaches the prompt, got {rule.window}")
    near = (key < rule.sinks) | (key >= first[:, None])
    page = torch.arange(pages.count, device=q.device) * PAGE
    between = (page >= rule.sinks) & (page < first[:, None])  # [R, pages]

    near_logits = logits.masked_fill(~near, -math.inf)
    if rule.sampled:
        near_sum = near_logits.logsumexp(-1)
        counts, tail = _sampled(rule, pages, q, logits, near_sum, between, position)
        extra = torch.full((k.shape[0], rows, count), -math.inf, device=q.device)
        extra[..., : pages.count * PAGE] = counts.repeat_interleave(rule.cell, -1)
        extra.masked_fill_(near, 0.0)
        attended = (extra > -math.inf).logical_and(key <= position[:, None]).sum(-1).float().mean()
        weights = torch.cat([logits + extra[:, None], tail], -1).softmax(-1)
        out = _weighted(weights[..., :count], v)
        return out + _weighted(weights[..., count:], pages.value_means(rule.value_bits)), attended
    if rule.scores == "none":
        chosen = torch.zeros(1, 1, pages.count * PAGE // rule.cell, device=q.device).bool()
        tail = None
    else:
        cells, rank = _cells(rule, pages, q, logits, scale)
        near_sum = near_logits.logsumexp(-1)
        places = math.ceil(rule.pages * places)
        chosen, tail = _choose(rule, pages, q, cells, rank, near_sum, between, places)
    keep = near.expand(k.shape[0], -1, -1).clone()
    keep[..., : pages.count * PAGE] |= chosen.repeat_interleave(rule.cell, -1)
    keep &= key <= position[:, None]
    logits.masked_fill_(~keep[:, None], -math.inf)
    attended = keep.sum(-1).float().mean()
    if not rule.tail or tail is None:
        return _weighted(logits.softmax(-1), v), attended
    weights = torch.cat([logits, tail], -1).softmax(-1)
    out = _weighted(weights[..., :count], v)
    return out + _weighted(weights[..., count:], pages.value_means(rule.value_bits)), attended


OCTAVES = 16
"""Of masses that are told apart, from the one that a cell would need if all had the same."""


def sample(
    mass: torch.Tensor, count: int, start: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which cells are kept, and with what probability, ``[..., n]``.

    Probabilities are as masses, rounded down to quarters of octaves, 1 at most, and add up to
    ``count``; cells are kept where their running sum passes a whole number (systematic sampling,
    Madow 1949).  What a cell gives, over its probability, is right in the mean over the starts.

    Args:
        mass: ``[..., n]``, 0 for cells that do not compete.
        count: cells to keep.
        start: ``[...]``, what the running sums start from, in ``[0, 1)``.
    """
    mass = mass.double()
    least = mass.sum(-1, keepdim=True) / count * 2.0**-OCTAVES
    size = ((4 * torch.maximum(mass, least).log2()).floor() / 4).exp2()
    size = torch.where(mass > 0, size, 0.0)
    low, high = least.clamp(min=1e-30) / 2, (size.sum(-1, keepdim=True) / count).clamp(min=1e-30)
    for _ in range(60):  # the threshold that gives ``count`` cells
        middle = (low * high).sqrt()
        many = (size / middle).clamp(max=1).sum(-1, keepdim=True) > count
        low, high = torch.where(many, middle, low), torch.where(many, high, middle)
    share = (size / high).clamp(max=1)
    until = share.cumsum(-1) + start[..., None]
    kept = (until.floor() > (until - share).floor()) | (share == 1)
    return kept & (mass > 0), share.float()


def _sampled(
    rule: DecodeRule,
    pages: Pages,
    q: torch.Tensor,
    logits: torch.Tensor,
    near: torch.Tensor,
    between: torch.Tensor,
    position: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``[H, R, cells]`` logs of how much cells count, and ``[H, G, R, pages]`` logits of the tail.

    Args:
        rule: what is attended.
        pages: the complete pages of the prompt.
        q: ``[H, G, R, D]``.
        logits: ``[H, G, R, N]``, of all keys.
        near: ``[H, G, R]``, the log of the sum of exps of sinks and window.
        between: ``[R, pages]``, the pages between them.
        position: ``[R]``.
    """
    cells, rank = _cells(rule, pages, q, logits, pages.head_dim**-0.5)
    mass = _mass(rank.masked_fill(~between[..., None], -math.inf).flatten(-2), near)
    start = _starts(position)
    kept, share = sample(mass, rule.tokens // rule.cell, start)
    certain = share == 1
    counts = torch.where(certain, 0.0, math.log(rule.sampled) - share.log())
    tail = cells.masked_fill(certain.unflatten(-1, cells.shape[-2:])[:, None], -math.inf)
    tail = tail.logsumexp(-1).masked_fill(~between, -math.inf)
    tail = tail + (math.log(1 - rule.sampled) if rule.sampled < 1 else -math.inf)
    return torch.where(kept, counts, -math.inf), tail


def _starts(position: torch.Tensor) -> torch.Tensor:
    """``[R]``: where the running sums of rows start, spread over ``[0, 1)``."""
    return position.double() * ((math.sqrt(5) - 1) / 2) % 1


def dense_logits(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """``[H, G, R, N]``: products of ``q [H, G, R, D]`` and ``k [H, N, D]``, in fp32."""
    return (q.float().flatten(1, 2) @ k.float().mT).unflatten(1, q.shape[1:3])


def _weighted(weights: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return (weights.flatten(1, 2) @ v.float()).unflatten(1, weights.shape[1:3])


def _cells(
    rule: DecodeRule, pages: Pages, q: torch.Tensor, logits: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``[H, G, R, pages, 64 / cell]``: logs of the sums of the exps of a cell's keys.

    First as they count in the tail, then as they rank.
    """
    if rule.scores == "exact":
        exact = logits[..., : pages.count * PAGE]
        cells = exact.unflatten(-1, (pages.count, -1, rule.cell)).logsumexp(-1)
        return cells, cells
    keys = SKETCHES[rule.scores].keys
    vectors = pages.vectors(rule.scores).logits(q) * scale

    def of_cells(of_vectors: torch.Tensor) -> torch.Tensor:
        parts = of_vectors.unflatten(-1, (-1, rule.cell // keys))
        return parts.amax(-1) if rule.best_vector else parts.logsumexp(-1) + math.log(keys)

    cells = of_cells(vectors)
    if not rule.variance:
        return cells, cells
    gain = pages.gain(q, scale, keys, rule.variance == "vector")
    rank = of_cells(vectors + gain)
    return rank if rule.variance_counts == "tail" else cells, rank


def _level1(
    rule: DecodeRule, pages: Pages, q: torch.Tensor, cells: torch.Tensor, scale: float
) -> torch.Tensor:
    """``[H, G, R, pages]``: logs of the sums of the exps of a page's keys, by level 1."""
    if rule.level1 == "cells":
        return cells.logsumexp(-1)
    if rule.level1 == "page":
        return pages.logits(q, scale)
    keys = SKETCHES[rule.level1].keys
    vectors = pages.vectors(rule.level1).logits(q) * scale + pages.gain(q, scale, keys)
    return vectors.logsumexp(-1) + math.log(keys)


def _choose(
    rule: DecodeRule,
    pages: Pages,
    q: torch.Tensor,
    cells: torch.Tensor,
    rank: torch.Tensor,
    near: torch.Tensor,
    between: torch.Tensor,
    places: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``[H, R, cells]`` that are chosen, and ``[H, G, R, pages]`` logits of the tail.

    Args:
        rule: what is attended.
        pages: the complete pages of the prompt.
        q: ``[H, G, R, D]``.
        cells: ``[H, G, R, pages, 64 / cell]``, as they count in the tail.
        rank: the same, as they rank.
        near: ``[H, G, R]``, the log of the sum of exps of sinks and window.
        between: ``[R, pages]``, the pages between them.
        places: how many of them level 2 reads.
    """
    scale = pages.head_dim**-0.5
    whole = (cells if rule.variance_counts == "rank" else rank).logsumexp(-1)
    read = between[None]
    if rule.pages < 1:
        level1 = _level1(rule, pages, q, cells, scale)
        mass = _mass(level1.masked_fill(~between, -math.inf), near)
        read = _best(mass, places) & between
        outside = level1 if rule.stand_in else torch.full_like(level1, -math.inf)
        whole = torch.where(read[:, None], whole, outside)
    whole = whole.masked_fill(~between, -math.inf)
    total = torch.logaddexp(near, whole.logsumexp(-1))
    if rule.shares == "pages":
        total = (cells if rule.variance_counts == "rank" else rank).flatten(-2).logsumexp(-1)
    mass = (rank - total[..., None, None]).exp().sum(1).masked_fill(~read[..., None], 0).flatten(-2)
    chosen = _best(mass, rule.tokens // rule.cell) & (mass > 0)
    left = cells.masked_fill(chosen.unflatten(-1, cells.shape[-2:])[:, None], -math.inf)
    return chosen, torch.where(read[:, None], left.logsumexp(-1), whole)


def _mass(logits: torch.Tensor, near: torch.Tensor) -> torch.Tensor:
    """``[H, R, n]``: the share of the softmax, summed over the heads that share a KV head."""
    total = torch.logaddexp(near, logits.logsumexp(-1))
    return (logits - total[..., None]).exp().sum(1)


def _best(mass: torch.Tensor, places: int) -> torch.Tensor:
    """A mask of the ``places`` largest of the last dimension."""
    best = mass.topk(min(places, mass.shape[-1]), -1).indices
    return torch.zeros_like(mass, dtype=torch.bool).scatter_(-1, best, True)
