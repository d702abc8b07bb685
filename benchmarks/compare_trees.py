"""Two checkouts of this repository against each other on one GPU: did a change cost speed?

    python benchmarks/compare_trees.py OLD NEW --csv trees.csv
    python benchmarks/compare_trees.py OLD NEW --only attention nsa   # OLD selects blocks otherwise

Each round times every operation in a process of the old checkout, then in one of the new; the row
of an operation has the median over the rounds and the ratio new over old.  Both must give the same
numbers: a fingerprint of every result is compared, and a difference is an error.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

OURS = Path(__file__).resolve()
Call = Callable[[], Any]
Operations = dict[str, tuple[Call, bool]]
"""Name of every operation, what runs it, and whether a CUDA graph times it."""


def draw(*shape: int) -> Any:
    """A bf16 tensor of normal values on the GPU."""
    import torch

    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def both_passes(name: str, call: Callable[..., Any], *inputs: Any) -> Operations:
    """Forward and backward pass of ``call``."""
    import torch

    leaves = [x.detach().requires_grad_() for x in inputs]
    out = call(*leaves)
    upstream = torch.randn_like(out)
    return {
        f"{name} forward": (lambda: call(*inputs), True),
        f"{name} backward": (
            lambda: torch.autograd.grad(out, leaves, upstream, retain_graph=True),
            False,
        ),
    }


def attention() -> Operations:
    """Causal and sink-window attention, and the eager call of a small problem."""
    from sparsek_kernels import sink_flash_attention

    q, k, v = draw(1, 16384, 32, 128), draw(1, 16384, 8, 128), draw(1, 16384, 8, 128)
    small = [draw(1, 512, 8, 64) for _ in range(3)]
    return {
        **both_passes("causal 16k", sink_flash_attention, q, k, v),
        **both_passes(
            "sinks and window 16k",
            partial(sink_flash_attention, num_sink=4, window_size=1024),
            *(q, k, v),
        ),
        "small, eager": (lambda: sink_flash_attention(*small), False),
    }


def nsa() -> Operations:
    """Native sparse attention."""
    import torch

    from sparsek_kernels import nsa_attention

    found: Operations = {}
    for heads, kv_heads, tokens in ((64, 4, 65536), (32, 8, 32768), (64, 4, 8192)):
        sizes = (heads, kv_heads, kv_heads)
        tensors = [draw(1, tokens, n, 128) for n in sizes]
        gates = [torch.rand(1, tokens, heads, device="cuda", dtype=torch.bfloat16) for _ in "csw"]
        name = f"nsa {heads}/{kv_heads} {tokens // 1024}k"
        found[f"{name} forward"] = (partial(nsa_attention, *tensors, *gates), tokens < 32768)
    tensors = [draw(1, 16384, n, 128) for n in (64, 4, 4)]
    gates = [torch.rand(1, 16384, 64, device="cuda", dtype=torch.bfloat16) for _ in "csw"]
    return found | both_passes("nsa 64/4 16k", nsa_attention, *tensors, *gates)


def decode() -> Operations:
    """Selection and attention of single tokens over a paged cache."""
    import torch

    from sparsek_kernels import PagedBatch, SelectionPolicy, paged_attention, write_kv
    from sparsek_kernels.paged.sketch import summary_bytes

    found: Operations = {}
    policy = SelectionPolicy(num_sink=64, window_size=512, top_k=32)
    for requests, length in ((32, 8192), (4, 131072), (1, 131072)):
        pages = requests * length // 64
        cache = draw(pages, 64, 8, 256).transpose(1, 2)
        size = summary_bytes(64, 128)
        summary = torch.zeros(pages, 8, size, device="cuda", dtype=torch.uint8)
        slots = torch.arange(pages * 64, device="cuda")
        for part in slots.split(1 << 16):
            page, row = part // 64, part % 64
            write_kv(
                *(cache[page, :, row, :128], cache[page, :, row, 128:], cache[..., :128]),
                *(cache[..., 128:], summary, part),
            )
        batch = PagedBatch(
            block_table=torch.randperm(pages, device="cuda").int().view(requests, -1),
            seq_lens=torch.full((requests,), length, dtype=torch.int32, device="cuda"),
            cu_seqlens_q=torch.arange(requests + 1, dtype=torch.int32, device="cuda"),
            num_decodes=requests,
            num_decode_tokens=requests,
            decode_query_len=1,
            max_query_len=1,
            max_seq_len=length,
        )
        query = draw(requests, 32, 128)
        keys, values = cache[..., :128], cache[..., 128:]
        call = partial(paged_attention, query, keys, values, batch, policy, k_summary=summary)
        found[f"decode {requests} x {length // 1024}k"] = (call, True)
    return found


FAMILIES: dict[str, Callable[[], Operations]] = {
    "attention": attention,
    "nsa": nsa,
    "decode": decode,
}


def measure(families: list[str]) -> dict[str, tuple[float, float]]:
    """Milliseconds and a fingerprint of the result of every operation, in this process's tree."""
    import torch
    import triton

    torch.manual_seed(0)
    rows = {}
    operations = {k: v for family in families for k, v in FAMILIES[family]().items()}
    for name, (call, graph) in operations.items():
        result = call()
        parts = result if isinstance(result, tuple | list) else (result,)
        print_of = sum(float(x.double().abs().mean()) for x in parts if x is not None)
        if name == "small, eager":
            for _ in range(200):
                call()
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(2000):
                call()
            milliseconds = (time.perf_counter() - begin) / 2
            torch.cuda.synchronize()
        elif graph:
            with torch.cuda.stream(torch.cuda.Stream()):
                milliseconds = triton.testing.do_bench_cudagraph(call, rep=60, return_mode="median")
        else:
            milliseconds = triton.testing.do_bench(call, warmup=20, rep=150, return_mode="median")
        rows[name] = (milliseconds, print_of)
    return rows


