"""Models that the ranks of the tests train; results go back as arrays."""

from __future__ import annotations

import os
from dataclasses import replace
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
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.integrations import flash_attention

from examples import train_context_parallel, train_transformers_fsdp2
from examples.verl_sink_window import SinkWindowAttention
from sparsek_backend.distributed import (
    SequenceLayout,
    shard,
    sum_gradients,
    unshard,
)
from sparsek_backend.nn import (
    KVHeadParallel,
    NSAConfig,
    NSALlamaConfig,
    NSALlamaForCausalLM,
    tensor_parallel,
)
from sparsek_backend.nn.llama import is_sharded
from sparsek_backend.train_demo.train import DemoConfig, Trainer
from sparsek_backend.transformers_op import attention
from tests.distributed.cases import SMALL, Arrays

DEMO = DemoConfig(steps=8, max_length=64, save_every=2)


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
