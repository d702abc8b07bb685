"""What a rule for prompts costs: operations and bytes of a layer's attention."""

from __future__ import annotations

import torch

from .prompts import PromptRule
from .sketches import PAGE, SKETCHES


def _vectors(name: str) -> float:
    """Products of ``D`` channels in 16 bits that one row makes with one block of 64 keys.

    A sketch of at most 4 bits is multiplied in 8 bits, at twice the rate; a page's variance has
    half as many channels as its mean.
    """
    if name == "exact":
        return PAGE
    if name == "page":
        return 1.5
    sketch = SKETCHES[name]
    return PAGE / sketch.keys / (2 if sketch.bits else 1)


def _bytes(name: str, head_dim: int) -> float:
    """Bytes of a block of 64 keys as they are read to score it."""
    if name == "exact":
        return PAGE * 2.0 * head_dim
    if name == "page":
        return 2.5 * head_dim
    return PAGE * SKETCHES[name].bytes_per_key(head_dim)


def cost(
    rule: PromptRule, context: int, head_dim: int = 128, group: int = 4
) -> tuple[dict[str, float], float]:
    """Operations of each part, as shares of dense attention's, and GiB that a KV head's tiles read.

    Of a whole prompt, in whole blocks, as the matrix units do them.  A tile reads its list for
    itself; what is scored from end to end is read once for 128 rows.  ``min_mass`` saves nothing
    here: what it leaves out is known from answers alone.

    Args:
        rule: what is attended.
        context: tokens of the prompt.
        head_dim: channels.
        group: query heads of a KV head.
    """
    first = torch.arange(0, context, rule.tile, dtype=torch.float64)  # of each tile
    own = (first / PAGE).floor()
    near = (own - rule.window // PAGE).clamp(min=1)  # the window's first block
    between, always = near - 1, 1 + (own - near + 1).clamp(min=0)
    chosen = between
    if rule.scores != "dense":
        most = rule.blocks if rule.ranks else rule.candidates
        places = rule.places(first, most * ((first + 1) / 16384) ** rule.growth)
        chosen = torch.minimum(between, places)
    attended = chosen + always

    # Products of a row with vectors of D channels, and what each tile reads.
    parts = {"attend": 2 * PAGE * attended}
    reads = 2 * _bytes("exact", head_dim) * attended

    def scan(name: str, rows: float) -> torch.Tensor:
        return _bytes(name, head_dim) * own * min(rows * group / 128, 1)

    if rule.scores not in ("all", "dense"):
        parts["name"] = _vectors(rule.scores) * own / rule.name_stride
        reads += scan(rule.scores, rule.tile / rule.name_stride)
    if rule.scores != "dense" and rule.ranks:
        rows = min(rule.rank_rows, rule.tile)
        whole = rule.scores == "all"
        named = torch.minimum(between, rule.places(first, rule.candidates))
        listed = between if whole else named
        made = _vectors(rule.ranks) * listed + PAGE * always
        parts["rank"] = made * rows / rule.tile
        reads += _bytes("exact", head_dim) * always
        mine = _bytes(rule.ranks, head_dim) * listed / rule.neighbours
        reads += scan(rule.ranks, rows) if whole else mine
    if rule.anchors or rule.dense_last:
        share = 1 / rule.anchors if rule.anchors else 0.0
        last = torch.where(first >= context - rule.dense_last, 1.0, share)
        parts["dense rows"] = 2 * PAGE * (own + 1) * last
        reads += 2 * _bytes("exact", head_dim) * (own + 1) * last * rule.tile * group / 128
    if rule.tail:
        left = between - chosen
        vectors = {"page": 1.0, "variance": 1.5}.get(rule.tail) or _vectors(rule.tail)
        parts["tail"] = (vectors + 1) * left
        mean = {"page": 2.0, "variance": 2.5}.get(rule.tail, 0) * head_dim
        mean = mean or _bytes(rule.tail, head_dim)
        reads += (mean + head_dim) * left
    dense = (2 * PAGE * (own + 1)).sum()
    return {n: float(x.sum() / dense) for n, x in parts.items()}, float(reads.sum()) / 2**30
