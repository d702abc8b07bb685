"""SeerAttention-R's settings, as its checkpoints of gates state them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparsek_backend.infllm import ConfigError, shown
from sparsek_kernels.paged.index.seer.gates import SMALLEST_GATED

WEIGHTS = ("attn_gate_weights.safetensors", "attn_gate_weights.pth")
"""Names of the file of gates; the second one is that of the published checkpoints."""

_FIELD = "seerattn_"
_TRAINED = {
    "k_seq_pooling_type": "Kmaxminavg",
    "q_head_pooling_type": "Qproj",
    "use_rope": True,
}
"""What the ranking here computes; SeerAttention-R's defaults."""
_REMEDY = "remedy: set gates to a folder of SeerAttention-R's gates, or mode block_topk"


@dataclass(frozen=True)
class SeerSelection:
    """Gates that rank blocks for decoded tokens (SeerAttention-R, arXiv 2506.08889, section 3)."""

    weights: Path  # the file of the gates
    block_size: int  # tokens of a block that has one gate key
    token_budget: int  # tokens that a decoded token attends
    start_layer: int  # layers before it attend everything
    use_qk_norm: bool  # whether gate queries and keys are normalised

    @classmethod
    def read(cls, gates: object) -> SeerSelection:
        """Read a folder of gates; absent fields of its config have SeerAttention-R's defaults.

        Raises:
            ConfigError: it is no such folder, or its gates are computed in another way.
        """
        folder = Path(gates).expanduser() if isinstance(gates, str | Path) else None
        weights = [folder / name for name in WEIGHTS if (folder / name).is_file()] if folder else []
        if folder is None or not weights:
            raise ConfigError(
                "SPARSEK setting gates: mode 'seer' expected a folder with config.json and "
                f"{' or '.join(WEIGHTS)}, got {shown(gates)}; {_REMEDY}"
            )
        path = folder / "config.json"
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            block_size = _integer(found, "gate_block_size", None, SMALLEST_GATED)
            budget = _integer(found, "token_budget", 4096, 1)
            start_layer = _integer(found, "start_layer", 0, 0)
            for name, expected in _TRAINED.items():
                if found.get(_FIELD + name, expected) != expected:
                    got = shown(found[_FIELD + name])
                    raise ValueError(f"{_FIELD}{name}: expected {expected!r}, got {got}")
            if block_size % 16:
                raise ValueError(
                    f"{_FIELD}gate_block_size: expected a multiple of 16, got {block_size}"
                )
        except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(f"SPARSEK mode seer: {path}: {error}; {_REMEDY}") from None
        norm = bool(found.get(f"{_FIELD}use_qk_norm", False))
        return cls(weights[0], block_size, budget, start_layer, norm)

    def settings(self) -> dict[str, Any]:
        """Return the fields of :class:`SparsityConfig` that attend as many tokens.

        The first block and the query's own are always attended, and count.
        """
        top_k = max(self.token_budget // self.block_size - 2, 1)
        return {
            "sel_block_size": self.block_size,
            "num_sink": self.block_size,
            "window_size": 1,
            "top_k": top_k,
            "decode_tokens": top_k * self.block_size,
            "dense_below": 0,
            "dense_layers": self.start_layer,
        }


def _integer(found: dict[str, Any], name: str, default: int | None, low: int) -> int:
    value = found.get(_FIELD + name, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise ValueError(f"{_FIELD}{name}: expected an integer from {low}, got {shown(value)}")
    return value
