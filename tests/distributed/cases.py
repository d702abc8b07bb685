"""What the ranks of the tests run; results go back as arrays."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.integrations import flash_attention

from examples import train_context_parallel, train_transformers_fsdp2
from examples.verl_sink_window import SinkWindowAttention
from sparsek_backend.distributed import (
    Compression,
    SequenceLayout,
    calls,
    context_parallel_block_sparse_attention,
    context_parallel_nsa_attention,
    context_parallel_sink_flash_attention,
    shard,
    sum_gradients,
    unshard,
)
from sparsek_backend.distributed.exchange import Exchange
from sparsek_backend.nn import (
    CompressionMLP,
    KVHeadParallel,
    NativeSparseAttention,
    NSAConfig,
    NSALlamaConfig,
    NSALlamaForCausalLM,
    native_sparse_attention,
    tensor_parallel,
)
from sparsek_backend.nn.llama import is_sharded
from sparsek_backend.patterns import BlockSparsePattern
from sparsek_backend.train_demo.train import DemoConfig, Trainer
from sparsek_backend.transformers_op import attention

Arrays = dict[str, np.ndarray]

DEMO = DemoConfig(steps=8, max_length=64, save_every=2)


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
    gather: str = "all",
) -> Arrays:
    """Output and gradients of the tokens and weights, from this rank's shard."""
    attention = partial(context_parallel_nsa_attention, gather=gather)
    with mock.patch.object(native_sparse_attention, "context_parallel_nsa_attention", attention):
        return _run_layer(mesh, layout, options, whole, compressed_only, recompute)


def _run_layer(
    mesh: DeviceMesh,
    layout: SequenceLayout,
    options: dict[str, Any],
    whole: Arrays,
    compressed_only: list[bool] | None,
    recompute: bool,
) -> Arrays:
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


def new_model(
    mesh: DeviceMesh | None = None, tied: bool = False, neurons: int = 48
) -> NSALlamaForCausalLM:
    """A model of two layers, the same on every rank."""
    torch.manual_seed(0)
    nsa = NSAConfig.from_dict({**SMALL, "shared_kv": tied})
    config = NSALlamaConfig(64, 24, neurons, 2, 4, 2, 8, tie_word_embeddings=tied, nsa=nsa)
    return NSALlamaForCausalLM(config, mesh)


def token_losses(model: Any, tokens: torch.Tensor, targets: torch.Tensor, **options: Any) -> Any:
    """The sum of the losses of all tokens."""
    logits = model(tokens, **options)
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="sum"
    )


def train(
    mesh: DeviceMesh, how: str, tied: bool, layout: SequenceLayout, tokens: np.ndarray, folder: str
) -> None:
    """Three steps of four ranks together, then a saved folder.

    ``fsdp``: CP 2 x data parallel 2, weights sharded over all four.  ``tp``: the ranks that share a
    sequence (CP 2) shard the weights of each of TP 2.
    """
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "cp"))
    outer, cp = both["outer"], both["cp"]
    model = new_model(cp, tied)
    if how == "tp":
        tensor_parallel(model, outer)
    weights = mesh if how == "fsdp" else cp
    for layer in model.model.layers:
        fully_shard(layer, mesh=weights)
    fully_shard(model, mesh=weights)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    streams = torch.from_numpy(tokens)
    if how == "fsdp":
        streams = streams[outer.get_local_rank()][None]
    for _ in range(3):
        optimizer.zero_grad()
        losses = 0.0
        for stream in streams.split(1):
            inputs, targets = (shard(x, cp, layout) for x in (stream[:, :-1], stream[:, 1:]))
            losses = losses + token_losses(model, inputs, targets, layout=layout)
        # FSDP2 averages over its ranks: their sum over all tokens is the mean loss.
        (losses * weights.size() / (2 * layout.num_tokens)).backward()
        optimizer.step()
    model.save_pretrained(folder)


