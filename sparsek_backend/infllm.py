"""InfLLM-v2's settings in a model's own config, and the error of settings that do not read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

FLAG = "--additional-config"
MODEL_CONFIG = "the model's config"
KERNEL_SIZE, KERNEL_STRIDE = 32, 16
"""Of the means of K that mode infllm scores."""


class ConfigError(ValueError):
    """A setting is unknown, invalid or contradictory; the message says which and what to do."""


@dataclass(frozen=True)
class InfLLMSelection:
    """InfLLM-v2's ``sparse_config`` (arXiv 2509.24663; MiniCPM4 and 4.1).

    A query attends ``topk + window_size // block_size`` blocks: the initial ones, its own and the
    ``window_size // block_size`` before it, and the best-scoring of the rest.  It attends
    everything while the sequence has fewer than ``dense_len`` tokens.

    Args:
        block_size, window_size, dense_len: in tokens; below 1, ``dense_len`` is never reached.
        init_blocks: first blocks, always attended; ``topk`` counts them.
        topk: blocks attended beyond the window's.
        kernel_size, kernel_stride: tokens of the overlapping means of K that are scored.
        use_nope: whether scores are of queries and keys without positions.
    """

    block_size: int = 64
    window_size: int = 2048
    dense_len: int = 8192
    init_blocks: int = 1
    topk: int = 64
    kernel_size: int = 32
    kernel_stride: int = 16
    use_nope: bool = False

    @classmethod
    def read(cls, section: object) -> InfLLMSelection:
        """Read the section of a model's config; absent fields have InfLLM-v2's defaults.

        Raises:
            ConfigError: the section is no object, or a field has no value of InfLLM-v2's.
        """
        defaults = asdict(cls())
        del defaults["use_nope"]
        try:
            if not isinstance(section, Mapping):
                raise TypeError(f"expected an object, got {shown(section)}")
            numbers = {name: _integer(name, section, value) for name, value in defaults.items()}
            use_nope = section.get("use_nope", False)
            if not isinstance(use_nope, bool):
                raise TypeError(f"use_nope: expected true or false, got {shown(use_nope)}")
            found = cls(**numbers, use_nope=use_nope)
            found._check_range()
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"SPARSEK: sparse_config of {MODEL_CONFIG} does not read as InfLLM-v2 settings "
                f"({error}); set the fields with {FLAG} and mode sink_window or dense, or correct "
                "the model's config.json"
            ) from None
        return found

    def _check_range(self) -> None:
        """Check that a query has blocks to choose.

        Raises:
            ValueError: a number is too small for that.
        """
        lowest = {"block_size": 1, "window_size": 0, "init_blocks": 0}
        lowest |= {"kernel_size": 1, "kernel_stride": 1}
        for name, low in lowest.items():
            if getattr(self, name) < low:
                raise ValueError(f"{name}: expected {low} or more, got {getattr(self, name)}")
        if self._chosen_blocks < 1:
            least = self.topk + 1 - self._chosen_blocks
            raise ValueError(
                f"topk: expected {least} or more, of which {least - 1} are attended anyway, got "
                f"{self.topk}"
            )

    @property
    def local_blocks(self) -> int:
        """Blocks before a query's own that its window covers."""
        return self.window_size // self.block_size

    @property
    def total_blocks(self) -> int:
        """Blocks that a query attends."""
        return self.topk + self.local_blocks

    @property
    def _chosen_blocks(self) -> int:
        """Blocks that are chosen, the one included that a window of whole blocks straddles."""
        return self.total_blocks - self.init_blocks - max(self.local_blocks, 1)

    def check_trained_rule(self) -> None:
        """Check that blocks can be scored as the model was trained.

        Raises:
            ConfigError: they cannot; the message has the field.
        """
        expected = {"kernel_size": KERNEL_SIZE, "kernel_stride": KERNEL_STRIDE}
        for name, value in expected.items():
            if getattr(self, name) != value:
                raise ConfigError(
                    f"SPARSEK mode infllm: expected {name} {value} in the sparse_config of "
                    f"{MODEL_CONFIG}, got {getattr(self, name)}; remedy: mode block_topk, which "
                    "attends as many blocks, ranked by SPARSEK's own scores"
                )

    def settings(self) -> dict[str, Any]:
        """Return the fields of :class:`SparsityConfig` that attend the same number of blocks."""
        return {
            "mode": "block_topk",
            "sel_block_size": self.block_size,
            "num_sink": self.init_blocks * self.block_size,
            "window_size": max(self.local_blocks * self.block_size, 1),
            "top_k": self._chosen_blocks,
            "decode_tokens": self._chosen_blocks * self.block_size,
            "dense_below": max(self.dense_len, 0),
            "dense_last": 0,
        }


def _integer(name: str, section: Mapping[str, Any], default: int) -> int:
    value = section.get(name, default)
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        number = None
    if number is None or isinstance(value, bool) or (isinstance(value, float) and number != value):
        raise ValueError(f"{name}: expected an integer, got {shown(value)}")
    return number


def shown(value: object) -> str:
    """The value as in Python source, cut where it would flood the message."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # thousands of digits, or of brackets
        return f"a value of type {type(value).__name__} that is too long to print"
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"
