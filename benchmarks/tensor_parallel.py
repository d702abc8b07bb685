"""Tensor parallel: two GPUs give the tokens of one; and the time per token on two.

    python benchmarks/tensor_parallel.py --out benchmarks/results        # two GPUs
    python benchmarks/tensor_parallel.py --no-tpot --longest 600 --ranks 1 --out /tmp/tp     # a CPU

Tokens: a small Llama with random float32 weights, one checkpoint, block selection per query.  The
ranks add their halves of each layer's output in an order of their own, so a token may differ where
the one-GPU run holds both for equally likely, or where two blocks tie for the last place of the
selection.  How often rounding does that is measured: the control is the same model on one GPU with
the neurons of its MLPs in another order.

TPOT: the Llama-3.1-8B shape without weights, 4 requests of 128k decoding together, as
``sparsek bench serve`` measures it, SPARSEK on all ranks.  Its engine starts beside the others, but
is timed after they have ended.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from random_llama import Answer, compare, reorder_neurons, write_llama
from rich.console import Console

TIE = 0.01
"""Log-probability gap within which two float32 tokens are a tie."""
NOISE = 1.5
"""How many times as many answers as the control's may part beyond ties."""
SETTINGS = {"num_sink": 64, "window_size": 128, "top_k": 8, "dense_below": 256, "query_tile": 1}
console = Console(stderr=True)


def answers(model: Path, arguments: argparse.Namespace, ranks: int, label: str) -> dict[str, Any]:
    """The worker's result on so many ranks."""
    from sparsek_backend.eval.workers import run_worker

    spread = math.log(arguments.longest / 50)
    lengths = [
        round(50 * math.exp(spread * index / max(arguments.prompts - 1, 1)))
        for index in range(arguments.prompts)
    ]
    job = {
        "model": str(model),
        "settings": SETTINGS,
        "lengths": lengths,
        "seed": 1,
        "output_tokens": 32,
        "engine": {
            "dtype": "float32",
            "tensor_parallel_size": ranks,
            "gpu_memory_utilization": 0.05,
            "kv_cache_memory_bytes": 2 << 30,
        },
    }
    return run_worker(
        "tensor_parallel_worker",
        job,
        label=label,
        on_progress=lambda line: tell(f"tokens, {label}: {line}"),
        timeout=600,
    )


def tpot(folder: Path, arguments: argparse.Namespace, others: threading.Event) -> dict[str, Any]:
    """Time per output token on all ranks, in milliseconds."""
    from sparsek_backend.bench.shapes import write_shape
    from sparsek_backend.eval.workers import run_worker

    alone: list[bool] = []

    def progress(line: str) -> None:
        tell(f"TPOT: {line}")
        if line.endswith("ms per token"):
            alone.append(others.is_set())

    job = {
        "model": str(write_shape("llama-3.1-8b", folder)),
        "settings": {},
        "baseline": None,
        "cases": [{"context": arguments.context, "requests": 4}],
        "output_tokens": 64,
        "repeats": arguments.repeats,
        "engine": {
            "load_format": "dummy",
            "dtype": "bfloat16",
            "tensor_parallel_size": arguments.ranks,
            "max_num_batched_tokens": 16384,
            "gpu_memory_utilization": 0.5,
            "kv_cache_memory_bytes": 48 << 30,
        },
        "seed": 0,
    }
    found = run_worker(
        "sparsek_backend.bench.serve_worker",
        job,
        label="TPOT",
        on_progress=progress,
        timeout=600,
    )
    (case,) = found["cases"]
    quiet = [index for index, was_alone in enumerate(alone) if was_alone]
    samples = [1e3 * case["tpot_s"][4 * index + i] for index in quiet for i in range(4)]
    if not samples:
        raise RuntimeError("TPOT: every sample was taken beside the other engines; add --repeats")
    ordered = sorted(samples)
    return {
        "context": arguments.context,
        "requests": 4,
        "tpot_ms": ordered[len(ordered) // 2],
        "tpot_lowest_ms": ordered[0],
        "tpot_highest_ms": ordered[-1],
        "samples": len(ordered),
        "ttft_ms": 1e3 * min(case["ttft_s"]),
        "attended_share": found["attended_share"],
    }


def judge(one: dict[str, Any], many: dict[str, Any]) -> dict[str, Any]:
    """Compare the answers."""
    found = [
        compare(Answer.from_json(ours), Answer.from_json(theirs))
        for ours, theirs in zip(many["answers"], one["answers"], strict=True)
    ]
    gaps = [one.gap for one in found if one.gap is not None]
    return {
        "answers": len(found),
        "tokens": sum(len(answer["tokens"]) for answer in one["answers"]),
        "equal": len(found) - len(gaps),
        "parted_beyond_ties": sum(gap > TIE for gap in gaps),
        "widest_gap": max(gaps, default=0.0),
        "tie": TIE,
        "largest_logprob_difference": max(one.distance for one in found),
        "attended_share": one["attended_share"],
        "ranks": many["ranks"],
    }


def tell(line: str) -> None:
    """A line of progress."""
    console.print(f"{time.perf_counter() - BEGIN:.0f} s {line}", highlight=False)


BEGIN = time.perf_counter()


def main() -> int:
    """Run, print and write; 1 where more answers part than rounding alone explains."""
    from sparsek_backend.machine import choose_device, describe_machine

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--longest", type=int, default=20_000)
    parser.add_argument("--context", type=int, default=131_072)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-tpot", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--name", default="tensor_parallel")
    parser.add_argument("--commit", default="", help="to record where there is no git")
    arguments = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join(
        path
        for path in (str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH", ""))
        if path
    )
    done = threading.Event()
    with tempfile.TemporaryDirectory(prefix="sparsek-tp-") as folder, ThreadPoolExecutor(4) as pool:
        timing = None
        if not arguments.no_tpot:
            timing = pool.submit(tpot, Path(folder, "shape"), arguments, done)
        model = write_llama(Path(folder, "model"))
        other = reorder_neurons(model, Path(folder, "reordered"))
        runs = [
            pool.submit(answers, *job)
            for job in (
                (model, arguments, 1, "1 GPU"),
                (model, arguments, arguments.ranks, f"{arguments.ranks} GPUs"),
                (other, arguments, 1, "control"),
            )
        ]
        try:
            one, many, control = (run.result() for run in runs)
        finally:
            done.set()
        tokens, rounding = judge(one, many), judge(one, control)
        tell(json.dumps({"tokens": tokens, "control": rounding}))
        machine = describe_machine(choose_device(), arguments.commit)
        result = {
            "tokens": tokens,
            "control": rounding,
            "tpot": timing.result() if timing else None,
            "machine": dataclasses.asdict(machine),
        }
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / f"{arguments.name}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))
    allowed = NOISE * rounding["parted_beyond_ties"]
    return 0 if tokens["parted_beyond_ties"] <= allowed else 1


if __name__ == "__main__":
    sys.exit(main())
