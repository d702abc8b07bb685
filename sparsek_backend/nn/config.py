"""Settings of a native-sparse-attention layer, as they stand in a checkpoint's ``nsa`` section."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from sparsek_kernels.checks import check_int
from sparsek_kernels.nsa.spec import NSASpec


@dataclass(frozen=True)
class NSAConfig(NSASpec):
    """What a layer attends and how it is parametrised (arXiv 2502.11089).

    Args:
        cmp_block_size: tokens of a compressed block.
        cmp_stride: tokens from one compressed block to the next.
        sel_block_size: tokens of a selection block.
        top_n: blocks that a token and KV head select, the forced ones included.
        num_init_blocks: first blocks, always selected.
        num_local_blocks: latest blocks, always selected.
        window_size: tokens of the sliding branch, the query's own included.
        compression: ``mlp`` for the learnable map of equation 7, ``mean`` for the block mean.
        cmp_hidden_size: width of that map's hidden layer; ``head_dim`` when ``None``.
        gate_hidden_size: width of the gates' hidden layer; ``hidden_size // 8``, at least 16,
            when ``None``.
        shared_kv: one K and V for the three branches instead of one for each.
        rope_theta: base of the rotary embedding; ``None`` leaves positions out.

    Raises:
        TypeError: a field of a wrong type.
        ValueError: a value out of range; the message names the field.
    """

    window_size: int = 512
    compression: Literal["mlp", "mean"] = "mlp"
    cmp_hidden_size: int | None = None
    gate_hidden_size: int | None = None
    shared_kv: bool = False
    rope_theta: float | None = 10000.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.compression not in ("mlp", "mean"):
            raise ValueError(f"compression: expected 'mlp' or 'mean', got {self.compression!r}")
        for name in ("window_size", "cmp_hidden_size", "gate_hidden_size"):
            value = getattr(self, name)
            if value is not None or name == "window_size":
                check_int(name, value, 1)
        if not isinstance(self.shared_kv, bool):
            raise TypeError(f"shared_kv: expected a bool, got {self.shared_kv!r}")
        if self.rope_theta is None:
            return
        if isinstance(self.rope_theta, bool) or not isinstance(self.rope_theta, int | float):
            raise TypeError(f"rope_theta: expected a number or None, got {self.rope_theta!r}")
        if not self.rope_theta > 0:
            raise ValueError(f"rope_theta: expected a number > 0 or None, got {self.rope_theta}")

    @property
    def spec(self) -> NSASpec:
        """The integers that the kernels take."""
        return NSASpec(*self.as_list())

    @property
    def num_branches(self) -> int:
        """Pairs of K and V: one for each branch, or one for all."""
        return 1 if self.shared_kv else 3

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> NSAConfig:
        """Read a config section.

        Raises:
            TypeError: no section, or a field of a wrong type.
            ValueError: an unknown field, named, or one out of range.
        """
        if not isinstance(values, Mapping):
            raise TypeError(f"nsa: expected a section of fields, got {type(values).__name__}")
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(
                f"nsa: expected fields of {', '.join(sorted(known))}, got {', '.join(unknown)}"
            )
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """The section as plain values, for a checkpoint's config."""
        return asdict(self)