def head_parallel_gradients(mesh: DeviceMesh, whole: Arrays, context: bool = False) -> Arrays:
    """Logits and gradients of a model under tensor parallelism, of 2 x 2 ranks with ``context``."""
    tokens, dout = (torch.from_numpy(whole[name]) for name in ("tokens", "dout"))
    if context:
        both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "cp"))
        layout = SequenceLayout(tokens.shape[1], 2, "zigzag")
        model = tensor_parallel(new_model(both["cp"]), both["tp"])
        mine = model(shard(tokens, both["cp"], layout), layout=layout)
        mine.backward(shard(dout, both["cp"], layout))
        sum_gradients(model.parameters(), both["cp"])
        logits = unshard(mine, both["cp"], layout)
    else:
        model = tensor_parallel(new_model(), mesh)
        logits = model(tokens)
        logits.backward(dout)
    found = {"logits": logits.detach().numpy()}
    for path, module in model.named_modules():
        for name, x in module.named_parameters(recurse=False):
            assert x.grad.placements == x.placements
            found[f"{path}.{name}"] = x.grad.full_tensor().numpy()
    return found


def save_wrapped(_: DeviceMesh, folder: str) -> None:
    """A folder of a model under tensor parallelism, with layers that torch wraps."""
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "tp"))
    model = tensor_parallel(new_model(), both["tp"])
    first, second = model.model.layers
    model.model.layers[0] = checkpoint_wrapper(first)
    second.self_attn = torch.compile(second.self_attn)
    model.save_pretrained(folder)


def wrong_tensor_parallel(mesh: DeviceMesh, then: str) -> None:
    """Ranks that cannot share it, a model that is parallel already, a state for one that is not."""
    model = new_model(neurons=49 if then == "neurons" else 48)
    if then == "layer":
        parallelize_module(model, mesh, {"model.layers.0.self_attn": KVHeadParallel()})
    try:
        tensor_parallel(model, mesh)
    except ValueError:
        assert not is_sharded(model)  # it is as it was
        raise
    if then == "again":
        tensor_parallel(model, mesh)
    if then == "load":
        whole = {name: _whole(x) for name, x in model.state_dict().items()}
        new_model().load_state_dict(whole)


def _whole(x: Any) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def summed_gradients(mesh: DeviceMesh, dtype: str) -> np.ndarray:
    """A gradient of ``rank + 1`` after ``sum_gradients``; one that is none stays so."""
    used, unused = (torch.nn.Parameter(torch.zeros(3, dtype=getattr(torch, dtype))) for _ in "ab")
    used.grad = torch.full_like(used, 1 + mesh.get_local_rank())
    sum_gradients([used, unused], mesh)
    assert unused.grad is None
    return used.grad.float().numpy()


def uneven_gradients(mesh: DeviceMesh, lacking: list[list[int]]) -> None:
    """Gradients of like weights, but for those that a rank lacks."""
    weights = [torch.nn.Parameter(torch.zeros(3)) for _ in range(2)]
    for index, weight in enumerate(weights):
        if index not in lacking[mesh.get_local_rank()]:
            weight.grad = torch.ones(3)
    sum_gradients(weights, mesh)


def gradients_of_nothing(mesh: DeviceMesh) -> None:
    """One rank passes what is no parameter."""
    weight = torch.nn.Parameter(torch.zeros(3))
    sum_gradients([weight if mesh.get_local_rank() else None], mesh)  # type: ignore[list-item]


def sharded_gradients(mesh: DeviceMesh) -> None:
    """Gradients that FSDP2 has summed over the mesh."""
    layer = fully_shard(torch.nn.Linear(4, 4), mesh=mesh)
    layer(torch.ones(1, 4)).sum().backward()
    sum_gradients(layer.parameters(), mesh)


def run_example(_: DeviceMesh, arguments: list[str]) -> list[float]:
    """The losses that the training example prints."""
    return train_context_parallel.train(train_context_parallel.parse(arguments))


