"""The gates of mode ``seer``: a file beside the model's own weights, which vLLM does not read."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from sparsek_backend.config import ConfigError, ResolvedConfig
from sparsek_kernels.paged.index.seer.gates import POOLS, Gates

from .sleep import make_to_stay

_NAME = "model.layers.{}.self_attn.attn_gate.attngate_{}.weight"


class GateFile:
    """The gates of a model's layers, read when the first one is asked for.

    Args:
        path: a file of torch or safetensors with the names of SeerAttention's checkpoints.
        num_kv_heads: of the whole model.
        head_dim: of queries and keys, and of their gates.
    """

    def __init__(
        self, path: Path, num_kv_heads: int, group: int, head_dim: int, norms: bool
    ) -> None:
        self.path = path
        self.num_kv_heads = num_kv_heads
        self._shapes: dict[str, tuple[int, ...]] = {
            "linear_q": (num_kv_heads, group, head_dim, head_dim),
            "linear_k": (num_kv_heads, POOLS * head_dim, head_dim),
        }
        if norms:
            self._shapes |= {"qnorm": (head_dim,), "knorm": (head_dim,)}

    @cached_property
    def _tensors(self) -> dict[str, torch.Tensor]:
        try:
            if self.path.suffix == ".safetensors":
                from safetensors.torch import load_file

                found: dict[str, torch.Tensor] = load_file(self.path)
            else:
                found = dict(torch.load(self.path, map_location="cpu", weights_only=True))
        except Exception as error:  # whatever a damaged file makes its readers raise
            raise ConfigError(
                f"SPARSEK mode seer: {self.path} does not read as gates ({error}); remedy: "
                "download it again, or mode block_topk"
            ) from None
        return found

    def check(self, index: int) -> None:
        """Check that the layer with this index has gates of the model's shape.

        Raises:
            ConfigError: it has none, or others; the message has the name of the tensor.
        """
        for part, shape in self._shapes.items():
            name = _NAME.format(index, part)
            tensor = self._tensors.get(name)
            got = "none" if tensor is None else f"shape {list(tensor.shape)}"
            if tensor is None or tuple(tensor.shape) != shape:
                raise ConfigError(
                    f"SPARSEK mode seer: {name}: expected shape {list(shape)} in {self.path}, got "
                    f"{got}; remedy: gates of this model, or dense_layers with layer {index}"
                )

    def layer(self, index: int, heads: slice, own_cache: bool, device: torch.device) -> Gates:
        """Return the gates of some KV heads of the layer with this index.

        They are copied to the device in another thread: vLLM drops what this one makes for the KV
        cache when an engine sleeps.

        Args:
            own_cache: whether the layer writes the pages that it reads.
            device: where the layer runs.

        Raises:
            ConfigError: the file has none of the model's shape.
            NotImplementedError: another layer writes the pages, with gates of its own.
        """
        if not own_cache:
            raise NotImplementedError(
                f"SPARSEK mode seer: layer {index} shares another's KV cache, which is not served; "
                "use dense_layers with it, or mode block_topk"
            )
        self.check(index)

        def copied(part: str) -> torch.Tensor:
            tensor = self._tensors[_NAME.format(index, part)]
            own = tensor[heads] if part.startswith("linear") else tensor
            return own.to(device, torch.float32).contiguous()

        found = make_to_stay(lambda: {part: copied(part) for part in self._shapes})
        return Gates(found["linear_q"], found["linear_k"], found.get("qnorm"), found.get("knorm"))


def open_gates(resolved: ResolvedConfig, model: Any) -> GateFile | None:
    """Return the gates of mode ``seer`` for a model of vLLM's, ``None`` in the other modes."""
    if resolved.seer is None:
        return None
    kv_heads = model.get_total_num_kv_heads()
    group = model.hf_text_config.num_attention_heads // kv_heads
    size = model.get_head_size()
    return GateFile(resolved.seer.weights, kv_heads, group, size, resolved.seer.use_qk_norm)
