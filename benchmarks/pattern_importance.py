"""Seconds to measure the importance of blocks over many samples of one layer.

    python benchmarks/pattern_importance.py --json pattern_importance.json     # a GPU
    python benchmarks/pattern_importance.py --toy --json /tmp/toy.json         # seconds on a CPU

A sample is the queries, keys and values of one sequence; samples are made on the device, outside of
the time.  First a batch is held against the exact masses of all queries in fp64.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch

from sparsek_backend.machine import choose_device, describe_machine
from sparsek_backend.patterns.training import ImportanceTracker, sampled_block_masses

BAR_SECONDS = 5.0


def draw(options: argparse.Namespace, dtype: torch.dtype) -> list[torch.Tensor]:
    """q, k and v of a batch."""
    heads = (options.num_heads, options.num_kv_heads, options.num_kv_heads)
    return [
        torch.randn(
            options.batch, options.tokens, count, options.head_dim,
            dtype=dtype, device=options.device,
        )
        for count in heads
    ]  # fmt: skip


def error(inputs: list[torch.Tensor], options: argparse.Namespace) -> float:
    """Largest error of a batch's masses against masses computed in fp64 from all queries."""
    one = [x[:1] for x in inputs]
    found, exact = (
        sampled_block_masses(*x, options.block_size, samples=options.block_size)  # type: ignore[misc]
        for x in (one, [x.double() for x in one])
    )
    return float((found - exact).abs().max())


def seconds(inputs: list[torch.Tensor], options: argparse.Namespace) -> float:
    """To count all samples, a batch at a time."""
    blocks = -(-options.tokens // options.block_size)
    tracker = ImportanceTracker((options.num_heads, blocks, blocks)).to(options.device)

    def count(samples: int) -> None:
        for _ in range(0, samples, options.batch):
            mass = sampled_block_masses(
                inputs[0], inputs[1], inputs[2], options.block_size,
                measure=options.measure, samples=options.queries,
            )  # fmt: skip
            tracker.add(mass)
        if options.device.type == "cuda":
            torch.cuda.synchronize()

    count(2 * options.batch)
    began = time.perf_counter()
    count(options.samples)
    return time.perf_counter() - began


def main() -> int:
    """Check, time, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--toy", action="store_true", help="64 samples of 256 tokens")
    parser.add_argument("--samples", type=int)
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--batch", type=int, default=16, help="samples at a time")
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--queries", type=int, default=2, help="of each block")
    parser.add_argument("--num-heads", type=int, default=8)
    parser.add_argument("--num-kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--measure", default="l2")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--commit", default="", help="recorded where there is no git")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    options.samples = options.samples or (64 if options.toy else 10_000)
    options.tokens = options.tokens or (256 if options.toy else 2048)
    options.device = choose_device(options.device)
    on_gpu = options.device.type == "cuda"
    inputs = draw(options, torch.bfloat16 if on_gpu else torch.float32)
    worst = error(inputs, options)
    if worst > (1e-2 if on_gpu else 1e-5):
        print(f"error: masses differ by {worst:.1e} from masses computed in fp64", file=sys.stderr)
        return 1
    taken = seconds(inputs, options)
    shape = {
        name: getattr(options, name)
        for name in (
            "samples", "tokens", "batch", "block_size", "queries", "num_heads", "num_kv_heads",
            "head_dim", "measure",
        )
    }  # fmt: skip
    result = {**shape, "seconds": round(taken, 3), "bar_seconds": BAR_SECONDS, "error": worst}
    machine = asdict(describe_machine(options.device, options.commit))
    options.json.write_text(json.dumps({**result, "machine": machine}, indent=1) + "\n")
    print(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
