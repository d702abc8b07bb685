"""How much of the exact attention a selection catches, for each layer and KV head.

A model reads one prompt through Transformers, densely.  In every layer the softmax weights of some
queries are summed over blocks: their exact block masses.  A selection catches the masses of the
blocks that it attends; the best choice of as many blocks would catch most.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from sparsek_backend.csv_file import write_csv_file
from sparsek_backend.eval.layers import read_layers
from sparsek_backend.pyplot import import_pyplot, write_figure
from sparsek_kernels.paged.index.base import Indexer
from sparsek_kernels.paged.index.vertical_slash import VerticalSlash, block_lists
from sparsek_kernels.paged.policy import SelectionPolicy, StepPolicy, ceil_div

PHASES = ("prefill", "decode")
COLUMNS = ("phase", "layer", "kv_head", "caught", "best", "attended")
_ROWS = 128
"""Queries whose masses are computed, evenly spread over those that do not see everything."""


@dataclass(frozen=True)
class Mass:
    """Share of the mass that a layer's selection catches, mean over queries and query heads."""

    # ``prefill``, where a tile shares a selection, or ``decode``, where each query has its own
    phase: str
    layer: int
    caught: torch.Tensor  # ``[Hkv]`` share of the exact mass
    # ``[Hkv]`` what the best choice of ``top_k`` blocks for each query would catch
    best: torch.Tensor
    attended: torch.Tensor  # ``[Hkv]`` share of the keys that is attended


def block_masses(
    q: torch.Tensor, k: torch.Tensor, rows: torch.Tensor, *, size: int, softmax_scale: float
) -> torch.Tensor:
    """Exact mass of each block, mean over the query heads of a group: ``[R, Hkv, blocks]``.

    Args:
        q: ``[N, Hq, D]``.
        k: ``[N, Hkv, D]``, the same positions.
        rows: ``[R]`` positions of the queries wanted.
        size: tokens in a block.
    """
    length, heads = k.shape[:2]
    chosen = q[rows].float().unflatten(1, (heads, -1))  # [R, Hkv, G, D]
    future = torch.arange(length, device=q.device) > rows[:, None]
    found = []
    for head in range(heads):
        logits = chosen[:, head] @ k[:, head].float().T * softmax_scale  # [R, G, N]
        weights = logits.masked_fill(future[:, None], float("-inf")).softmax(-1).mean(1)
        padded = torch.nn.functional.pad(weights, (0, -length % size))
        found.append(padded.unflatten(1, (-1, size)).sum(-1))
    return torch.stack(found, dim=1)


