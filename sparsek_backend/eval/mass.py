"""How close a selection comes to exact attention, for each layer and KV head.

A model reads one prompt through Transformers, densely.  In every layer the softmax weights of some
queries are summed over blocks: their exact block masses.  A selection catches the masses of the
blocks that it attends; the best choice of as many blocks would catch most.  A selection that is
drawn catches less, but stands for the rest too: its error says how far outputs are off.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, TypeAlias

import numpy as np
import torch

from sparsek_backend.extras import needing
from sparsek_backend.pyplot import import_pyplot, write_figure
from sparsek_kernels.paged.attend.cpu_parts import blocks_and_logs
from sparsek_kernels.paged.index.base import Indexer
from sparsek_kernels.paged.index.vertical_slash import VerticalSlash, block_lists
from sparsek_kernels.paged.policy import SelectionPolicy, StepPolicy

PHASES = ("prefill", "decode")
"""Phases of a selection: a tile of a prompt shares one, each decoded token has its own."""
COLUMNS = ("phase", "layer", "kv_head", "caught", "best", "attended", "error")
Record: TypeAlias = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, float], None]
"""Gets a layer's index, q ``[1, N, Hq, D]``, k and v ``[1, N, Hkv, D]``, and the softmax scale."""
_ROWS = 128
"""Queries whose masses are computed, evenly spread over those that do not see everything."""


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
    weights = _logits(q, k, rows, softmax_scale).softmax(-1).mean(2)  # [R, Hkv, N]
    padded = torch.nn.functional.pad(weights, (0, -len(k) % size))
    masses: torch.Tensor = padded.unflatten(-1, (-1, size)).sum(-1)
    return masses


def _logits(
    q: torch.Tensor, k: torch.Tensor, rows: torch.Tensor, softmax_scale: float
) -> torch.Tensor:
    """``[R, Hkv, G, N]`` float32 of some queries, -inf of later keys."""
    chosen = q[rows].float().unflatten(1, (k.shape[1], -1))  # [R, Hkv, G, D]
    logits = torch.einsum("rhgd,nhd->rhgn", chosen, k.float()) * softmax_scale
    future = torch.arange(len(k), device=q.device) > rows[:, None, None, None]
    return logits.masked_fill(future, float("-inf"))


