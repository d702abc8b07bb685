"""Calls of attention that the ranks of the tests make; results go back as arrays."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from sparsek_backend.distributed import (
    Compression,
    SequenceLayout,
    calls,
    context_parallel_block_sparse_attention,
    context_parallel_nsa_attention,
    context_parallel_sink_flash_attention,
    shard,
    unshard,
)
from sparsek_backend.distributed.exchange import Exchange
from sparsek_backend.nn import (
    CompressionMLP,
    NativeSparseAttention,
    NSAConfig,
)
from sparsek_backend.patterns import BlockSparsePattern

Arrays = dict[str, np.ndarray]


def attend(
    mesh: DeviceMesh,
    layout: SequenceLayout,
    settings: dict[str, Any],
    whole: Arrays,
    dtype: torch.dtype = torch.float32,
) -> Arrays:
    """Output, log-sum-exp and gradients of this rank."""
    inputs = {name: torch.from_numpy(x).to(mesh.device_type) for name, x in whole.items()}
    inputs |= {name: inputs[name].to(dtype) for name in ("q", "k", "v", "dout")}
    local = {
        name: shard(x, mesh, layout, 2 if name == "dlse" else 1)
        for name, x in inputs.items()
        if name != "sinks"
    }
    leaves = {name: local[name].requires_grad_() for name in "qkv"}
    if "sinks" in whole:
        leaves["sinks"] = inputs["sinks"].requires_grad_()
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
    return {name: x.detach().float().cpu().numpy() for name, x in found.items()}


def windows_in_order(mesh: DeviceMesh, layout: SequenceLayout, shape: list[int]) -> list[str]:
    """What a rank does in turn, forward and backward: ``send``, ``wait`` and ``attend``."""
    found: list[str] = []

    def noted(name: str, owner: Any, method: str) -> Any:
        real = getattr(owner, method)

        def call(*args: Any, **options: Any) -> Any:
            found.append(name)
            return real(*args, **options)

        return mock.patch.object(owner, method, call)

    leaves = [torch.randn(shape).requires_grad_() for _ in range(3)]
    with (
        noted("send", Exchange, "_begin"),
        noted("wait", Exchange, "wait"),
        noted("attend", calls, "forward_into"),
        noted("attend", calls, "backward"),
    ):
        context_parallel_sink_flash_attention(
            *leaves, mesh=mesh, layout=layout, num_sink=4, window_size=9
        ).sum().backward()
    return found


def attend_blocks(
    mesh: DeviceMesh,
    layout: SequenceLayout,
    mask: np.ndarray,
    causal: bool,
    whole: Arrays,
) -> Arrays:
    """Output, log-sum-exp and gradients of this rank under a block mask ``[P, R, C]``."""
    local = {
        name: shard(torch.from_numpy(x), mesh, layout, 2 if name == "dlse" else 1)
        for name, x in whole.items()
    }
    leaves = [local[name].requires_grad_() for name in "qkv"]
    pattern = BlockSparsePattern.from_mask(torch.from_numpy(mask), 16)
    out, lse = context_parallel_block_sparse_attention(
        *leaves, pattern, mesh=mesh, layout=layout, causal=causal, return_lse=True
    )
    torch.autograd.backward((out, lse), (local["dout"], local["dlse"]))
    found = {
        "out": out,
        "lse": lse,
        **{f"d{n}": x.grad for n, x in zip("qkv", leaves, strict=True)},
    }
    return {name: x.detach().numpy() for name, x in found.items()}


def attend_blocks_with(mesh: DeviceMesh, changed: dict[int, dict[str, Any]]) -> None:
    """A good call on every rank but for what ``changed`` replaces there."""
    arguments: dict[str, Any] = {
        "tokens": 32,
        "rows": 4,
        "layout": SequenceLayout(64, 2),
        "listed": -1,
        **changed.get(mesh.get_local_rank(), changed.get(-1, {})),
    }
    q = torch.zeros(1, arguments["tokens"], 2, 8)
    listed = torch.ones(1, arguments["rows"], arguments["rows"], dtype=torch.bool)
    listed[0, 0, arguments["listed"]] = False
    pattern = BlockSparsePattern.from_mask(listed, 16)
    context_parallel_block_sparse_attention(q, q, q, pattern, mesh=mesh, layout=arguments["layout"])


def call_by_default_elsewhere(mesh: DeviceMesh) -> None:
    """Good calls while new tensors go to another device by default."""
    layout = SequenceLayout(64, 2, "zigzag", (0, 20, 64))
    q, listed = torch.zeros(1, 32, 2, 8), torch.ones(1, 4, 4, dtype=torch.bool)
    pattern = BlockSparsePattern.from_mask(listed, 16)
    with torch.device("meta"):
        context_parallel_sink_flash_attention(q, q, q, mesh=mesh, layout=layout)
        context_parallel_block_sparse_attention(
            q, q, q, pattern, mesh=mesh, layout=SequenceLayout(64, 2)
        )
        assert layout.sequence_ids(0).device.type == "cpu"


def round_trip(mesh: DeviceMesh, layout: SequenceLayout) -> tuple[np.ndarray, np.ndarray]:
    """Token numbers and positions of the shards, after ``shard`` and ``unshard``."""
    stream = torch.arange(layout.num_tokens)[None, :, None].expand(2, -1, 3)
    mine = shard(stream, mesh, layout)
    rank = mesh.get_local_rank()
    assert torch.equal(mine[0, :, 0], layout.token_indices(rank))
    positions = layout.position_ids(rank)[:, None]
    for dtype in (torch.int16, torch.float8_e5m2, torch.bool):
        assert torch.equal(unshard(mine.to(dtype), mesh, layout).long(), stream.to(dtype).long())
    column = mine[:1, :, :1].mT.contiguous().mT  # whose last stride is not 1
    assert torch.equal(unshard(column, mesh, layout), stream[:1, :, :1])
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
    arguments |= {
        name: x.to(mesh.device_type) for name, x in arguments.items() if isinstance(x, torch.Tensor)
    }
    context_parallel_sink_flash_attention(**arguments, mesh=mesh)
    if mesh.device_type == "cuda":
        torch.cuda.synchronize()


def hang(_: DeviceMesh, flag: str) -> None:
    """Make a file and never answer."""
    Path(flag).touch()
    time.sleep(3600)


def die(mesh: DeviceMesh, where: str) -> None:
    """A good call, but the last rank ends without a word: before, within or on the way back."""
    if mesh.get_local_rank() == mesh.size() - 1:
        if where == "before":
            os._exit(1)
        method = "start" if where == "within" else "start_return"
        setattr(Exchange, method, lambda *_: os._exit(1))
    if where == "backward":
        build({}, torch.float32, mesh)(torch.randn(1, 12, 24)).sum().backward()
    else:
        call_with(mesh, {})


def die_and_call_again(mesh: DeviceMesh, where: str) -> None:
    """:func:`die`; ranks that it took nothing from learn of it in their next call."""
    die(mesh, where)
    torch.cuda.synchronize()
    call_with(mesh, {})


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
    recompute: bool = False,
) -> Arrays:
    """Output and gradients of the tokens and weights, from this rank's shard."""
    x, upstream = (shard(torch.from_numpy(whole[name]), mesh, layout) for name in ("x", "dout"))
    module = build(options, x.dtype, mesh)
    x.requires_grad_()
    shut = None if compressed_only is None else torch.tensor(compressed_only)
    given = {"layout": layout, "compressed_only": shut}
    out = checkpoint(module, x, use_reentrant=False, **given) if recompute else module(x, **given)
    out.backward(upstream)
    found = {name: p.grad for name, p in module.named_parameters()}
    assert all(grad is not None for grad in found.values())
    return {name: y.detach().numpy() for name, y in {"out": out, "dx": x.grad, **found}.items()}


def call_layer_with(mesh: DeviceMesh, changed: dict[int, dict[str, Any]]) -> None:
    """A good call of the layer on every rank but for what ``changed`` replaces there."""
    arguments = {"hidden_states": torch.randn(1, 12, 24)}
    arguments.update(changed.get(mesh.get_local_rank(), {}))
    build({}, torch.float32, mesh)(**arguments)


def compress_with_another_map(mesh: DeviceMesh) -> None:
    """A call whose map for values is one for blocks of another size, on rank 1 alone."""
    maps = [CompressionMLP(size, 8, 8).weights(torch.float32) for size in (8, 16)]
    phi_k, phi_v = maps[0], maps[mesh.get_local_rank()]
    x, gate = torch.randn(1, 16, 2, 8), torch.rand(1, 16, 2)
    context_parallel_nsa_attention(
        *(x, x, x, (gate, gate, gate)),
        mesh=mesh,
        layout=SequenceLayout(32, 2),
        compression=Compression(x, x, phi_k, phi_v),
        spec=NSAConfig.from_dict(SMALL).spec,
    )
