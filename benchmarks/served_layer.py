"""What a server's layers spend on attention, kernel by kernel: for a prompt's last whole chunk, and
while requests decode.

    python -m benchmarks.served_layer --json served_layer.json      # a GPU, three minutes

Kernel benchmarks time one call after another; a server runs other kernels between two layers, which
push code and data out of the caches.  Here vLLM serves requests of one context, and PyTorch's
profiler notes every kernel.  A layer's *span* goes from the end of the kernel before the one that
writes new rows to the begin of the output projection, so it holds the gaps too.

Both backends first answer a short prompt, which both attend whole: the answers must be the same, up
to rounding, or the exit status is 1.  The model is a shape with random weights.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.long_prompts import apart, write_model
from sparsek_backend.eval.workers import WorkerError, run_worker
from sparsek_backend.machine import choose_device, describe_machine
from sparsek_backend.vllm_backend.names import BACKEND_NAME

WORKER = "benchmarks.served_layer_worker"
WRITES = ("write_kv", "reshape_and_cache")
"""Names of kernels that write a step's rows begin or contain these."""
PROJECTIONS = ("nvjet", "sm90_xmma", "sm80_xmma", "ampere_")
"""Names of matrix products of cuBLAS begin with these."""
SILENCE_LIMIT = 300.0


class Kernel(NamedTuple):
    """A kernel that ran: its name, when it began and how long it took, in microseconds."""

    name: str
    begin: float
    duration: float

    @property
    def end(self) -> float:
        """When it ended."""
        return self.begin + self.duration


def layers_of(kernels: Sequence[Kernel]) -> Iterator[tuple[float, list[Kernel]]]:
    """Span of each layer, and the kernels in it, which begin at 0 where the span does."""
    for index in range(1, len(kernels)):
        if not any(name in kernels[index].name for name in WRITES):
            continue
        after = index
        while after < len(kernels) and not kernels[after].name.startswith(PROJECTIONS):
            after += 1
        if after < len(kernels):
            start = kernels[index - 1].end
            inside = [
                kernel._replace(begin=kernel.begin - start) for kernel in kernels[index:after]
            ]
            yield kernels[after].begin - start, inside


def summarise(kernels: Iterable[Sequence[Any]]) -> dict[str, Any]:
    """Median, 20th and 80th percentile of the layers' spans, and medians of each of their kernels.

    Layers of other kernels than most are left out: the profiler may have begun in the midst of one.

    Raises:
        ValueError: no layer was found.
    """
    found = list(layers_of([Kernel(*kernel) for kernel in kernels]))
    if not found:
        raise ValueError("expected kernels of whole layers, found none")
    names = [tuple(kernel.name for kernel in inside) for _, inside in found]
    (usual, _), *_ = Counter(names).most_common(1)
    layers = [layer for layer, its in zip(found, names, strict=True) if its == usual]
    spans = sorted(span for span, _ in layers)
    each = zip(*(inside for _, inside in layers), strict=True)
    return {
        "layers": len(layers),
        "span_us": round(statistics.median(spans), 2),
        "span_p20_us": round(spans[len(spans) // 5], 2),
        "span_p80_us": round(spans[-1 - len(spans) // 5], 2),
        "kernels": [
            {
                "name": same[0].name,
                "begin_us": round(statistics.median(kernel.begin for kernel in same), 2),
                "duration_us": round(statistics.median(kernel.duration for kernel in same), 2),
            }
            for same in each
        ],
    }


def main() -> int:
    """Profile both backends, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama-3.1-8b-quarter", help="a shape")
    parser.add_argument("--baseline", default="FLASH_ATTN")
    parser.add_argument("--context", type=int, nargs="+", default=[2048, 8192, 32768, 131072])
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--gpu-memory", type=float, default=0.4)
    parser.add_argument("--commit", default="", help="recorded where there is no git")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    runs: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="sparsek-shape-") as folder:
        try:
            model = str(write_model(options.model, Path(folder)))
            for name in (options.baseline, BACKEND_NAME):
                ours = name == BACKEND_NAME
                job = {
                    "model": model,
                    "settings": {} if ours else None,
                    "baseline": None if ours else name,
                    "contexts": options.context,
                    "requests": options.requests,
                    "gpu_memory_utilization": options.gpu_memory,
                }
                tell = functools.partial(print, f"{name}:", flush=True)
                runs[name] = run_worker(
                    WORKER, job, label=name, on_progress=tell, timeout=SILENCE_LIMIT
                )
            rows = [
                {"backend": name, **case, **summarise(case["kernels"])}
                for name, run in runs.items()
                for case in run["cases"]
            ]
        except (ValueError, WorkerError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    parted = apart(runs[options.baseline], runs[BACKEND_NAME])
    result = {
        "model": options.model, "requests": options.requests, "parted": parted, "cases": rows,
        "machine": asdict(describe_machine(choose_device("auto"), options.commit)),
    }  # fmt: skip
    options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for row in rows:
        print(f"{row['backend']}, {row['phase']}, {row['context']}: {row['span_us']} us of a layer")
    if parted:
        print(f"error: the short prompt is answered otherwise, {parted}", file=sys.stderr)
    return int(bool(parted))


if __name__ == "__main__":
    sys.exit(main())
