"""Seconds until an engine is ready to serve, against another backend; kernels compiled after it.

    python benchmarks/engine_start.py --json engine_start.json                   # a GPU
    python benchmarks/engine_start.py --layers 8 --no-cold --json engine_start.json
    python benchmarks/engine_start.py --toy --json /tmp/toy.json                 # a minute on a CPU

Engines start in turn, each in processes of its own: once to fill the caches of torch.compile and
Triton, then ``--repeats`` times with warm ones, and once with an empty cache of Triton.  Every
engine answers one short prompt, which both backends attend whole: the answers must be the same, up
to rounding.  Then the last warm SPARSEK engine serves requests of random lengths.  Exit status 1:
an answer was another one, or Triton compiled a kernel of SparseK for a request.

The model is a shape with random weights (`random_weights.py`).
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from long_prompts import apart, write_model

from sparsek_backend.eval.workers import WorkerError, run_worker
from sparsek_backend.machine import choose_device, describe_machine
from sparsek_backend.vllm_backend.names import BACKEND_NAME

WORKER = "benchmarks.engine_start_worker"
SILENCE_LIMIT = 300.0


def schedule(options: argparse.Namespace) -> list[tuple[str, str]]:
    """Kind of start and backend, in the order of the runs."""
    kinds = ["filling", *["warm"] * options.repeats, *["cold"] * options.cold]
    return [(kind, backend) for kind in kinds for backend in (options.baseline, BACKEND_NAME)]


@contextmanager
def triton_cache(kind: str) -> Iterator[None]:
    """An empty cache of Triton for the processes of a cold start."""
    before = os.environ.get("TRITON_CACHE_DIR")
    with tempfile.TemporaryDirectory(prefix="sparsek-triton-") as folder:
        try:
            if kind == "cold":
                os.environ["TRITON_CACHE_DIR"] = folder
            yield
        finally:
            os.environ.pop("TRITON_CACHE_DIR", None)
            if before is not None:
                os.environ["TRITON_CACHE_DIR"] = before


def judge(baseline: str, runs: list[Mapping[str, Any]]) -> tuple[dict[str, Any], list[str]]:
    """Median seconds of each kind of start, and what is wrong."""
    seconds: dict[str, Any] = {}
    for kind in dict.fromkeys(run["kind"] for run in runs):
        seconds[kind] = {
            backend: median(
                run["start_s"] for run in runs if (run["kind"], run["backend"]) == (kind, backend)
            )
            for backend in (baseline, BACKEND_NAME)
        }
    expected = next(run for run in runs if run["backend"] == baseline)
    wrong = [
        f"{run['kind']}, {run['backend']}: the short prompt is answered otherwise, {parted}"
        for run in runs
        if (parted := apart(expected, run))
    ]
    wrong += [
        f"{run['kind']}, {run['backend']}: {module}.{name} was compiled for a request"
        for run in runs
        for module, name, _ in run.get("compiled", ())
        if module.startswith("sparsek")
    ]
    return {"start_s": seconds}, wrong


def main() -> int:
    """Start engines, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama-3.1-8b", help="a shape")
    parser.add_argument("--layers", type=int, help="in place of the shape's")
    parser.add_argument("--baseline", default="FLASH_ATTN")
    parser.add_argument("--max-model-len", type=int, default=131072)
    parser.add_argument("--repeats", type=int, default=1, help="warm starts of each backend")
    parser.add_argument("--no-cold", dest="cold", action="store_false")
    parser.add_argument("--load-tokens", type=int, default=400_000, help="of the random load")
    parser.add_argument("--gpu-memory", type=float, default=0.9)
    parser.add_argument("--toy", action="store_true", help="shape tiny, 1024 tokens, on a CPU")
    parser.add_argument("--commit", default="", help="recorded where there is no git")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    if options.toy:
        options.model, options.max_model_len, options.baseline = "tiny", 1024, "CPU_ATTN"
        options.load_tokens, options.cold, options.gpu_memory = 4000, False, 0.1
    engine = {
        "max_model_len": options.max_model_len,
        "gpu_memory_utilization": options.gpu_memory,
    }
    runs: list[dict[str, Any]] = []
    todo = schedule(options)
    last_warm = max(index for index, (kind, name) in enumerate(todo) if kind == "warm")
    with tempfile.TemporaryDirectory(prefix="sparsek-shape-") as folder:
        changes = {"num_hidden_layers": options.layers} if options.layers else {}
        try:
            model = str(write_model(options.model, Path(folder), **changes))
            for index, (kind, name) in enumerate(todo):
                ours = name == BACKEND_NAME
                job = {
                    "model": model,
                    "settings": {} if ours else None,
                    "baseline": None if ours else name,
                    "load_tokens": options.load_tokens if index == last_warm else 0,
                    "engine": engine,
                }
                tell = functools.partial(_tell, f"{kind}, {name}")
                with triton_cache(kind):
                    run = run_worker(
                        WORKER,
                        job,
                        label=f"{kind}, {name}",
                        on_progress=tell,
                        timeout=SILENCE_LIMIT,
                    )
                runs.append({"kind": kind, "backend": name, **run})
        except (ValueError, WorkerError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    seconds, wrong = judge(options.baseline, runs)
    machine = describe_machine(choose_device("cpu" if options.toy else "auto"), options.commit)
    result = {
        "model": options.model, "layers": options.layers, "max_model_len": options.max_model_len,
        **seconds, "wrong": wrong, "runs": runs, "machine": asdict(machine),
    }  # fmt: skip
    options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(seconds))
    for line in wrong:
        print(f"error: {line}", file=sys.stderr)
    return int(bool(wrong))


def _tell(name: str, line: str) -> None:
    print(f"{name}: {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
