"""What the ranks of the tests run; results go back as arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from sparsek_backend.distributed import (
    SequenceLayout,
    context_parallel_sink_flash_attention,
    shard,
    sum_gradients,
    unshard,
)
from sparsek_backend.nn import (
    NativeSparseAttention,
    NSAConfig,
    NSALlamaConfig,
    NSALlamaForCausalLM,
)

Arrays = dict[str, np.ndarray]


def attend(
    mesh: DeviceMesh, layout: SequenceLayout, settings: dict[str, Any], whole: Arrays
) -> Arrays:
    """Output, log-sum-exp and gradients of this rank."""
    local = {
        name: shard(torch.from_numpy(x), mesh, layout, 2 if name == "dlse" else 1)
        for name, x in whole.items()
        if name != "sinks"
    }
    leaves = {name: local[name].requires_grad_() for name in "qkv"}
    if "sinks" in whole:
        leaves["sinks"] = torch.from_numpy(whole["sinks"]).requires_grad_()
    out, lse = context_parallel_sink_flash_attention(
        *(leaves[name] for name in "qkv"),
        mesh=mesh,
        layout=layout,
        sinks=leaves.get("sinks"),
        return_lse=True,
        **settings,
    )
    torch.autograd.backward((out, lse), (local["dout"], local["dlse"]))
    found = {"out": out, "lse": lse, **{f"d{name}": x.grad for name, x in leaves.items()}}
    return {name: x.detach().numpy() for name, x in found.items()}


def round_trip(mesh: DeviceMesh, layout: SequenceLayout) -> tuple[np.ndarray, np.ndarray]:
    """Token numbers and positions of the shards, after ``shard`` and ``unshard``."""
    stream = torch.arange(layout.num_tokens)[None, :, None].expand(2, -1, 3)
    mine = shard(stream, mesh, layout)
    rank = mesh.get_local_rank()
    assert torch.equal(mine[0, :, 0], layout.token_indices(rank))
    positions = layout.position_ids(rank)[:, None]
    return unshard(mine, mesh, layout).numpy(), unshard(positions, mesh, layout, 0).numpy()


def call_with(mesh: DeviceMesh, changed: dict[int, dict[str, Any]]) -> None:
    """A good call on every rank but for what ``changed`` replaces there."""
    torch.manual_seed(0)
    world = mesh.size()
    arguments: dict[str, Any] = {
        **{name: torch.randn(1, 8, 2, 8) for name in "qkv"},
        "layout": SequenceLayout(8 * world, world),
        "window_size": 4,
        "num_sink": 2,
        **changed.get(mesh.get_local_rank(), changed.get(-1, {})),
    }
    context_parallel_sink_flash_attention(**arguments, mesh=mesh)


SMALL = {"cmp_block_size": 8, "cmp_stride": 4, "sel_block_size": 8, "top_n": 4, "window_size": 10}


def build(options: dict[str, Any], dtype: torch.dtype, mesh: DeviceMesh | None = None) -> Any:
    """An NSA layer with 4 query heads and 2 KV heads of size 8, the same on every rank."""
    torch.manual_seed(0)
    config = NSAConfig.from_dict({**SMALL, **options})
    return NativeSparseAttention(24, 4, 2, 8, config=config, dtype=dtype, mesh=mesh)


def run_layer(
    mesh: DeviceMesh,
    layout: SequenceLayout,
    options: dict[str, Any],
    whole: Arrays,
    compressed_only: list[bool] | None = None,
) -> Arrays:
    """Output and gradients of the tokens and weights, from this rank's shard."""
    x, upstream = (shard(torch.from_numpy(whole[name]), mesh, layout) for name in ("x", "dout"))
    module = build(options, x.dtype, mesh)
    x.requires_grad_()
    shut = None if compressed_only is None else torch.tensor(compressed_only)
    out = module(x, layout=layout, compressed_only=shut)
    out.backward(upstream)
    found = {name: p.grad for name, p in module.named_parameters()}
    assert all(grad is not None for grad in found.values())
    return {name: y.detach().numpy() for name, y in {"out": out, "dx": x.grad, **found}.items()}


def call_layer_with(mesh: DeviceMesh, changed: dict[int, dict[str, Any]]) -> None:
    """A good call of the layer on every rank but for what ``changed`` replaces there."""
    arguments = {"hidden_states": torch.randn(1, 12, 24)}
    arguments.update(changed.get(mesh.get_local_rank(), {}))
    build({}, torch.float32, mesh)(**arguments)


def new_model(mesh: DeviceMesh | None = None) -> NSALlamaForCausalLM:
    """A model of two layers, the same on every rank."""
    torch.manual_seed(0)
    config = NSALlamaConfig(64, 24, 48, 2, 4, 2, 8, nsa=NSAConfig.from_dict(SMALL))
    return NSALlamaForCausalLM(config, mesh)


def token_losses(model: Any, tokens: torch.Tensor, targets: torch.Tensor, **options: Any) -> Any:
    """The sum of the losses of all tokens."""
    logits = model(tokens, **options)
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="sum"
    )


def train(mesh: DeviceMesh, layout: SequenceLayout, tokens: np.ndarray, steps: int) -> Arrays:
    """Weights after some steps of CP 2 x data parallel 2, sharded over all four by FSDP2."""
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    cp = both["cp"]
    model = new_model(cp)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stream = torch.from_numpy(tokens)[both["dp"].get_local_rank()][None]
    inputs, targets = (shard(x, cp, layout) for x in (stream[:, :-1], stream[:, 1:]))
    for _ in range(steps):
        optimizer.zero_grad()
        losses = token_losses(model, inputs, targets, layout=layout)
        # FSDP2 averages over four ranks: their sum over all tokens is the mean loss.
        (losses * mesh.size() / (2 * layout.num_tokens)).backward()
        optimizer.step()
    return {name: x.full_tensor().detach().numpy() for name, x in model.state_dict().items()}


def summed_gradients(mesh: DeviceMesh, dtype: str) -> np.ndarray:
    """A gradient of ``rank + 1`` after ``sum_gradients``; one that is none stays so."""
    used, unused = (torch.nn.Parameter(torch.zeros(3, dtype=getattr(torch, dtype))) for _ in "ab")
    used.grad = torch.full_like(used, 1 + mesh.get_local_rank())
    sum_gradients([used, unused], mesh)
    assert unused.grad is None
    return used.grad.float().numpy()


def uneven_gradients(mesh: DeviceMesh) -> None:
    """One rank has no gradient."""
    weight = torch.nn.Parameter(torch.zeros(3))
    if mesh.get_local_rank():
        weight.grad = torch.ones(3)
    sum_gradients([weight], mesh)
