"""The picture of a pattern: a panel per head pattern, query blocks down, key blocks across."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from sparsek_backend.extras import needing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_PANELS, COLUMNS = 16, 4


def draw(
    mask: torch.Tensor, mass: torch.Tensor | None, block_size: int, patterns: Sequence[int] | None
) -> Figure:
    """A figure of the patterns (the first 16 by default), darker where a block weighs more.

    Args:
        mask: ``[P, R, C]`` bool, the listed blocks.
        mass: ``[P, R, C]`` fp32, their weights; all weigh the same when ``None``.
    """
    with needing("figures need matplotlib", extra="patterns"):
        from matplotlib.colors import PowerNorm
        from matplotlib.figure import Figure
    total = mask.shape[0]
    chosen = list(range(min(total, MOST_PANELS))) if patterns is None else list(patterns)
    if not chosen or any(not 0 <= p < total for p in chosen):
        raise ValueError(f"patterns: expected some of 0 to {total - 1}, got {chosen}")
    if not mask.numel():
        raise ValueError(f"shape: expected blocks to draw, got {tuple(mask.shape[1:])}")
    shade = mask.float() if mass is None else mass
    # A block that is listed shows, however little it weighs.
    shade = (0.2 + 0.8 * shade / shade.amax().clamp(min=1e-30)).where(mask, 0.0)
    across = min(len(chosen), COLUMNS)
    down = -(-len(chosen) // COLUMNS)
    figure = Figure(figsize=(3.2 * across, 3.2 * down + 0.5), layout="constrained")
    axes = figure.subplots(down, across, squeeze=False).flatten()
    for axis, p in zip(axes, chosen, strict=False):
        axis.imshow(shade[p], cmap="Blues", norm=PowerNorm(0.5, 0.0, 1.0), aspect="auto")
        axis.set_title(f"pattern {p}: {mask[p].float().mean():.1%} of the blocks", fontsize=9)
        axis.tick_params(labelsize=7)
    for axis in axes[len(chosen) :]:
        axis.set_visible(False)
    figure.supxlabel(f"key blocks of {block_size}", fontsize=9)
    figure.supylabel(f"query blocks of {block_size}", fontsize=9)
    return figure
