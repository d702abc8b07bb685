"""vLLM's model of :class:`sparsek_backend.nn.llama.NSALlamaForCausalLM` checkpoints.

Llama but for its attention; registered by the plugin and imported when such a model is loaded.
Tensor parallelism divides KV heads.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.llama import LlamaDecoderLayer, LlamaMLP, LlamaModel
from vllm.model_executor.models.utils import maybe_prefix
from vllm.sequence import IntermediateTensors

from sparsek_backend.nn.compression import CompressionMLP
from sparsek_backend.nn.config import NSAConfig
from sparsek_backend.vllm_backend.engine import engine_of
from sparsek_backend.vllm_backend.settings import nsa_section, require_backend
from sparsek_kernels.nsa.compress.rotary import rotary_frequencies, rotate
from sparsek_kernels.nsa.paged.cache import Compression

from .backend import NSABackend

_MERGED = {"gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1)}
"""Projections of the checkpoint that are parts of one here."""


class NSAAttention(nn.Module):
    """:class:`sparsek_backend.nn.NativeSparseAttention` over vLLM's KV cache.

    One attention layer of vLLM keeps K and V of the three branches as heads of one cache and
    returns the three outputs side by side.  Parameters have the names of the trained layer's.
    """

    def __init__(self, config: Any, nsa: NSAConfig, cache_config: Any, prefix: str) -> None:
        super().__init__()
        ranks = get_tensor_model_parallel_world_size()
        num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.nsa = nsa
        self.num_heads, self.num_kv_heads = num_heads // ranks, num_kv_heads // ranks
        self.head_dim = dim = config.head_dim
        self.num_branches = branches = 1 if nsa.shared_kv else 3
        size, bias = config.hidden_size, getattr(config, "attention_bias", False)
        kv_sizes = [num_kv_heads * dim] * branches
        gate_size = nsa.gate_hidden_size or max(size // 8, 16)
        self.q_proj = ColumnParallelLinear(size, num_heads * dim, bias=bias)
        self.k_proj = MergedColumnParallelLinear(size, kv_sizes, bias=bias)
        self.v_proj = MergedColumnParallelLinear(size, kv_sizes, bias=bias)
        self.o_proj = RowParallelLinear(num_heads * dim, size, bias=bias)
        self.gate_in = ReplicatedLinear(size, gate_size, bias=True)
        self.gate_out = MergedColumnParallelLinear(gate_size, [num_heads] * 3, bias=True)
        self.phi_k: CompressionMLP | None = None
        self.phi_v: CompressionMLP | None = None
        if nsa.compression == "mlp":
            hidden = nsa.cmp_hidden_size or dim
            self.phi_k = CompressionMLP(nsa.cmp_block_size, dim, hidden)
            self.phi_v = CompressionMLP(nsa.cmp_block_size, dim, hidden)
        self.rope_freqs: torch.Tensor | None
        freqs = None if nsa.rope_theta is None else rotary_frequencies(dim, nsa.rope_theta)
        self.register_buffer("rope_freqs", freqs, persistent=False)
        self.attn = Attention(
            3 * self.num_heads,  # its constructor wants a multiple of the cache's heads
            dim,
            dim**-0.5,
            num_kv_heads=branches * self.num_kv_heads,
            cache_config=cache_config,
            prefix=f"{prefix}.attn",
            attn_backend=NSABackend,
            make_compression=self.compression,
        )
        self.attn.num_heads = self.num_heads  # as it reads queries

    def compression(self) -> Compression:
        """How compressed keys and values are made, with the loaded weights."""
        dtype = self.q_proj.weight.dtype
        return Compression(
            None if self.phi_k is None else self.phi_k.weights(dtype),
            None if self.phi_v is None else self.phi_v.weights(dtype),
            self.rope_freqs,
            rotated_keys=self.nsa.shared_kv,
        )

    def _rotate(self, heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        if self.rope_freqs is None:
            return heads
        return rotate(heads[None], positions, self.rope_freqs)[0]

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """Attend the new tokens ``[T, hidden]`` at ``positions [T]``."""
        q = self.q_proj(hidden_states)[0].unflatten(-1, (self.num_heads, self.head_dim))
        k = self.k_proj(hidden_states)[0].unflatten(-1, (-1, self.head_dim))
        v = self.v_proj(hidden_states)[0]
        raw = 0 if self.nsa.shared_kv else self.num_kv_heads
        k = torch.cat([k[:, :raw], self._rotate(k[:, raw:], positions)], dim=1)
        q = self._rotate(q, positions).flatten(1)
        out = self.attn(q, k.flatten(1), v, output_shape=(q.shape[0], 3 * q.shape[1]))
        hidden = nn.functional.silu(self.gate_in(hidden_states)[0])
        gates = torch.sigmoid(self.gate_out(hidden)[0].float()).unflatten(-1, (3, -1, 1))
        out = out.unflatten(-1, (3, self.num_heads, self.head_dim)).float()
        mixed = (out * gates).sum(1).flatten(1).to(hidden_states.dtype)
        projected: torch.Tensor = self.o_proj(mixed)[0]
        return projected


class NSADecoderLayer(LlamaDecoderLayer):
    """Llama's layer with that attention."""

    def __init__(self, vllm_config: VllmConfig, prefix: str = "") -> None:
        nn.Module.__init__(self)  # Llama's own would make its attention
        config = vllm_config.model_config.hf_config
        nsa = nsa_section(engine_of(vllm_config).resolved)
        self.self_attn = NSAAttention(config, nsa, vllm_config.cache_config, f"{prefix}.self_attn")
        self.mlp = LlamaMLP(
            config.hidden_size, config.intermediate_size, config.hidden_act, prefix=f"{prefix}.mlp"
        )
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class NSALlamaForCausalLM(nn.Module):
    """The model that vLLM builds for the architecture of this name."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.config = config
        require_backend(vllm_config)
        self.model = LlamaModel(
            vllm_config=vllm_config,
            prefix=maybe_prefix(prefix, "model"),
            layer_type=NSADecoderLayer,
        )
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size)
        if config.tie_word_embeddings:
            self.lm_head = self.lm_head.tie_weights(self.model.embed_tokens)
        self.logits_processor = LogitsProcessor(config.vocab_size)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Embeddings of tokens."""
        embedded: torch.Tensor = self.model.embed_tokens(input_ids)
        return embedded

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Hidden states ``[T, hidden]`` of the new tokens."""
        hidden: torch.Tensor = self.model(input_ids, positions, intermediate_tensors, inputs_embeds)
        return hidden

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Logits of hidden states."""
        logits: torch.Tensor | None = self.logits_processor(self.lm_head, hidden_states)
        return logits

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load a checkpoint; returns the names of the parameters that it filled.

        Raises:
            ValueError: the checkpoint has a weight that the model lacks.
        """
        params = dict(self.named_parameters())
        loaded = set()
        for name, weight in weights:
            if name == "lm_head.weight" and self.config.tie_word_embeddings:
                continue
            shard: tuple[int, ...] = ()
            *path, module, leaf = name.split(".")
            if module in _MERGED:
                module, index = _MERGED[module]
                shard = (index,)
            target = ".".join([*path, module, leaf])
            if target not in params:
                raise ValueError(f"{name}: expected a weight of NSALlamaForCausalLM, got this one")
            param = params[target]
            getattr(param, "weight_loader", default_weight_loader)(param, weight, *shard)
            loaded.add(target)
        for layer in self.modules():
            if isinstance(layer, NSAAttention):
                layer.attn.impl.renew_weights()
        return loaded