def commit_of(tree: Path) -> str:
    """The commit of a checkout, ``unknown`` where it has no git."""
    done = subprocess.run(
        ["git", "-C", str(tree), "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or "unknown"


def main() -> int:
    """Run the comparison; 1 where results differ."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path, nargs="?")
    parser.add_argument("new", type=Path, nargs="?")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--csv", type=Path)
    parser.add_argument(
        "--commits", nargs=2, metavar=("OLD", "NEW"), help="recorded where there is no git"
    )
    args = parser.parse_args()
    if args.old is None:
        print(json.dumps(measure(args.only)))
        return 0
    runs: dict[str, list[dict[str, list[float]]]] = {"old": [], "new": []}
    for turn in range(args.rounds):
        for name, tree in (("old", args.old), ("new", args.new)):
            paths = [str(tree), str(tree / "kernels"), os.environ.get("PYTHONPATH", "")]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
            done = subprocess.run(
                [sys.executable, str(OURS), "--only", *args.only],
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                print(done.stderr[-3000:], file=sys.stderr)
                return 1
            runs[name].append(json.loads(done.stdout.splitlines()[-1]))
            print(f"round {turn + 1} of {args.rounds}: {name} done", flush=True)
    failed = 0
    rows = []
    for operation in runs["old"][0]:
        old, new = (median(run[operation][0] for run in runs[x]) for x in ("old", "new"))
        prints = {run[operation][1] for x in runs.values() for run in x}
        same = max(prints) - min(prints) <= 1e-4 * max(prints)
        failed += not same
        rows.append([operation, f"{old:.5g}", f"{new:.5g}", f"{new / old:.4f}", same])
        verdict = "" if same else "DIFFERS"
        print(f"{operation:34} {old:9.4f} -> {new:9.4f} ms  {new / old:.3f}  {verdict}")
    if args.csv:
        with args.csv.open("w", newline="") as file:
            writer = csv.writer(file)
            names = ["operation", "old_ms", "new_ms", "new_over_old", "same_result"]
            writer.writerow([*names, "old_commit", "new_commit"])
            commits = args.commits or (commit_of(args.old), commit_of(args.new))
            writer.writerows([*row, *commits] for row in rows)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
