"""Tensor parallelism of natively sparse models: ranks share the KV heads, each with its queries.

Every rank attends its own KV heads over all tokens that it holds, so that attention needs no
exchange of its own: ``o_proj`` adds the ranks' parts up.  Context parallelism and FSDP2 take other
dimensions of the mesh.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from sparsek_backend.nn.llama import NSALlamaForCausalLM
from sparsek_backend.nn.native_sparse_attention import NativeSparseAttention


class Replicated(ParallelStyle):
    """A module whose parameters, input and output every rank holds whole."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        whole = [Replicate()]

        def enter(_: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            first = inputs[0]
            if not isinstance(first, DTensor):
                first = DTensor.from_local(first, mesh, whole, run_check=False)
            return (first, *inputs[1:])

        def leave(_: nn.Module, output: Any, __: DeviceMesh) -> Any:
            return output.to_local()

        return distribute_module(module, device_mesh, None, enter, leave)


class KVHeadParallel(ParallelStyle):
    """A :class:`NativeSparseAttention` of which each rank has some KV heads and their queries.

    Parameters become DTensors.  ``k_proj``, ``v_proj`` and ``gate_out`` stack head by head instead
    of branch by branch, so that a rank's heads are consecutive rows: ``save_pretrained`` turns them
    back.

    Raises:
        TypeError: another module.
        ValueError: ranks that do not divide the KV heads, or a layer that is sharded already.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, NativeSparseAttention):
            raise TypeError(f"module: expected NativeSparseAttention, got {type(module).__name__}")
        ranks = device_mesh.size()
        if any(isinstance(x, DTensor) for x in module.parameters()):
            raise ValueError("module: expected whole weights, got a layer that is sharded already")
        if module.num_kv_heads % ranks:
            raise ValueError(
                f"device_mesh: expected a divisor of {module.num_kv_heads} KV heads, got {ranks}"
            )
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter.copy_(module.restacked(name, parameter))
        module.register_buffer("stacked_by_head", torch.ones(1, device=module.q_proj.weight.device))
        by_heads = ("q_proj", "k_proj", "v_proj", "gate_out")
        plan: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in by_heads}
        parallelize_module(
            module, device_mesh, {**plan, "o_proj": RowwiseParallel(), "gate_in": Replicated()}
        )
        for phi in (module.phi_k, module.phi_v):
            if phi is not None:
                distribute_module(phi, device_mesh)
        module.num_heads //= ranks
        module.num_kv_heads //= ranks
        return module


def tensor_parallel(model: NSALlamaForCausalLM, mesh: DeviceMesh) -> NSALlamaForCausalLM:
    """The model with its weights shared by the ranks of ``mesh``, as DTensors; changed in place.

    Attention is shared by KV heads, MLPs by neurons, the output head by words of the vocabulary.
    Tokens and logits are whole on every rank.  Rank 0's weights are taken.  ``fully_shard`` comes
    after this.

    Raises:
        ValueError: ranks that do not divide the KV heads or the neurons, or a model that is sharded
            already; it is as it was.
    """
    if any(isinstance(x, DTensor) for x in model.parameters()):
        raise ValueError("model: expected whole weights, got a model that is sharded already")
    for name in ("num_key_value_heads", "intermediate_size"):
        if getattr(model.config, name) % mesh.size():
            raise ValueError(
                f"mesh: expected a divisor of {name}={getattr(model.config, name)}, "
                f"got {mesh.size()} ranks"
            )
    tied = model.config.tie_word_embeddings
    head = Replicated() if tied else ColwiseParallel(output_layouts=Replicate())
    plan: dict[str, ParallelStyle] = {
        "model.embed_tokens": Replicated(),
        "model.norm": Replicated(),
        "lm_head": head,
    }
    for index in range(model.config.num_hidden_layers):
        layer = f"model.layers.{index}"
        plan |= {
            f"{layer}.input_layernorm": Replicated(),
            f"{layer}.self_attn": KVHeadParallel(),
            f"{layer}.post_attention_layernorm": Replicated(),
            f"{layer}.mlp.gate_proj": ColwiseParallel(),
            f"{layer}.mlp.up_proj": ColwiseParallel(),
            f"{layer}.mlp.down_proj": RowwiseParallel(),
        }
    parallelize_module(model, mesh, plan)
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    return model
