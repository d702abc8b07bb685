"""Check and time launch configurations of block-sparse attention on this GPU.

    PYTHONPATH=.:kernels python benchmarks/tune_block_sparse.py [--head-dim 128] [--block-size 64]
    ... --only "forward hopper" --heads 8 8 --head-dim 64 --full     # one kernel, another shape

Prints a line per candidate, fastest first; one that differs from the selected configuration by more
than rounding is not timed.  The winners are written into ``sparsek_kernels/block_sparse/config.py``
by hand; nothing is tuned at run time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product

import torch

from sparsek_backend.patterns import BlockSparsePattern
from sparsek_kernels.block_sparse import launch
from sparsek_kernels.block_sparse.config import (
    HopperForward,
    LaunchConfig,
    ProblemShape,
    TileConfig,
    hopper_backward,
    hopper_forward,
    key_tile,
    query_tile,
)
from sparsek_kernels.block_sparse.problem import BlockSparseProblem

LIMIT = 2e-2  # relative error between two roundings to bf16
QUERY_TILES = ((128, 64, 4, 3), (128, 64, 8, 3), (128, 64, 8, 2), (128, 128, 8, 3), (64, 64, 4, 3))
WAYS = tuple(product((False, True), (False, True)))  # of the Hopper forward kernel
STAGES = {64: (4, 5), 128: (2,)}  # of it, by head dim
KEY_TILES = ((64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 8, 2), (64, 32, 4, 3), (128, 32, 8, 3))

Tensors = tuple[torch.Tensor, ...]


def candidates(shape: ProblemShape, base: LaunchConfig) -> Iterator[tuple[str, str, LaunchConfig]]:
    """``(pass, name, configuration)``: the Hopper kernels, and tiles of each portable one."""
    forward = hopper_forward(shape)
    if forward is not None:
        for stages, way in product(STAGES[shape.head_dim], WAYS):
            hopper = HopperForward(stages, *way)
            yield "forward", f"hopper, {hopper}", replace(base, hopper_forward=hopper)
    backward = hopper_backward(shape)
    if backward is not None:
        for shares in (1, 2, 4, 8, 16):
            tried = replace(base, hopper_backward=replace(backward, shares=shares))
            yield "backward", f"hopper, shares {shares}", tried
    plain = replace(base, hopper_forward=None, hopper_backward=None)
    for sizes in QUERY_TILES:
        tile = query_tile(shape, *sizes)
        yield "forward", _name(tile), replace(plain, forward=tile)
        yield "backward", f"dq {_name(tile)}", replace(plain, dq=tile)
    for sizes in KEY_TILES:
        tile = key_tile(shape, *sizes)
        yield "backward", f"dk/dv {_name(tile)}", replace(plain, dkdv=tile)


def _name(tile: TileConfig) -> str:
    return f"{tile.own}x{tile.step} warps {tile.num_warps} stages {tile.num_stages}"


def milliseconds(run: Callable[[], object], repeats: int = 9) -> float:
    """Median time of ``run`` on the device, which is kept busy until all is launched."""
    times = []
    for _ in range(repeats):
        torch.cuda._sleep(2_000_000)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def error(found: Tensors, wanted: Tensors) -> float:
    """Largest difference, relative to the largest value of each tensor."""
    ratios = [
        ((a - b).abs().max() / b.abs().max()).item() if bool(a.isfinite().all()) else float("inf")
        for a, b in zip(found, wanted, strict=True)
    ]
    return max(ratios)


def main() -> int:
    """Check and time every candidate; 1 when one is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--block-size", type=int, default=128)
    parser.add_argument("--density", type=float, default=0.1, help="of the blocks a query may see")
    parser.add_argument("--heads", type=int, nargs=2, default=(32, 8), help="of queries, of keys")
    parser.add_argument("--full", action="store_true", help="without causality")
    parser.add_argument("--only", default="", help="candidates that hold this: 'forward hopper'")
    arguments = parser.parse_args()
    tokens, dim, size = arguments.tokens, arguments.head_dim, arguments.block_size
    heads, kv_heads = arguments.heads
    causal = not arguments.full
    torch.manual_seed(0)
    q, dout = (torch.randn(1, tokens, heads, dim, device="cuda").bfloat16() for _ in range(2))
    k, v = (torch.randn(1, tokens, kv_heads, dim, device="cuda").bfloat16() for _ in range(2))
    rows = -(-tokens // size)
    blocks = torch.rand(kv_heads, rows, rows, device="cuda") < arguments.density
    blocks = blocks | torch.eye(rows, dtype=torch.bool, device="cuda")
    blocks = blocks.tril() if causal else blocks
    pattern = BlockSparsePattern.from_mask(blocks, size)
    indices = (
        pattern.crow_indices, pattern.col_indices, pattern.ccol_indices, pattern.row_indices
    )  # fmt: skip
    problem = BlockSparseProblem(q, k, v, *indices, size, causal, dim**-0.5)
    out, lse = torch.empty_like(q), torch.empty(1, heads, tokens, device="cuda")

    def forward(config: LaunchConfig | None) -> Tensors:
        launch.forward(problem, out, lse, config)
        return out, lse

    def backward(config: LaunchConfig | None) -> Tensors:
        return launch.backward(problem, out, lse, dout, None, config)

    passes = {"forward": forward, "backward": backward}
    tried = [
        x for x in candidates(problem.shape, problem.launch_config())
        if arguments.only in f"{x[0]} {x[1]}"
    ]  # fmt: skip
    wanted = {
        name: tuple(x.clone() for x in run(None))
        for name, run in passes.items()
        if name == "forward" or any(x[0] == name for x in tried)
    }
    timed, wrong = [], 0
    for name, label, config in tried:
        run = passes[name]
        difference = error(run(config), wanted[name])
        if difference > LIMIT:
            print(f"{name:8s}  WRONG by {difference:.1e}  {label}", flush=True)
            wrong += 1
            forward(None)
        else:
            timed.append((name, milliseconds(lambda run=run, config=config: run(config)), label))
    for name, ms, label in sorted(timed):
        print(f"{name:8s} {ms:8.3f} ms  {label}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