def received_keys(
    mesh: DeviceMesh, layout: SequenceLayout, whole: Arrays, gather: str
) -> tuple[np.ndarray, int]:
    """Outputs, and the rows that this rank receives in the largest exchange of keys."""
    local = {name: shard(torch.from_numpy(x), mesh, layout) for name, x in whole.items()}
    gates = local["gates"].unbind(-1)
    counts: list[int] = []
    start = Exchange.start

    def counted(exchange: Exchange, tensors: Any) -> None:
        counts.append(sum(rows for _, rows in exchange.transfers.receives))
        start(exchange, tensors)

    spec = NSAConfig.from_dict({**SMALL, "num_local_blocks": 1, "top_n": 2}).spec
    options = {"spec": spec, "window_size": 4, "gather": gather}
    with mock.patch.object(Exchange, "start", counted):
        out = context_parallel_nsa_attention(
            *(local[name] for name in "qkv"), gates, mesh=mesh, layout=layout, **options
        )
    return out.numpy(), max(counts)


def train_demo(mesh: DeviceMesh | None, kind: str, folder: str, stop: int) -> list[float]:
    """The losses of a run of the demo, which ends without a word after ``stop`` steps."""
    trainer = Trainer(DEMO, kind, Path(folder), torch.device("cpu"), mesh)
    while len(trainer.losses) < stop:
        trainer.step()
    return trainer.losses


def train_demo_of_another_length(mesh: DeviceMesh, length: int) -> None:
    """A run whose sequences the ranks cannot share."""
    config = replace(DEMO, max_length=length)
    Trainer(config, "nsa", Path("nowhere"), torch.device("cpu"), mesh)


def train_and_save(mesh: DeviceMesh | None, start: str, folder: str, how: str) -> None:
    """Three steps of a saved model under FSDP2, with context parallelism or in Transformers."""
    torch.manual_seed(3)
    tokens = torch.randint(3, 64, (1, 401))
    model: Any
    if how == "transformers":
        model = AutoModelForCausalLM.from_pretrained(start)
    else:
        model = NSALlamaForCausalLM.from_pretrained(start, mesh)
    if mesh is not None:
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        if how == "transformers" or mesh is None:
            loss = model(tokens[:, :-1], labels=tokens[:, :-1]).loss
        else:
            layout = SequenceLayout(400, mesh.size(), "zigzag")
            parts = (shard(x, mesh, layout) for x in (tokens[:, :-1], tokens[:, 1:]))
            loss = token_losses(model, *parts, layout=layout) * mesh.size() / 400
        loss.backward()
        optimizer.step()
    model.save_pretrained(folder)


def tiny_llama(implementation: str) -> Any:
    """A made-up Llama of Transformers, the same on every rank."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config)
    model.config._attn_implementation = implementation
    return model


def attend_as_verl_does(mesh: DeviceMesh | None, whole: Arrays) -> Arrays:
    """Logits and gradients of a model with verl's patch, from this rank's part of the stream."""
    local = {name: torch.from_numpy(x) for name, x in whole.items()}
    if mesh is not None:
        layout = SequenceLayout(whole["tokens"].shape[1], mesh.size())
        local = {name: shard(x, mesh, layout) for name, x in local.items()}
    hook = SinkWindowAttention(3, 9, lambda: None if mesh is None else mesh.get_group())
    with mock.patch.object(flash_attention, "_flash_attention_forward", hook):
        model = tiny_llama("flash_attention_2")
        logits = model(
            input_ids=local["tokens"], position_ids=local["positions"], use_cache=False
        ).logits
        logits.backward(local["dout"])
    found = {name: x.grad.numpy() for name, x in model.named_parameters()}
    return {"logits": logits.detach().numpy(), **found}


def train_transformers(mesh: DeviceMesh, arguments: list[str]) -> tuple[list[float], int]:
    """The losses that the example of Transformers' Trainer logs, and calls of our attention."""
    rank, size = str(mesh.get_local_rank()), str(mesh.size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    with mock.patch.object(attention, "attend", wraps=attention.attend) as attend:
        losses = train_transformers_fsdp2.train(train_transformers_fsdp2.parse(arguments))
    return losses, attend.call_count
