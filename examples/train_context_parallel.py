"""Train a natively sparse model on sequences that several ranks share.

    torchrun --nproc-per-node 8 examples/train_context_parallel.py RUN --context-parallel 4
    torchrun --nproc-per-node 2 examples/train_context_parallel.py RUN --tokens 256   # CPUs

The ranks are a mesh of data, context and tensor parallelism.  Weights are sharded over the context
ranks and replicated over the data ranks (FSDP2).  RUN keeps a checkpoint; the same command goes on
from it, with another number of ranks too.  At the end RUN/model is a folder for ``vllm serve``.

The task is made up: the second half of each sequence repeats the first.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from sparsek_backend.distributed import SequenceLayout, shard
from sparsek_backend.nn import NSAConfig, NSALlamaConfig, NSALlamaForCausalLM, tensor_parallel

VOCABULARY = 256


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--context-parallel", type=int, default=1)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=16384, help="of a sequence")
    parser.add_argument("--batch", type=int, default=8, help="sequences a step, of all ranks")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu"
    )
    return parser.parse_args(arguments)


def draw(step: int, options: argparse.Namespace) -> torch.Tensor:
    """Sequences ``[batch, tokens + 1]`` of a step, the same for any number of ranks."""
    generator = torch.Generator().manual_seed(step)
    size = (options.batch, options.tokens // 2 + 1)
    half = torch.randint(VOCABULARY, size, generator=generator)
    return torch.cat([half, half], 1)[:, : options.tokens + 1]


def train(options: argparse.Namespace) -> list[float]:
    """The losses of the steps of this run."""
    kind = options.device
    inner = options.context_parallel * options.tensor_parallel
    if dist.get_world_size() % inner:
        raise SystemExit(f"expected a multiple of {inner} ranks, got {dist.get_world_size()}")
    mesh = init_device_mesh(
        kind,
        (dist.get_world_size() // inner, options.context_parallel, options.tensor_parallel),
        mesh_dim_names=("dp", "cp", "tp"),
    )
    if options.batch % mesh["dp"].size():
        raise SystemExit(f"--batch: expected a multiple of {mesh['dp'].size()}")
    layout = SequenceLayout(options.tokens, mesh["cp"].size(), "zigzag")
    torch.manual_seed(0)
    config = NSALlamaConfig(VOCABULARY, 128, 384, options.layers, 8, 2, 16, nsa=NSAConfig())
    model = NSALlamaForCausalLM(config, mesh["cp"]).to(kind)
    if options.tensor_parallel > 1:
        tensor_parallel(model, mesh["tp"])
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["dp", "cp"])
    fully_shard(model, mesh=mesh["dp", "cp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    first = restore(options.folder, model, optimizer)

    sharers = mesh["dp"].size() * mesh["cp"].size()
    losses = []
    for step in range(first, options.steps):
        batch = draw(step, options).chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()].to(kind)
        tokens, targets = (shard(x, mesh["cp"], layout) for x in (batch[:, :-1], batch[:, 1:]))
        logits = model(tokens, layout=layout)
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), targets.flatten(), reduction="sum"
        ) / (options.batch * options.tokens)
        optimizer.zero_grad()
        (loss * sharers).backward()  # FSDP2 averages over them; their losses add up
        optimizer.step()
        total = loss.detach() / options.tensor_parallel
        dist.all_reduce(total)
        losses.append(float(total))
        if dist.get_rank() == 0:
            print(f"step {step + 1} loss {losses[-1]:.4f}", flush=True)
        if (step + 1) % options.save_every == 0:
            save(options.folder, step + 1, model, optimizer)
    model.save_pretrained(options.folder / "model")
    return losses


def save(
    folder: Path, step: int, model: NSALlamaForCausalLM, optimizer: torch.optim.Optimizer
) -> None:
    """A checkpoint of all ranks."""
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    checkpoint.save(state, checkpoint_id=folder / f"step-{step}")


def restore(folder: Path, model: NSALlamaForCausalLM, optimizer: torch.optim.Optimizer) -> int:
    """Load the latest whole checkpoint and return its step; 0 where there is none."""
    steps = [int(x.parent.name.split("-")[1]) for x in folder.glob("step-*/.metadata")]
    if not steps:
        return 0
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    checkpoint.load(state, checkpoint_id=folder / f"step-{max(steps)}")
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    return max(steps)


def main() -> None:
    """One rank."""
    options = parse()
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl")
    else:
        dist.init_process_group("gloo")
    try:
        train(options)
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
