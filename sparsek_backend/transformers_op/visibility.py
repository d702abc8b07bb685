"""Which keys a query sees, as a rule: what Transformers' mask functions say, in a few fields."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function


@dataclass(frozen=True)
class Packing:
    """Rows of queries and keys taken apart into sequences, one after another."""

    # indices into the flattened ``[B * N]`` queries, or ``None`` for all of them
    rows: torch.Tensor | None
    # indices into the flattened ``[B * M]`` keys, or ``None`` for all of them
    keys: torch.Tensor | None
    starts_q: list[int]  # offsets of the sequences in ``rows``, the end included
    starts_k: list[int]  # offsets of the sequences in ``keys``, the end included


@dataclass(frozen=True, eq=False)
class Visibility:
    """The keys that a query sees, the last query standing at the last key."""

    causal: bool = True  # whether a query sees no later key
    # latest keys that a causal query sees, its own included; without causality, keys at a distance
    # of up to ``window_size`` on both sides
    window_size: int | None = None
    # ``[B, M]`` group of every key; a query sees keys of its own group only, and a group is one run
    # of keys.  ``None`` puts a row into one group.
    groups: torch.Tensor | None = None
    chunked: bool = False  # whether ``groups`` are chunks of one text rather than packed texts
    # ``[B, M]`` bool, False marks padding, which nobody sees; ``None`` means no padding
    real: torch.Tensor | None = None

    @property
    def is_plain_causal(self) -> bool:
        """Whether every query sees every earlier key."""
        return self.causal and not self._is_bounded

    @property
    def sees_all(self) -> bool:
        """Whether every query sees every key."""
        return not self.causal and not self._is_bounded

    @property
    def _is_bounded(self) -> bool:
        return any(x is not None for x in (self.window_size, self.groups, self.real))

    @property
    def has_holes(self) -> bool:
        """Whether some row has padding between tokens; waits for the device."""
        if self.real is None:
            return False
        starts = self.real[:, 1:] & ~self.real[:, :-1]
        return bool((starts.sum(1) + self.real[:, 0] > 1).any())

    def with_texts(self, texts: torch.Tensor) -> Visibility:
        """The same rule within packed texts: ``[B, M]`` numbers that never fall along a row."""
        if self.groups is None:
            return replace(self, groups=texts)
        return replace(self, groups=_new_runs(self.groups).cumsum(1) + _new_runs(texts).cumsum(1))

    def counts_within_groups(self, positions: torch.Tensor) -> bool:
        """Whether ``[B, M]`` positions go up by one inside each group; waits for the device."""
        if self.groups is None:
            return False
        same = self.groups.diff(dim=1) == 0
        new = self.groups.diff(dim=1) > 0
        return bool((new | (same & (positions.diff(dim=1) == 1))).all())

    def to(self, device: torch.device) -> Visibility:
        """The same rule with its tensors on a device."""
        groups, real = (x if x is None else x.to(device) for x in (self.groups, self.real))
        return replace(self, groups=groups, real=real)

    def mask(self, batch: int, num_q: int, num_k: int, device: torch.device) -> torch.Tensor:
        """The rule written out: ``[batch, 1, num_q, num_k]`` bool."""
        key = torch.arange(num_k, device=device)
        query = key[:num_q, None] + (num_k - num_q)
        seen = torch.ones(num_q, num_k, dtype=torch.bool, device=device)
        if self.causal:
            seen &= key <= query
        if self.window_size is not None and self.causal:
            seen &= key > query - self.window_size
        elif self.window_size is not None:
            seen &= (key - query).abs() <= self.window_size
        seen = seen[None, None]
        if self.groups is not None:
            groups = self.groups[:, None]
            seen = seen & (groups[..., -num_q:, None] == groups[:, :, None])
        if self.real is not None:
            seen = seen & self.real[:, None, None]
        return seen.expand(batch, -1, -1, -1)

    def packing(self, batch: int, num_q: int, num_k: int, device: torch.device) -> Packing | None:
        """The sequences that attend among themselves, or ``None`` where rows are sequences.

        Of a causal rule, padding queries are left out; without causality they attend as others do.
        Sequences without queries are left out.  Waits for the device.
        """
        if self.groups is None and self.real is None:
            return None
        shape = batch, num_k
        row = torch.arange(batch, device=device)[:, None].expand(shape)
        if self.groups is None:
            new = torch.zeros(shape, dtype=torch.bool, device=device)
        else:
            new = _new_runs(self.groups).expand(shape)
        run = new.flatten().cumsum(0).view(shape) + row
        keys_in = new.new_ones(shape) if self.real is None else self.real.expand(shape)
        rows_in = keys_in[:, -num_q:] if self.causal else new.new_ones(batch, num_q)
        run_of_row = run[:, -num_q:] if self.causal else row[:, :1].expand(batch, num_q)
        count = int(run[-1, -1]) + 1
        per_run_q = torch.bincount(run_of_row[rows_in], minlength=count)
        keys_in = keys_in & (per_run_q > 0)[run]
        per_run_k = torch.bincount(run[keys_in], minlength=count)
        attending = per_run_q > 0
        lengths = torch.stack([per_run_q[attending], per_run_k[attending]])
        starts_q, starts_k = ([0, *x] for x in lengths.cumsum(1).tolist())
        rows, keys = (x.flatten().nonzero()[:, 0] for x in (rows_in, keys_in))
        return Packing(rows, keys, starts_q, starts_k)


def visibility_of(mask_function: Callable[..., Any], num_k: int, offset: int) -> Visibility | None:
    """The rule that a mask function of Transformers stands for.

    The functions are closures; their name says which they are and their variables hold the rest.

    Args:
        offset: position of the first key.

    Returns:
        The rule, or ``None`` for a function that Transformers' own parts do not make up.
    """
    rule, one_sided, remapped = Visibility(causal=False), False, None
    for part, positions in _conjuncts(mask_function):
        remapped = positions if positions is not None else remapped
        if part is bidirectional_mask_function:
            continue
        if part is causal_mask_function:
            rule = replace(rule, causal=True)
            continue
        name, variables = _closure(part)
        if name.startswith("sliding_window_") and rule.window_size is not None:
            return None
        if name == "sliding_window_overlay" and "sliding_window" in variables:
            rule, one_sided = replace(rule, window_size=variables["sliding_window"]), True
        elif name == "sliding_window_bidirectional_overlay" and "sliding_window" in variables:
            rule = replace(rule, window_size=variables["sliding_window"])
        elif name == "packed_sequence_mask_function" and "packed_sequence_mask" in variables:
            texts = variables["packed_sequence_mask"]
            if texts.shape[1] != num_k:
                return None
            rule = rule.with_texts(texts)
        elif name == "chunked_overlay" and {"chunk_size", "left_padding"} <= variables.keys():
            padding = variables["left_padding"]
            key = torch.arange(num_k, device=padding.device) + offset
            key = key if positions is None else positions
            chunks = (key - padding[:, None]) // variables["chunk_size"]
            rule = replace(rule.with_texts(chunks), chunked=True)
        else:
            return None
    # A window to the left alone says nothing of later keys, one on both sides nothing of order.
    if rule.window_size is not None and rule.causal != one_sided:
        return None
    if remapped is not None and not rule.counts_within_groups(remapped):
        return None
    return rule


def _new_runs(groups: torch.Tensor) -> torch.Tensor:
    """``[B, M]`` bool: where a run of equal numbers begins, the first of a row excepted."""
    return groups.diff(dim=1, prepend=groups[:, :1]) != 0


def _conjuncts(
    mask_function: Callable[..., Any], positions: torch.Tensor | None = None
) -> list[tuple[Callable[..., Any], torch.Tensor | None]]:
    """The functions that must all agree, each with the ``[B, M]`` positions it is asked for."""
    name, variables = _closure(mask_function)
    if name == "remap_positions_for_packed_sequence" and "position_ids" in variables:
        return _conjuncts(variables["mask_function"], variables["position_ids"])
    if name != "and_masks" or "mask_functions" not in variables:
        return [(mask_function, positions)]
    return [found for part in variables["mask_functions"] for found in _conjuncts(part, positions)]


def _closure(function: Callable[..., Any]) -> tuple[str, dict[str, Any]]:
    """The factory in Transformers that made a function, "" for others, and its variables."""
    code = getattr(function, "__code__", None)
    if code is None or function.__module__ != causal_mask_function.__module__:
        return "", {}
    cells = getattr(function, "__closure__", None) or ()
    values = (cell.cell_contents for cell in cells)
    return function.__qualname__.split(".")[0], dict(zip(code.co_freevars, values, strict=True))
