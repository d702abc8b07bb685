"""SeerAttention-R's settings, as its checkpoints of gates state them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sparsek_backend.infllm import ConfigError, describe, shown
from sparsek_kernels.paged.index.seer.gates import SMALLEST_GATED

WEIGHTS = ("attn_gate_weights.safetensors", "attn_gate_weights.pth")
"""Names of the file of gates; the second one is that of the published checkpoints."""

_REMEDY = "remedy: set gates to a folder of SeerAttention-R's gates, or mode block_topk"


class SeerSelection(BaseModel):
    """Gates that rank blocks for decoded tokens (SeerAttention-R, arXiv 2506.08889, section 3).

    The last three fields have the only values by which blocks are ranked here.
    """

    model_config = ConfigDict(
        frozen=True, strict=True, alias_generator=lambda name: f"seerattn_{name}"
    )

    weights: Path = Field(alias="weights")  # the file of the gates
    gate_block_size: int = Field(ge=SMALLEST_GATED, multiple_of=16)  # tokens that have one gate key
    token_budget: int = Field(4096, ge=1)  # tokens that a decoded token attends
    start_layer: int = Field(0, ge=0)  # layers before it attend everything
    use_qk_norm: bool = False  # whether gate queries and keys are normalised
    k_seq_pooling_type: Literal["Kmaxminavg"] = "Kmaxminavg"
    q_head_pooling_type: Literal["Qproj"] = "Qproj"
    use_rope: Literal[True] = True

    @classmethod
    def read(cls, gates: object) -> SeerSelection:
        """Read a folder of gates; absent fields of its config have SeerAttention-R's defaults.

        Raises:
            ConfigError: it is no such folder, or its gates are computed in another way.
        """
        try:
            folder = Path(gates).expanduser() if isinstance(gates, str | Path) else None
            files = [folder / name for name in WEIGHTS] if folder else []
            weights = [path for path in files if path.is_file()]
        except (OSError, RuntimeError) as error:  # nobody may look, or there is no such user
            raise ConfigError(
                f"SPARSEK setting gates: got {shown(gates)}: {error}; {_REMEDY}"
            ) from None
        if folder is None or not weights:
            raise ConfigError(
                "SPARSEK setting gates: mode 'seer' expected a folder with config.json and "
                f"{' or '.join(WEIGHTS)}, got {shown(gates)}; {_REMEDY}"
            )
        path = folder / "config.json"
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            return cls.model_validate({**found, "weights": weights[0]})
        except (OSError, ValueError, TypeError, RecursionError) as error:
            reason = describe(error) if isinstance(error, ValidationError) else error
            raise ConfigError(f"SPARSEK mode seer: {path}: {reason}; {_REMEDY}") from None

    def settings(self) -> dict[str, Any]:
        """Return the fields of :class:`SparsityConfig` that attend as many tokens.

        The first block and the query's own are always attended, and count.
        """
        top_k = max(self.token_budget // self.gate_block_size - 2, 1)
        return {
            "sel_block_size": self.gate_block_size,
            "num_sink": self.gate_block_size,
            "window_size": 1,
            "top_k": top_k,
            "decode_tokens": top_k * self.gate_block_size,
            "dense_below": 0,
            "dense_layers": self.start_layer,
        }
