"""Context parallelism on the ranks of torchrun: correctness, then time against one GPU's share.

    torchrun --nproc-per-node 8 benchmarks/distributed.py --csv distributed_h200.csv
    torchrun --nproc-per-node 2 benchmarks/distributed.py --tokens 64 --csv cpu.csv     # a CPU

NCCL where there are GPUs, else gloo.  Outputs and gradients are first held against fp64: the error
may be twice that of one rank in the same dtype, and a failed check stops the run.  Timed are
forward and backward passes one after another, by the slowest rank's clock.

The share of one GPU is the same work without the others: for a window, a shard with its halo; for a
ring, a whole sequence over the number of ranks; for native sparse attention, the rank's queries
with all their keys at hand.  ``params`` has the share over the time (``efficiency``).  Rows of
other runs stay in the file.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from sparsek_backend.bench.results import Row, read_csv, write_csv
from sparsek_backend.distributed import (
    SequenceLayout,
    context_parallel_nsa_attention,
    context_parallel_sink_flash_attention,
    shard,
    unshard,
)
from sparsek_backend.machine import describe_machine
from sparsek_kernels import nsa_attention, nsa_compress, sink_flash_attention

DIM = 128
NUM_SINK, WINDOW = 64, 4096
NSA_WINDOW, TOP_N, BLOCK = 512, 16, 64  # the defaults
Tensors = list[torch.Tensor]
Step = Callable[[], None]


@dataclasses.dataclass(frozen=True)
class Case:
    """An attention to measure.

    Args:
        heads: query heads and KV heads.
        tokens: tokens a rank, unless told otherwise.
        order: of the shards.
    """

    heads: tuple[int, int]
    tokens: int
    order: str


CASES = {
    "sink_window": Case((32, 8), 128 * 1024, "contiguous"),
    "ring": Case((32, 8), 32 * 1024, "zigzag"),
    "nsa": Case((64, 4), 64 * 1024, "zigzag"),
    "nsa_chosen": Case((64, 4), 64 * 1024, "zigzag"),  # keys of the chosen blocks alone travel
}


def is_nsa(name: str) -> bool:
    """Whether it is native sparse attention, whichever keys travel."""
    return name.startswith("nsa")


def draw(name: str, heads: tuple[int, int], tokens: int, like: torch.Tensor, seed: int) -> Tensors:
    """q, k, v and, for NSA, three gates, then the gradient of the output."""
    generator = torch.Generator(like.device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        kind = {"dtype": like.dtype, "device": like.device}
        return torch.randn(1, tokens, *shape, generator=generator, **kind)

    found = [normal(heads[0], DIM), normal(heads[1], DIM), normal(heads[1], DIM)]
    if is_nsa(name):
        found += [normal(heads[0]).sigmoid() for _ in range(3)]
    return [*found, normal(heads[0], DIM)]


def spread_out(
    name: str, mesh: DeviceMesh, layout: SequenceLayout, x: Tensors, window: int
) -> torch.Tensor:
    """The attention under context parallelism."""
    if is_nsa(name):
        gates = (x[3], x[4], x[5])
        gather = "chosen" if name == "nsa_chosen" else "all"
        return context_parallel_nsa_attention(
            *x[:3], gates, mesh=mesh, layout=layout, window_size=window, gather=gather
        )
    mask = {"num_sink": NUM_SINK, "window_size": window} if name == "sink_window" else {}
    return context_parallel_sink_flash_attention(*x, mesh=mesh, layout=layout, **mask)


def on_one(
    name: str, x: Tensors, window: int, block_indices: torch.Tensor | None = None
) -> torch.Tensor:
    """The attention on one rank."""
    if is_nsa(name):
        return nsa_attention(*x, window_size=window, block_indices=block_indices)
    mask = {"num_sink": NUM_SINK, "window_size": window} if name == "sink_window" else {}
    return sink_flash_attention(*x, **mask)


def oracle(name: str, x: Tensors, dout: torch.Tensor, window: int) -> Tensors:
    """Output and gradients in fp64, which runs in torch."""
    tokens = x[0].shape[1]
    block = torch.arange(TOP_N, device=dout.device, dtype=torch.int32)
    own = torch.arange(tokens, device=dout.device)[:, None] // BLOCK
    every = torch.where(block <= own, block, -1).expand(1, x[1].shape[2], -1, -1).transpose(1, 2)
    leaves = [y.double().requires_grad_() for y in x]
    out = on_one(name, leaves, window, every)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout.double())]


def both_ways(
    name: str, mesh: DeviceMesh, layout: SequenceLayout, whole: Tensors, window: int
) -> tuple[Tensors, Tensors]:
    """Output and gradients of the ranks together, put together, and of one rank."""
    *inputs, dout = whole
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = on_one(name, leaves, window)
    alone = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
    leaves = [shard(x, mesh, layout).requires_grad_() for x in inputs]
    out = spread_out(name, mesh, layout, leaves, window)
    parts = [out.detach(), *torch.autograd.grad(out, leaves, shard(dout, mesh, layout))]
    return [unshard(x, mesh, layout) for x in parts], alone


def check(name: str, mesh: DeviceMesh, like: torch.Tensor) -> str:
    """Hold small problems against fp64, and what longer ones select against one rank.

    Raises:
        SystemExit: an error beyond the bound, or other blocks in more than a tenth of the rows.
    """
    case, world = CASES[name], mesh.size()
    tokens = 512 if like.is_cuda else 32
    if is_nsa(name):  # so few that every block is chosen
        tokens = min(tokens, TOP_N * BLOCK // world)
    heads = (2 * case.heads[0] // case.heads[1], 2)
    layout = SequenceLayout(tokens * world, world, case.order)
    whole = draw(name, heads, layout.num_tokens, like, 0)
    worst = 0.0
    for window in (tokens // 2, 2 * tokens + 3) if name == "sink_window" else (tokens // 2,):
        found, alone = both_ways(name, mesh, layout, whole, window)
        exact = oracle(name, whole[:-1], whole[-1], window)
        for index, (have, single, true) in enumerate(zip(found, alone, exact, strict=True)):
            error, due = (float((x.double() - true).norm() / true.norm()) for x in (have, single))
            worst = max(worst, error)
            if not error <= 2 * due + 1e-6:
                raise SystemExit(
                    f"{name}: tensor {index}, relative error {error:.2e} > 2 * {due:.2e}"
                )
    words = f"worst relative error {worst:.1e}, bound twice one rank's"
    if not is_nsa(name):
        return words
    tokens = (8 if like.is_cuda else 2) * TOP_N * BLOCK
    layout = SequenceLayout(tokens, world, case.order)
    whole = draw(name, heads, layout.num_tokens, like, 1)
    (found, *_), (alone, *_) = both_ways(name, mesh, layout, whole, NSA_WINDOW)
    error = (found - alone).float().norm(dim=3) / alone.float().norm(dim=3)
    same = float((error < 0.05).float().mean())
    if same < 0.9:
        raise SystemExit(f"{name}: {same:.1%} of the rows select as on one rank, expected 90 %")
    return f"{words}; {same:.2%} of the rows select as on one rank"


def passes(call: Callable[[], torch.Tensor], leaves: Tensors, dout: torch.Tensor) -> Step:
    """A forward and a backward pass."""

    def step() -> None:
        torch.autograd.grad(call(), leaves, dout)

    return step


def shared_step(name: str, mesh: DeviceMesh, case: Case, tokens: int, like: torch.Tensor) -> Step:
    """What is timed: the passes of a rank together with the others."""
    layout = SequenceLayout(tokens * mesh.size(), mesh.size(), case.order)
    *leaves, dout = draw(name, case.heads, tokens, like, mesh.get_local_rank())
    leaves = [x.requires_grad_() for x in leaves]
    window = NSA_WINDOW if is_nsa(name) else WINDOW
    return passes(lambda: spread_out(name, mesh, layout, leaves, window), leaves, dout)


def share_steps(
    name: str, mesh: DeviceMesh, case: Case, tokens: int, like: torch.Tensor
) -> tuple[list[Step], int]:
    """The share of one GPU: passes without the others, and by what their time is divided."""
    world, rank = mesh.size(), mesh.get_local_rank()
    heads = case.heads
    if name == "ring":
        *leaves, dout = draw(name, heads, tokens * world, like, 0)
        leaves = [x.requires_grad_() for x in leaves]
        return [passes(lambda: on_one(name, leaves, 0), leaves, dout)], world
    if name == "sink_window":
        *leaves, dout = draw(name, heads, tokens + (WINDOW - 1 if world > 1 else 0), like, 0)
        q, dout = leaves[0][:, -tokens:].clone(), dout[:, -tokens:].clone()
        leaves = [x.requires_grad_() for x in (q, *leaves[1:])]
        return [passes(lambda: on_one(name, leaves, WINDOW), leaves, dout)], 1
    layout, steps = SequenceLayout(tokens * world, world, case.order), []
    for segment in layout.segments[rank]:
        *leaves, dout = draw(name, heads, segment.stop, like, 0)
        mine = slice(segment.start, segment.stop)
        k, v = leaves[1:3]
        own = [x[:, mine].clone() for x in (leaves[0], k, v, *leaves[3:])]
        cmp = nsa_compress(k, v)
        inputs = [x.requires_grad_() for x in (own[0], k, v, *own[3:], *cmp)]
        blocks = [x.requires_grad_() for x in own[1:3]]

        def attend(x: Tensors = inputs) -> torch.Tensor:
            return nsa_attention(*x[:6], k_cmp=x[6], v_cmp=x[7], window_size=NSA_WINDOW)

        def compress(x: Tensors = blocks) -> torch.Tensor:
            return torch.cat(nsa_compress(*x))

        made = torch.cat([x.detach()[:, : (len(segment) - 16) // 16] for x in cmp])
        steps += [passes(attend, inputs, dout[:, mine].clone()), passes(compress, blocks, made)]
    return steps, 1


def timed(steps: list[Step], device: torch.device, samples: int) -> list[float]:
    """Milliseconds of the slowest rank for all steps once, of three rounds in a row each."""
    rounds, found = 3, []
    for sample in range(samples + 1):
        dist.barrier()
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(rounds):
            for step in steps:
                step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        ms = torch.tensor([(time.perf_counter() - start) * 1e3 / rounds], device=device)
        dist.all_reduce(ms, dist.ReduceOp.MAX)
        if sample:  # the first warms up
            found.append(float(ms))
    return sorted(found)


def measure(
    name: str, mesh: DeviceMesh, like: torch.Tensor, tokens: int, samples: int, detail: str
) -> list[Row]:
    """Rows of ours and of the share."""
    case, device = CASES[name], like.device
    spec, times, rows, peak = f"q{tokens} x {mesh.size()} ranks", {}, [], None
    for provider in ("sparsek", "share of one GPU"):
        if provider == "sparsek":
            steps, parts = [shared_step(name, mesh, case, tokens, like)], 1
        else:
            steps, parts = share_steps(name, mesh, case, tokens, like)
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        times[provider] = [ms / parts for ms in timed(steps, device, samples)]
        if device.type == "cuda":
            peak = torch.cuda.max_memory_allocated() / 2**20
        ms = times[provider]
        rows.append(
            Row(
                f"context_parallel_{name}",
                f"{case.heads[0]}/{case.heads[1]} heads {case.order}",
                spec,
                provider,
                "ok",
                detail,
                "forward and backward",
                statistics.median(ms),
                ms[len(ms) // 5],
                ms[-1 - len(ms) // 5],
                len(ms),
                "host clock, slowest rank, warm",
                peak_mib=peak,
                params=f"us_per_token={statistics.median(ms) * 1e3 / tokens:.4f}",
            )
        )
        del steps
    ours, share = (statistics.median(x) for x in times.values())
    rows[0] = dataclasses.replace(rows[0], params=f"{rows[0].params} efficiency={share / ours:.3f}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--case", choices=CASES, action="append", help="all when left out")
    parser.add_argument("--tokens", type=int, help="tokens a rank; each case's own when left out")
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--commit", default="", help="to record where there is no git")
    args = parser.parse_args()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        like = torch.empty(0, dtype=torch.bfloat16, device="cuda")
        like = like.to(f"cuda:{torch.cuda.current_device()}")
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=like.device)
    else:
        like = torch.empty(0)
        dist.init_process_group("gloo")
    mesh = init_device_mesh(like.device.type, (dist.get_world_size(),))
    machine = dataclasses.asdict(describe_machine(like.device, args.commit))
    for name in args.case or CASES:
        detail = check(name, mesh, like)
        tokens = args.tokens or CASES[name].tokens
        found = measure(name, mesh, like, tokens, args.samples, detail)
        if dist.get_rank() == 0:
            rows = [dataclasses.replace(row, **machine) for row in found]
            keys = {row.key for row in rows}
            kept = (
                [row for row in read_csv(args.csv) if row.key not in keys]
                if args.csv.exists()
                else []
            )
            write_csv(args.csv, [*kept, *rows])
            for row in rows:
                print(row.op, row.spec, row.provider, f"{row.ms:.2f} ms", row.params, row.detail)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
