"""Budgets as users write them: `dense`, `block_topk:16`, `sink_window`, `window`, with settings.

    budget  := mode [":" size] ("," setting "=" value)*
    mode    := "dense" | "block_topk" | "pattern" | "sink_window" | "window"

The size is `top_k` for `block_topk` and `pattern`, and `window_size` for the others.  A file of
budgets follows as `budgets=FILE`.  `window` is a sliding window without sink tokens: the negative
control, which any sparse attention must beat.  Every budget is sparse from the first token on
unless it sets `dense_below`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from sparsek_backend.config import ConfigError, SparsityConfig, resolve_config
from sparsek_kernels.paged.policy import SelectionPolicy

_MODES: dict[str, dict[str, Any]] = {
    "block_topk": {"mode": "block_topk", "num_sink": 64, "window_size": 512, "top_k": 16},
    "pattern": {"mode": "pattern", "num_sink": 64, "window_size": 512, "top_k": 16},
    "sink_window": {"mode": "sink_window", "num_sink": 4, "window_size": 512},
    "window": {"mode": "sink_window", "num_sink": 0, "window_size": 512},
}

DEFAULT_BUDGETS = ("block_topk:32", "block_topk:16", "block_topk:8", "sink_window")
MIXED_PHASES = ("prefill", "decode")
_PICTURED = (8, 16, 32, 64)


@dataclass(frozen=True)
class Budget:
    """A budget as the user wrote it, and the settings that it stands for.

    Args:
        label: as the user wrote it.
        settings: the `sparsek` section of vLLM's `additional_config`, or None for dense attention
            by vLLM's own backend.
    """

    label: str
    settings: Mapping[str, Any] | None

    @property
    def is_dense(self) -> bool:
        """Whether this is the reference."""
        return self.settings is None

    @cached_property
    def config(self) -> SparsityConfig:
        """The settings with their defaults."""
        return resolve_config(self.settings or {"mode": "dense"}, {}).config

    def policy(self, layer: int = 0) -> SelectionPolicy:
        """The selection policy of a layer, were it not kept dense."""
        return self.config.model_copy(update={"dense_layers": 0}).policy_for(layer)

    def policies(self) -> list[SelectionPolicy]:
        """The policies of all layers that differ, were none kept dense."""
        budgets = self.config.budgets
        return [self.policy(layer) for layer in ([0] if budgets is None else budgets.top_k)]

    def prefill_share(self, length: int, left_out: float = 0.0) -> float:
        """Keys that a prompt of ``length`` tokens attends, over those that dense attention does.

        The mean of the layers that are not kept dense, for a prompt that is one chunk.

        Args:
            left_out: share of the keys selected by score that ``min_mass`` was measured to leave
                out.
        """
        position = np.arange(length)
        policies = self.policies()
        attended = 0.0
        for policy in policies:
            exempt = position >= length - policy.dense_last
            mine = np.where(exempt, position + 1, policy.attended_tokens(position))
            places = ~exempt & ~policy.sees_all(position)
            attended += mine.sum().item() - left_out * places.sum().item() * _selected_keys(policy)
        return attended / len(policies) / (length * (length + 1) // 2)

    def decode_share(self, length: int, left_out: float = 0.0) -> float:
        """Keys that the first token decoded after ``length`` attends, over those before it.

        Args:
            left_out: as :meth:`prefill_share` takes it.
        """
        if self.config.dense_decode:
            return 1.0
        attended = []
        for rule in (policy.per_token() for policy in self.policies()):
            places = 0 if rule.sees_all(length) else _selected_keys(rule)
            attended.append(rule.attended_tokens(length) - left_out * places)
        return float(sum(attended)) / len(attended) / (length + 1)


def _selected_keys(policy: SelectionPolicy) -> float:
    """Keys that a query selects by score where ``min_mass`` leaves nothing out; 0 without it."""
    return policy.mean_places * policy.sel_block_size if policy.leaves_out else 0


DENSE = Budget("dense", None)


def parse_budget(text: str) -> Budget:
    """Parse a budget.

    Raises:
        ValueError: unknown mode or setting, or a value that does not fit; the message names it.
    """
    head, *pairs = text.strip().split(",")
    mode, _, size = head.partition(":")
    if mode == "dense":
        if size or pairs:
            raise ValueError(f"budget: expected 'dense' alone, got {text!r}")
        return DENSE
    if mode not in _MODES:
        raise ValueError(f"budget: expected dense, {', '.join(_MODES)} first, got {text!r}")
    settings = dict(_MODES[mode])
    if size:
        if not size.isdigit() or not int(size):
            raise ValueError(
                f"budget: expected a positive integer after {mode + ':'!r}, got {text!r}"
            )
        settings["top_k" if "top_k" in settings else "window_size"] = int(size)
    settings["dense_below"] = 0
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not separator or not name:
            raise ValueError(f"budget: expected setting=value, got {pair!r} in {text!r}")
        settings[name] = _value(value)
    try:
        budgets = resolve_config(settings, {}).config.budgets
    except ConfigError as error:
        raise ValueError(f"budget {text!r}: {error}") from error
    if budgets is not None:  # what the file holds, wherever it is read
        settings["budgets"] = budgets.model_dump(mode="json")
    return Budget(text.strip(), settings)


def parse_budgets(texts: list[str]) -> list[Budget]:
    """The budgets of a run: dense first, then the others in order, each once."""
    budgets = [DENSE]
    for text in texts:
        budget = parse_budget(text)
        if budget.is_dense:
            continue
        if budget.label in {other.label for other in budgets}:
            raise ValueError(f"budget: {budget.label!r} is given twice")
        budgets.append(budget)
    if len(budgets) == 1:
        raise ValueError("budget: expected at least one besides dense")
    return budgets


def with_mixed_phases(texts: list[str]) -> list[str]:
    """Every ``block_topk`` budget followed by its halves: sparse in the prefill or decode alone."""
    found = []
    for text in texts:
        found.append(text)
        settings = parse_budget(text).settings or {}
        if settings.get("mode") == "block_topk" and "sparse_phase" not in settings:
            found += [f"{text},sparse_phase={phase}" for phase in MIXED_PHASES]
    return found


def pictured() -> list[str]:
    """The budgets of one picture: block selection, and sinks and window of as many tokens."""
    blocks = [f"block_topk:{k},decode_top_k={k}" for k in _PICTURED]
    policies = [parse_budget(text).policy() for text in blocks]
    windows = [(p.budget_blocks - p.sink_blocks) * p.sel_block_size for p in policies]
    return blocks + [f"sink_window:{n},num_sink={policies[0].num_sink}" for n in windows]


def _value(text: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