def output_error(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rows: torch.Tensor,
    logs: torch.Tensor,
    *,
    size: int,
    softmax_scale: float,
) -> torch.Tensor:
    """How far outputs are off, ``[Hkv]``: the norm of the difference over dense attention's.

    Args:
        q: ``[N, Hq, D]``; k: ``[N, Hkv, D]``; v: ``[N, Hkv, Dv]``, the same positions.
        rows: ``[R]`` positions of the queries wanted.
        logs: ``[R, Hkv, blocks]`` natural logs of the blocks' weights; -inf: not attended.
        size: tokens in a block.
        softmax_scale: factor of ``q . k``.
    """
    squares = torch.zeros(2, k.shape[1], device=q.device)
    for some, weights in zip(rows.split(_ROWS // 4), logs.split(_ROWS // 4), strict=True):
        logits = _logits(q, k, some, softmax_scale)
        more = weights.repeat_interleave(size, -1)[:, :, None, : len(k)]
        exact, found = (
            torch.einsum("rhgn,nhd->rhgd", x.softmax(-1), v.float())
            for x in (logits, logits + more)
        )
        squares += torch.stack([(found - exact).square(), exact.square()]).sum((1, 3, 4))
    return (squares[0] / squares[1]).sqrt()


def measure(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    policy: SelectionPolicy,
    softmax_scale: float,
    index: Indexer | None = None,
) -> tuple[torch.Tensor, ...]:
    """Caught and best mass, the attended share of the keys, and the outputs' error, each ``[Hkv]``.

    They are of one layer's queries that do not see everything.

    Args:
        q: ``[1, N, Hq, D]``; k, v: ``[1, N, Hkv, D]``.
        policy: of their phase.
        index: what chooses; default: that of ordinary models.

    Raises:
        ValueError: the budget covers the context, so that there is nothing to select.
    """
    from sparsek_backend.transformers_op.topk import select_entries

    length, size = q.shape[1], policy.sel_block_size
    end, _ = policy.last_rows(length, length)  # behind it the prompt's dense end
    first = next((i for i in range(end) if not policy.sees_all(i)), None)
    if first is None:
        knob = "decode_tokens" if policy.alignment else "top_k"
        raise ValueError(
            f"length: expected more tokens than the budget covers by {knob}, got {length}; raise "
            "--length or lower the budget"
        )
    rows = torch.linspace(first, end - 1, min(_ROWS, end - first)).long().to(q.device)
    masses = block_masses(q[0], k[0], rows, size=size, softmax_scale=softmax_scale)
    blocks = masses.shape[-1]
    number = torch.arange(blocks, device=q.device)
    begin, end = (x[:, None, None] for x in policy.local_range(rows))
    forced = (number < policy.sink_blocks) | ((number >= begin) & (number < end))
    entries = select_entries(q, k, v, policy, softmax_scale, index)[0]
    chosen, weights = blocks_and_logs(entries[rows // policy.query_tile])  # [R, Hkv, S]
    chosen = chosen.where(weights > -torch.inf, blocks)  # places left over: behind the last block
    logs = torch.full((*masses.shape[:2], blocks + 1), -torch.inf, device=q.device)
    logs = logs.scatter_(2, chosen, weights)[..., :-1].masked_fill(forced, 0.0)
    attended = logs > -torch.inf
    caught = (masses * attended).sum(-1)
    error = output_error(q[0], k[0], v[0], rows, logs, size=size, softmax_scale=softmax_scale)
    seen = rows[:, None] + 1 - size * torch.arange(blocks, device=q.device)  # keys of each block
    share = (attended * seen.clamp(0, size)[:, None]).sum(-1) / (rows[:, None] + 1)
    ranges = torch.tensor([policy.candidate_range(i) for i in rows.tolist()], device=q.device)
    begin, end = ranges[:, None].split(1, -1)  # [R, 1, 1]
    competing = masses * ((number >= begin) & (number < end))
    largest = competing.topk(min(policy.scored_blocks, blocks), dim=-1).values
    places = torch.tensor([policy.places(i) for i in rows.tolist()], device=q.device)
    there = torch.arange(largest.shape[-1], device=q.device) < places[:, None, None]
    chosen = (largest * there).sum(-1)
    best = (masses - competing).sum(-1) + chosen
    return caught.mean(0), best.mean(0), share.mean(0), error


def measure_model(
    model: str,
    ids: Sequence[int],
    policy_of: Callable[[int], StepPolicy],
    *,
    entries: Mapping[int, torch.Tensor] | None = None,
) -> list[dict[str, Any]]:
    """Run a model over token ids and measure every layer.

    Args:
        policy_of: the policies of the layer with an index.
        entries: of the layers whose prefills follow a learned list (`PrefillPattern.entries`).

    Returns:
        A row for each layer, phase and KV head, means over queries and query heads: shares of the
        exact mass that the selection catches, and that the best choice of as many blocks would;
        share of the keys that is attended; how far outputs are off, relatively.

    Raises:
        ImportError: Transformers is not installed.
        NotImplementedError: a layer of the model is not plain causal attention.
        ValueError: the budget covers the prompt.
    """
    found: list[dict[str, Any]] = []

    def record(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> None:
        policy = policy_of(layer)
        lists = None
        if entries and layer in entries:
            lists = VerticalSlash(block_lists(entries[layer], policy.prefill).to(q.device))
        rules = (policy.prefill, policy.decode)
        for phase, rule, index in zip(PHASES, rules, (lists, None), strict=True):
            shares = torch.stack(measure(q, k, v, rule, scale, index), 1).tolist()
            for head, four in enumerate(shares):
                found.append(dict(zip(COLUMNS, (phase, layer, head, *four), strict=True)))

    read_layers(model, ids, record)
    return found


def mean_of(rows: Sequence[Mapping[str, Any]], phase: str) -> str:
    """What a phase catches, in words: means over layers and KV heads."""
    members = [row for row in rows if row["phase"] == phase]
    caught, best, attended, error = (fmean(row[name] for row in members) for name in COLUMNS[3:])
    return (
        f"{phase}: outputs off by {error:.1%}, {attended:.1%} of keys, {caught:.4f} of the "
        f"attention, {best:.4f} possible"
    )


def plot_masses(path: Path, rows: Sequence[Mapping[str, Any]], title: str) -> Path:
    """Draw a heat map for each phase: how far outputs are off, for each layer and KV head."""
    pyplot = import_pyplot()
    layers = list(dict.fromkeys(row["layer"] for row in rows))
    heads = 1 + max(row["kv_head"] for row in rows)
    size = (4.5 + 0.6 * heads, 2.0 + 0.22 * len(layers))
    figure, axes = pyplot.subplots(1, len(PHASES), figsize=size, layout="constrained")
    for axis, phase in zip(axes, PHASES, strict=True):
        error = np.array([row["error"] for row in rows if row["phase"] == phase])
        image = axis.imshow(error.reshape(-1, heads), vmin=0.0, aspect="auto")
        axis.set_title(mean_of(rows, phase).replace("keys, ", "keys\n", 1), fontsize=9)
        axis.set_xticks(range(heads))
        axis.set_yticks(range(len(layers)), map(str, layers), fontsize=7)
        axis.set_xlabel("KV head")
        figure.colorbar(image, ax=axis)
    axes[0].set_ylabel("layer")
    figure.suptitle(title, fontsize=10)
    return write_figure(figure, path)


def read_layers(model: str, ids: Sequence[int], record: Record) -> None:
    """Let a model read token ids densely, and show what its layers attend with.

    Args:
        model: folder or name; it is loaded onto a GPU if there is one.

    Raises:
        ImportError: Transformers is not installed.
        NotImplementedError: a layer that is not plain causal attention.
    """
    with needing("this needs Transformers", extra="eval"):
        from transformers import AutoModelForCausalLM

        from sparsek_backend.patterns.models import observe_model
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype="auto")
    loaded.to("cuda" if torch.cuda.is_available() else "cpu").eval()

    layers = range(loaded.config.get_text_config().num_hidden_layers)
    observers = {layer: partial(record, layer) for layer in layers}
    observe_model(loaded, observers, [torch.tensor([list(ids)])])
