"""Budgets as users write them: `dense`, `block_topk:16`, `sink_window`, `window`, with settings.

    budget  := mode [":" size] ("," setting "=" value)*

The size is `top_k` for `block_topk` and `pattern`, and `window_size` for the others.  `window` is a
sliding window without sink tokens: the negative control, which any sparse attention must beat.
Every budget is sparse from the first token on unless it sets `dense_below`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from sparsek_backend.config import SparsityConfig, resolve_config
from sparsek_kernels.paged.policy import StepPolicy

_MODES: dict[str, dict[str, Any]] = {
    "block_topk": {"mode": "block_topk", "num_sink": 64, "window_size": 512, "top_k": 16},
    "pattern": {"mode": "pattern", "num_sink": 64, "window_size": 512, "top_k": 16},
    "sink_window": {"mode": "sink_window", "num_sink": 4, "window_size": 512},
    "window": {"mode": "sink_window", "num_sink": 0, "window_size": 512},
}


@dataclass(frozen=True)
class Budget:
    """A budget as the user wrote it, and the settings that it stands for."""

    label: str  # as the user wrote it
    # vLLM's `sparsek` section; None is dense attention by vLLM's own backend
    settings: Mapping[str, Any] | None

    @cached_property
    def config(self) -> SparsityConfig:
        return resolve_config(self.settings or {"mode": "dense"}, {}).config

    def policy(self, layer: int = 0) -> StepPolicy:
        """The policies of a layer, were it not kept dense."""
        return self.config.model_copy(update={"dense_layers": 0}).policy_for(layer)

    def prefill_share(self, length: int) -> float:
        """Keys that a prompt of ``length`` tokens attends, over dense attention's."""
        position, policy = np.arange(length), self.policy().prefill
        attended = policy.attended_tokens(position)
        last = slice(*policy.last_rows(length, length))
        attended[last] = position[last] + 1
        return float(attended.sum()) / (length * (length + 1) // 2)

    def decode_share(self, length: int) -> float:
        """Keys that the first token decoded after ``length`` attends, over those before it."""
        return float(self.policy().decode.attended_tokens(length)) / (length + 1)


def parse_budget(text: str) -> Budget:
    """Parse a budget.

    Raises:
        ValueError: unknown mode or setting, or a value that does not fit; the message names it.
    """
    if text.strip() == "dense":
        return Budget("dense", None)
    head, *pairs = text.strip().split(",")
    mode, _, size = head.partition(":")
    if mode not in _MODES:
        names = ", ".join(_MODES)
        raise ValueError(f"budget: expected dense alone, or {names} first, got {text!r}")
    settings = _MODES[mode] | {"dense_below": 0}
    if size:
        pairs.insert(0, f"{'top_k' if 'top_k' in settings else 'window_size'}={size}")
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not separator or not name:
            raise ValueError(f"budget: expected setting=value, got {pair!r} in {text!r}")
        try:
            settings[name] = json.loads(value)
        except json.JSONDecodeError:
            settings[name] = value
    try:
        resolve_config(settings, {}, source="the budget")
    except ValueError as error:
        raise ValueError(f"budget {text!r}: {error}") from error
    return Budget(text.strip(), settings)
