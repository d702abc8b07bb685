"""The xFormers drop-in against xFormers' own dispatch on one GPU, forward + backward.

    python benchmarks/drop_ins.py --csv drop_ins.csv

Each case runs the same call, ``memory_efficient_attention(q, k, v, attn_bias=...)``, with SparseK
installed and with xFormers' own choice, in turn, ``--rounds`` times; the median is reported with
the operator that xFormers chose.  Ours must agree with it (and, for the sink-window case, with the
same mask as a tensor) before anything is timed; a case whose check fails is not timed, and the
exit status is 1.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
from collections.abc import Callable
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import triton
from triton.testing import do_bench
from xformers.ops import fmha

from sparsek_backend.xformers_op import SinkWindowMask, install

HEADS, DIM = 16, 128
DEVICE = torch.device("cuda")
TOLERANCE = 2e-2  # of the largest magnitude, bf16
Row = dict[str, str | float]


def _documents(tokens: int) -> list[int]:
    """Unequal documents that fill ``tokens``."""
    lengths: list[int] = []
    share = tokens // 16
    while tokens:
        lengths.append(min(tokens, share // 2 + share * (len(lengths) % 5) // 2))
        tokens -= lengths[-1]
    return lengths


def _cases(tokens: int, bias_tokens: int) -> dict[str, tuple[int, Any, Any]]:
    """name -> (tokens, our bias, xFormers' bias)."""
    ab = fmha.attn_bias
    packed = ab.BlockDiagonalCausalMask.from_seqlens(_documents(tokens), device=DEVICE)
    local = ab.LowerTriangularFromBottomRightLocalAttentionMask(1024)
    sinks = SinkWindowMask(4, 1024)
    shape = (1, 1, bias_tokens, bias_tokens)
    tensor = sinks.materialize(shape, dtype=torch.bfloat16, device=DEVICE)
    return {
        "causal": (tokens, ab.LowerTriangularMask(), ab.LowerTriangularMask()),
        "local 1024": (tokens, local, local),
        "packed causal": (tokens, packed, packed),
        "sinks 4 + window 1024": (
            bias_tokens,
            sinks,
            tensor.expand(1, HEADS, bias_tokens, bias_tokens),
        ),
    }


def _tensors(tokens: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [
        torch.randn(1, tokens, HEADS, DIM, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    ]


def _step(tensors: list[torch.Tensor], bias: Any, ours: bool) -> Callable[[], list[torch.Tensor]]:
    upstream = torch.randn_like(tensors[0])

    def run() -> list[torch.Tensor]:
        with install() if ours else nullcontext():
            out = fmha.memory_efficient_attention(*tensors, attn_bias=bias)
        return [out, *torch.autograd.grad(out, tensors, upstream)]

    return run


def _their_choice(tensors: list[torch.Tensor], bias: Any) -> str:
    """Names of xFormers' forward and backward operators for this call."""
    inputs = fmha.Inputs(*tensors, bias)
    forward = fmha.dispatch._dispatch_fw(inputs, True)
    backward = fmha.dispatch._dispatch_bw(inputs, varlen_lse_packed=forward.VARLEN_LSE_PACKED)
    return f"{forward.NAME} {backward.NAME}"


def _worst(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    """Largest difference of outputs and gradients, in units of the largest magnitude."""
    return max(
        ((a.float() - b.float()).abs().max() / b.float().abs().max()).item()
        for a, b in zip(found, wanted, strict=True)
    )


def main() -> int:
    """Check, measure, print and write; 1 if a check failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--bias-tokens", type=int, default=32768)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    rows: list[Row] = []
    failed = False
    for name, (tokens, our_bias, their_bias) in _cases(
        arguments.tokens, arguments.bias_tokens
    ).items():
        tensors = _tensors(tokens)
        torch.manual_seed(1)
        ours = _step(tensors, our_bias, ours=True)
        torch.manual_seed(1)
        theirs = _step(tensors, their_bias, ours=False)
        chosen = _their_choice(tensors, their_bias)
        worst = _worst(ours(), theirs())
        if not worst <= TOLERANCE:
            print(f"{name}: ours differs from {chosen} by {worst:.3g}", file=sys.stderr)
            failed = True
            continue
        times: dict[str, list[float]] = {"ours": [], "theirs": []}
        for _ in range(arguments.rounds):
            for label, step in (("ours", ours), ("theirs", theirs)):
                times[label].append(float(do_bench(step, warmup=20, rep=100, return_mode="median")))
        mine, other = (statistics.median(times[label]) for label in ("ours", "theirs"))
        row: Row = {
            "case": name,
            "tokens": tokens,
            "xformers_op": chosen,
            "sparsek_ms": round(mine, 4),
            "xformers_ms": round(other, 4),
            "speedup": round(other / mine, 3),
            "difference": round(worst, 5),
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "xformers": version("xformers"),
        }
        rows.append(row)
        print(", ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    if arguments.csv is not None and rows:
        with arguments.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
