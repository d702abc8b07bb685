"""InfLLM-v2's settings in a model's own config, and the error of settings that do not read."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

FLAG = "--additional-config"
MODEL_CONFIG = "the model's config"
KERNEL_SIZE, KERNEL_STRIDE = 32, 16
"""Of the means of K that mode infllm scores."""


class ConfigError(ValueError):
    """A setting is unknown, invalid or contradictory; the message says which and what to do."""


class InfLLMSelection(BaseModel):
    """InfLLM-v2's ``sparse_config`` (arXiv 2509.24663; MiniCPM4 and 4.1).

    A query attends ``topk + window_size // block_size`` blocks: the initial ones, its own and the
    ``window_size // block_size`` before it, and the best-scoring of the rest.  It attends
    everything while the sequence has fewer than ``dense_len`` tokens.
    """

    model_config = ConfigDict(frozen=True, strict=True)

    block_size: int = Field(64, ge=1)  # tokens
    window_size: int = Field(2048, ge=0)  # tokens
    dense_len: int = 8192  # tokens; below 1 it is never reached
    init_blocks: int = Field(1, ge=0)  # always attended; ``topk`` counts them
    topk: int = 64  # blocks attended beyond the window's
    # of the overlapping means of K that are scored
    kernel_size: int = Field(KERNEL_SIZE, ge=1)
    kernel_stride: int = Field(KERNEL_STRIDE, ge=1)
    use_nope: bool = False  # whether scores are of queries and keys without positions

    @classmethod
    def read(cls, section: object) -> InfLLMSelection:
        """Read the section of a model's config; absent fields have InfLLM-v2's defaults.

        Raises:
            ConfigError: the section is no object, or a field has no value of InfLLM-v2's.
        """
        try:
            return cls.model_validate(section)
        except ValidationError as error:
            raise ConfigError(
                f"SPARSEK: sparse_config of {MODEL_CONFIG} does not read as InfLLM-v2 settings "
                f"({describe(error)}); set the fields with {FLAG} and mode sink_window or dense, "
                "or correct the model's config.json"
            ) from None

    @model_validator(mode="after")
    def _has_blocks_to_choose(self) -> InfLLMSelection:
        if self._chosen_blocks < 1:
            least = self.topk + 1 - self._chosen_blocks
            raise ValueError(
                f"topk: expected {least} or more, of which {least - 1} are attended anyway, got "
                f"{self.topk}"
            )
        return self

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
        """Check that blocks can be scored as the model was trained."""
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


def invalid_fields(error: ValidationError) -> list[tuple[str, str]]:
    """Name of each invalid field, what was expected of it and what came; "" for the whole."""
    found = []
    for item in error.errors(include_url=False):
        name = ".".join(map(str, item["loc"]))
        reason = item["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
        reason = reason[:1].lower() + reason[1:]
        validator = not name and item["type"] == "value_error"  # its message has what came
        found.append((name, reason if validator else f"{reason}, got {shown(item['input'])}"))
    return found


def describe(error: ValidationError) -> str:
    """One phrase for each invalid field."""
    return "; ".join(": ".join(filter(None, parts)) for parts in invalid_fields(error))


def shown(value: object) -> str:
    """The value as in Python source, cut where it would flood the message."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # thousands of digits, or of brackets
        return f"a value of type {type(value).__name__} that is too long to print"
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"