def measure(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    policy: SelectionPolicy,
    softmax_scale: float,
    index: Indexer | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Caught and best mass, and the attended share of the keys, each ``[Hkv]``.

    They are of one layer's queries that do not see everything.

    Args:
        q: ``[1, N, Hq, D]``; k, v: ``[1, N, Hkv, D]``.
        policy: of their phase.
        index: what chooses; default: that of ordinary models.

    Raises:
        ValueError: the budget covers the context, so that there is nothing to select.
    """
    from sparsek_backend.transformers_op.topk import block_indices

    length, size = q.shape[1], policy.sel_block_size
    first = next((i for i in range(length) if not policy.sees_all(i)), None)
    if first is None:
        raise ValueError(
            f"length: expected more tokens than the budget covers, got {length}; raise --length or "
            "lower the budget"
        )
    rows = torch.linspace(first, length - 1, min(_ROWS, length - first)).long().to(q.device)
    masses = block_masses(q[0], k[0], rows, size=size, softmax_scale=softmax_scale)
    blocks = ceil_div(length, size)
    indices = block_indices(q, k, v, policy, softmax_scale, index)[0, rows].long()  # [R, Hkv, S]
    attended = torch.zeros(*masses.shape[:2], blocks + 1, dtype=torch.bool, device=q.device)
    attended.scatter_(2, torch.where(indices < 0, blocks, indices), True)
    attended = attended[..., :blocks]
    caught = (masses * attended).sum(-1)
    seen = rows[:, None] + 1 - size * torch.arange(blocks, device=q.device)  # keys of each block
    share = (attended * seen.clamp(0, size)[:, None]).sum(-1) / (rows[:, None] + 1)
    candidates = torch.zeros(len(rows), 1, blocks, dtype=torch.bool, device=q.device)
    for row, position in enumerate(rows.tolist()):
        begin, end = policy.candidate_range(position)
        candidates[row, :, begin:end] = True
    competing = masses * candidates
    best = (masses * ~candidates).sum(-1)
    most = min(policy.scored_blocks, blocks)
    best = best + competing.topk(most, dim=-1).values.sum(-1)
    return caught.mean(0), best.mean(0), share.mean(0)


def measure_model(
    model: str,
    ids: Sequence[int],
    policy_of: Callable[[int], StepPolicy],
    *,
    entries: Mapping[int, torch.Tensor] | None = None,
    on_layer: Callable[[int], None] = lambda layer: None,
) -> list[Mass]:
    """Run a model over token ids and measure every causal layer of full attention.

    Args:
        policy_of: the policies of the layer with an index.
        entries: of the layers whose prefills follow a learned list (`PrefillPattern.entries`).

    Raises:
        ImportError: Transformers is not installed.
        ValueError: the model has no such layer, or the budget covers the prompt.
    """
    found: list[Mass] = []

    def record(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> None:
        policy = policy_of(layer)
        own = None if entries is None else entries.get(layer)
        lists = None
        if own is not None:
            lists = VerticalSlash(block_lists(own, policy.prefill).to(q.device))
        for phase, rule, index in zip(
            PHASES, (policy.prefill, policy.decode), (lists, None), strict=True
        ):
            shares = measure(q, k, v, rule, scale, index)
            found.append(Mass(phase, layer, *(x.cpu() for x in shares)))
        on_layer(layer)

    read_layers(model, ids, record)
    return found


def write_masses(path: Path, masses: Sequence[Mass]) -> Path:
    """Write a CSV with one row for each phase, layer and KV head."""
    rows = [
        dict(zip(COLUMNS, (mass.phase, mass.layer, head, *shares), strict=True))
        for mass in masses
        for head, shares in enumerate(
            torch.stack([mass.caught, mass.best, mass.attended], 1).tolist()
        )
    ]
    return write_csv_file(path, rows, digits=6)


def phase_summaries(masses: Sequence[Mass]) -> list[str]:
    """A line for each phase: means over layers and KV heads."""
    lines = []
    for phase in PHASES:
        members = [mass for mass in masses if mass.phase == phase]
        caught, best, attended = (
            float(torch.stack([getattr(mass, name) for mass in members]).mean())
            for name in ("caught", "best", "attended")
        )
        lines.append(
            f"{phase}: {caught:.4f} of the attention caught, {best:.4f} possible, {attended:.1%} "
            "of the keys attended"
        )
    return lines


def plot_masses(path: Path, masses: Sequence[Mass], title: str) -> Path:
    """Draw a heat map for each phase: the caught share for each layer and KV head."""
    pyplot = import_pyplot()
    layers = len({mass.layer for mass in masses})
    heads = len(masses[0].caught)
    figure, axes = pyplot.subplots(
        1, len(PHASES), figsize=(4.5 + 0.6 * heads, 2.0 + 0.22 * layers), layout="constrained"
    )
    for axis, phase in zip(axes, PHASES, strict=True):
        members = [mass for mass in masses if mass.phase == phase]
        grid = torch.stack([mass.caught for mass in members]).float().numpy()
        best = torch.stack([mass.best for mass in members]).mean()
        image = axis.imshow(grid, vmin=min(0.5, float(grid.min())), vmax=1.0, aspect="auto")
        attended = torch.stack([mass.attended for mass in members]).mean()
        axis.set_title(
            f"{phase}: {grid.mean():.3f} of {best:.3f} possible\n{attended:.1%} of the keys",
            fontsize=9,
        )
        axis.set_xticks(range(heads))
        axis.set_yticks(range(layers), [str(mass.layer) for mass in members], fontsize=7)
        axis.set_xlabel("KV head")
        figure.colorbar(image, ax=axis)
    axes[0].set_ylabel("layer")
    figure.suptitle(title, fontsize=10)
    return write_figure(figure, path)
