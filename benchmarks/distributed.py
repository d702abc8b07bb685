"""Context parallelism on the ranks of torchrun: correctness, then time against one GPU's share.

    torchrun --nproc-per-node 8 benchmarks/distributed.py --csv distributed_h200.csv
    torchrun --nproc-per-node 4 benchmarks/distributed.py --csv long_h200.csv --long
    torchrun --nproc-per-node 4 benchmarks/distributed.py --csv h200.csv --profile h200.json
    torchrun --nproc-per-node 2 benchmarks/distributed.py --tokens 64 --csv cpu.csv     # a CPU

NCCL where there are GPUs, else gloo.  Outputs and gradients are first held against fp64: the error
may be twice that of one rank in the same dtype, and a failed check stops the run.  Timed are
forward and backward passes one after another, by the slowest rank's clock.

The share of one GPU is the same work without the others: for a window, a shard with its halo; for a
ring and for block patterns, a whole sequence over the number of ranks; for native sparse attention,
the rank's queries with all their keys at hand.  ``params`` has the share over the time
(``efficiency``).  Rows of other runs stay in the file.

``--long`` times one sequence of growing length.  Beside each time and peak stands a prediction from
the first two lengths: a window's time and every peak grow as ``a + b N``, other times as
``a N + b N^2``.  ``--profile`` also writes where the time goes (``distributed_profile.py``).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from distributed_profile import profile_row
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from sparsek_backend.bench.results import Row, read_csv, write_csv
from sparsek_backend.distributed import (
    SequenceLayout,
    balanced_layout,
    context_parallel_block_sparse_attention,
    context_parallel_nsa_attention,
    context_parallel_sink_flash_attention,
    shard,
    unshard,
)
from sparsek_backend.machine import describe_machine
from sparsek_backend.patterns.masks import random_pattern
from sparsek_backend.patterns.pattern import BlockSparsePattern
from sparsek_kernels import (
    block_sparse_attention,
    nsa_attention,
    nsa_compress,
    sink_flash_attention,
)

DIM = 128
NUM_SINK, WINDOW = 64, 4096
NSA_WINDOW, TOP_N, BLOCK = 512, 16, 64  # the defaults
DENSITY, PATTERN_BLOCK = 0.1, 128
LONG = [64 * 1024, 128 * 1024, 256 * 1024, 512 * 1024]
Tensors = list[torch.Tensor]
Step = Callable[[], None]


@dataclasses.dataclass(frozen=True)
class Case:
    """An attention to measure.

    Args:
        heads: query heads and KV heads.
        tokens: tokens a rank, unless told otherwise.
        order: of the shards; ``balanced`` deals the rows of the pattern.
    """

    heads: tuple[int, int]
    tokens: int
    order: str


CASES = {
    "sink_window": Case((32, 8), 128 * 1024, "contiguous"),
    "ring": Case((32, 8), 32 * 1024, "zigzag"),
    "block_sparse": Case((32, 8), 64 * 1024, "balanced"),
    "nsa": Case((64, 4), 64 * 1024, "zigzag"),
}


@lru_cache(maxsize=2)
def pattern_of(num_tokens: int, device: torch.device) -> BlockSparsePattern:
    """A causal pattern, the same on every rank, of random blocks: every rank needs many keys.

    It lists ``DENSITY`` of the blocks, or twice the diagonal where that is more.  Small problems
    have smaller blocks.
    """
    size = min(PATTERN_BLOCK, max(16, num_tokens // 128 * 16))
    rows = num_tokens // size
    density = min(1.0, max(DENSITY, 4 / (rows + 1)))
    pattern = random_pattern((rows, rows), size, density=density, seed=0, causal=True)
    return pattern.to(device)


def layout_of(case: Case, num_tokens: int, world: int, device: torch.device) -> SequenceLayout:
    """Which rank holds which tokens of one sequence."""
    if case.order == "balanced":
        return balanced_layout(pattern_of(num_tokens, device), world, causal=True)
    return SequenceLayout(num_tokens, world, case.order)


def draw(name: str, heads: tuple[int, int], tokens: int, like: torch.Tensor, seed: int) -> Tensors:
    """q, k, v and, for NSA, three gates, then the gradient of the output."""
    generator = torch.Generator(like.device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        kind = {"dtype": like.dtype, "device": like.device}
        return torch.randn(1, tokens, *shape, generator=generator, **kind)

    found = [normal(heads[0], DIM), normal(heads[1], DIM), normal(heads[1], DIM)]
    if name == "nsa":
        found += [normal(heads[0]).sigmoid() for _ in range(3)]
    return [*found, normal(heads[0], DIM)]


def spread_out(
    name: str, mesh: DeviceMesh, layout: SequenceLayout, x: Tensors, window: int
) -> torch.Tensor:
    """The attention under context parallelism."""
    if name == "nsa":
        gates = (x[3], x[4], x[5])
        return context_parallel_nsa_attention(
            *x[:3], gates, mesh=mesh, layout=layout, window_size=window
        )
    if name == "block_sparse":
        pattern = pattern_of(layout.num_tokens, x[0].device)
        return context_parallel_block_sparse_attention(
            *x, pattern, mesh=mesh, layout=layout, causal=True
        )
    mask = {"num_sink": NUM_SINK, "window_size": window} if name == "sink_window" else {}
    return context_parallel_sink_flash_attention(*x, mesh=mesh, layout=layout, **mask)


def on_one(
    name: str, x: Tensors, window: int, block_indices: torch.Tensor | None = None
) -> torch.Tensor:
    """The attention on one rank."""
    if name == "nsa":
        return nsa_attention(*x, window_size=window, block_indices=block_indices)
    if name == "block_sparse":
        return block_sparse_attention(*x, pattern_of(x[0].shape[1], x[0].device), causal=True)
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
    tokens = 512 if like.is_cuda else 64
    if name == "nsa":  # so few that every block is chosen
        tokens = min(tokens, TOP_N * BLOCK // world)
    heads = (2 * case.heads[0] // case.heads[1], 2)
    layout = layout_of(case, tokens * world, world, like.device)
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
    if name != "nsa":
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
    layout = layout_of(case, tokens * mesh.size(), mesh.size(), like.device)
    *leaves, dout = draw(name, case.heads, tokens, like, mesh.get_local_rank())
    leaves = [x.requires_grad_() for x in leaves]
    window = NSA_WINDOW if name == "nsa" else WINDOW
    return passes(lambda: spread_out(name, mesh, layout, leaves, window), leaves, dout)


def share_steps(
    name: str, mesh: DeviceMesh, case: Case, tokens: int, like: torch.Tensor
) -> tuple[list[Step], int]:
    """The share of one GPU: passes without the others, and by what their time is divided."""
    world, rank = mesh.size(), mesh.get_local_rank()
    heads = case.heads
    if name in ("ring", "block_sparse"):
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


def timed_with_peak(
    steps: list[Step], device: torch.device, samples: int
) -> tuple[list[float], float | None]:
    """Milliseconds as :func:`timed`, and on GPUs the largest peak of a rank in MiB."""
    if device.type != "cuda":
        return timed(steps, device, samples), None
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    ms = timed(steps, device, samples)
    peak = torch.tensor([torch.cuda.max_memory_allocated() / 2**20], device=device)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    return ms, float(peak)


def row_of(
    op: str, case: Case, spec: str, provider: str, detail: str, ms: list[float], peak: float | None
) -> Row:
    """The row of sorted times."""
    return Row(
        op,
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
    )


def per_token(row: Row, tokens: int) -> Row:
    """The row with its time a token."""
    return dataclasses.replace(row, params=f"us_per_token={(row.ms or 0) * 1e3 / tokens:.4f}")


def measure(
    name: str, mesh: DeviceMesh, like: torch.Tensor, tokens: int, samples: int, detail: str
) -> list[Row]:
    """Rows of ours and of the share."""
    case, rows = CASES[name], []
    spec = f"q{tokens} x {mesh.size()} ranks"
    for provider in ("sparsek", "share of one GPU"):
        if provider == "sparsek":
            steps, parts = [shared_step(name, mesh, case, tokens, like)], 1
        else:
            steps, parts = share_steps(name, mesh, case, tokens, like)
        times, peak = timed_with_peak(steps, like.device, samples)
        ms = [x / parts for x in times]
        row = row_of(f"context_parallel_{name}", case, spec, provider, detail, ms, peak)
        rows.append(per_token(row, tokens))
        del steps
    ours, share = (row.ms or 0 for row in rows)
    params = f"{rows[0].params} efficiency={share / ours:.3f}"
    if name == "block_sparse":
        pattern = pattern_of(tokens * mesh.size(), like.device)
        params += f" block_size={pattern.block_size} listed={pattern.num_blocks}"
    rows[0] = dataclasses.replace(rows[0], params=params)
    return rows


def predicted(
    lengths: Sequence[int], values: Sequence[float], powers: tuple[int, int]
) -> list[float]:
    """Values at all lengths of the sum of two powers that meets the first two values."""
    p, q = powers
    unit = lengths[0]
    (x, y), first, second = (n / unit for n in lengths[:2]), *values[:2]
    det = x**p * y**q - y**p * x**q
    a, b = (first * y**q - second * x**q) / det, (x**p * second - y**p * first) / det
    return [a * (n / unit) ** p + b * (n / unit) ** q for n in lengths]


def measure_long(
    name: str, mesh: DeviceMesh, like: torch.Tensor, lengths: list[int], samples: int, detail: str
) -> list[Row]:
    """Rows of one sequence of each length, with what the first two predict."""
    case, rows = CASES[name], []
    for length in lengths:
        tokens = length // mesh.size()
        steps = [shared_step(name, mesh, case, tokens, like)]
        ms, peak = timed_with_peak(steps, like.device, samples)
        spec = f"q{length} over {mesh.size()} ranks"
        row = row_of(f"context_parallel_{name}_long", case, spec, "sparsek", detail, ms, peak)
        rows.append(per_token(row, tokens))
        del steps
    powers = (0, 1) if name == "sink_window" else (1, 2)
    found = {"ms": ([row.ms or 0 for row in rows], powers)}
    peaks = [row.peak_mib for row in rows if row.peak_mib is not None]
    if peaks:
        found["peak_mib"] = (peaks, (0, 1))
    for what, (values, kind) in found.items():
        for index, (true, due) in enumerate(
            zip(values, predicted(lengths, values, kind), strict=True)
        ):
            words = f" predicted_{what}={due:.4f} {what}_over_predicted={true / due:.4f}"
            rows[index] = dataclasses.replace(rows[index], params=rows[index].params + words)
    return rows


def keep_rows(path: Path, rows: list[Row]) -> None:
    """Write rows to a CSV file.  A new row replaces the old one with the same key."""
    keys = {row.key for row in rows}
    kept = [row for row in read_csv(path) if row.key not in keys] if path.exists() else []
    write_csv(path, [*kept, *rows])


def keep_profile(path: Path, row: dict[str, Any]) -> None:
    """Write the row of a case to a JSON file, in place of the same case's and length's."""
    rows = json.loads(path.read_text()) if path.exists() else []
    key = (row["op"], row["spec"])
    kept = [x for x in rows if (x["op"], x["spec"]) != key]
    path.write_text(json.dumps([*kept, row], indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--case", choices=CASES, action="append", help="all when left out")
    parser.add_argument("--tokens", type=int, help="tokens a rank; each case's own when left out")
    parser.add_argument(
        "--long",
        type=int,
        nargs="*",
        metavar="TOKENS",
        help="time one sequence of these lengths, 64k to 512k when none is named",
    )
    parser.add_argument("--profile", type=Path, help="JSON file of where the time goes")
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--commit", default="", help="to record where there is no git")
    args = parser.parse_args()
    lengths = LONG if args.long == [] else args.long
    if lengths is not None:
        if args.tokens or args.profile:
            parser.error("--long: expected no --tokens and no --profile beside it")
        if len(lengths) < 3 or lengths != sorted(set(lengths)) or lengths[0] < 1:
            parser.error(f"--long: expected three or more ascending lengths, got {lengths}")
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
    for name in args.case or (CASES if lengths is None else ("sink_window", "nsa")):
        detail = check(name, mesh, like)
        tokens = args.tokens or CASES[name].tokens
        if lengths is None:
            found = measure(name, mesh, like, tokens, args.samples, detail)
        else:
            found = measure_long(name, mesh, like, lengths, args.samples, detail)
        if dist.get_rank() == 0:
            keep_rows(args.csv, [dataclasses.replace(row, **machine) for row in found])
            for row in found:
                print(row.op, row.spec, row.provider, f"{row.ms:.2f} ms", row.params, row.detail)
        if args.profile is not None:
            steps = [shared_step(name, mesh, CASES[name], tokens, like)]
            split = profile_row(steps, like.device)
            if dist.get_rank() == 0:
                head = {"op": found[0].op, "case": found[0].case, "spec": found[0].spec}
                keep_profile(args.profile, {**head, "step_ms": found[0].ms, **split, **machine})
            del steps
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
