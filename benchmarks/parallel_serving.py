"""Engines on several GPUs give the answers of one: a table of ways to share a model.

    python benchmarks/parallel_serving.py --json parallel_serving_h200.json
    python benchmarks/parallel_serving.py --json h200.json --row tp2-eager --row dp2-graphs

Rows: tensor, pipeline, expert, data and decode context parallelism, each eager and with CUDA
graphs, and some with a draft model.  Those that need more GPUs than there are are left out.
Engines are small and share the GPUs: many run at a time.  The longest prompts are asked again from
the prefix cache.

Models are small, with random weights, one checkpoint a kind; blocks are selected per query.  Ranks
add their parts of a layer's output in an order of their own, so a token may differ where one GPU
holds both for equally likely, or where two blocks tie for the last place of the selection.  How
often rounding does that is measured: the control of a kind is the same model on one GPU with the
neurons of its MLPs in another order.

``equal`` tells whether no more answers parted beyond ties than rounding explains, and no sooner:
where all long prompts part, their number alone tells nothing.  ``refused`` says why a row gave no
answers.  The table is written after every engine.  Exit status 1: a row is not equal, or was
refused.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import torch
from random_llama import Answer, compare, reorder_neurons, write_llama
from rich.console import Console

from sparsek_backend.eval.workers import WorkerError, run_worker
from sparsek_backend.machine import choose_device, describe_machine

TIES = {"float32": 0.01, "bfloat16": 0.1}
"""Log-probability gap within which two tokens are a tie."""
NOISE = 1.5
"""How many times as many answers as the control's may part beyond ties."""
SOONER = 3.0
"""How many times as soon as the control's the mean answer may part."""
SETTINGS = {"num_sink": 64, "window_size": 128, "top_k": 8, "dense_below": 256, "query_tile": 1}
PAGE = 64
KINDS: dict[str, dict[str, Any]] = {
    "4 KV heads": {},
    "2 KV heads": {"num_key_value_heads": 2},
    "1 KV head": {"num_key_value_heads": 1},
    "experts": {"num_local_experts": 8},
    "drafts": {},
}
"""What a model's config has besides the small Llama's.  The draft model is the model itself."""
SHARED: dict[str, tuple[str, dict[str, Any]]] = {
    "tp2": ("4 KV heads", {"tensor_parallel_size": 2}),
    "pp2": ("4 KV heads", {"pipeline_parallel_size": 2}),
    "dp2": ("4 KV heads", {"data_parallel_size": 2}),
    "ep2": ("experts", {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
    "dcp2": ("1 KV head", {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}),
    "tp4": ("4 KV heads", {"tensor_parallel_size": 4}),
    "tp4-dcp2": ("2 KV heads", {"tensor_parallel_size": 4, "decode_context_parallel_size": 2}),
}
DRAFTED = ("tp2", "dp2", "tp4")
BEGIN = time.perf_counter()
console = Console(stderr=True)


class Engine(NamedTuple):
    """One engine to start: of a row, or on one GPU."""

    kind: str
    options: Mapping[str, Any]

    @property
    def gpus(self) -> int:
        """How many it needs."""
        sizes = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
        return math.prod(self.options.get(size, 1) for size in sizes)


def rows_of(gpus: int) -> dict[str, Engine]:
    """Every row that so many GPUs can run."""
    found = {}
    for name, (kind, shared) in SHARED.items():
        options = dict(shared)
        if "decode_context_parallel_size" in options:
            options["cp_kv_cache_interleave_size"] = PAGE
        for how in ("eager", "graphs"):
            found[f"{name}-{how}"] = Engine(kind, {**options, "enforce_eager": how == "eager"})
        if name in DRAFTED:
            found[f"{name}-drafts"] = Engine("drafts", options)
    return {name: engine for name, engine in found.items() if engine.gpus <= gpus}


def job_of(engine: Engine, model: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """What the worker gets."""
    spread = math.log(max(arguments.longest / 50, 1))
    places = [index / max(arguments.prompts - 1, 1) for index in range(arguments.prompts)]
    options = {**engine.options}
    if engine.kind == "drafts":
        draft = {"method": "draft_model", "model": str(model), "num_speculative_tokens": 2}
        options["speculative_config"] = draft
    return {
        "model": str(model),
        "settings": SETTINGS,
        "lengths": [round(50 * math.exp(spread * place)) for place in places],
        "seed": 1,
        "output_tokens": arguments.output_tokens,
        "engine": {
            "dtype": arguments.dtype,
            "block_size": PAGE,
            "max_num_batched_tokens": 4096,
            "gpu_memory_utilization": 0.02,
            "kv_cache_memory_bytes": 1 << 30,
            **options,
        },
    }


def judge(one: dict[str, Any], many: dict[str, Any], tie: float) -> dict[str, Any]:
    """Compare the answers."""
    found = [
        compare(Answer.from_json(ours), Answer.from_json(theirs))
        for ours, theirs in zip(many["answers"], one["answers"], strict=True)
    ]
    gaps = [one.gap for one in found if one.gap is not None]
    equal = [one.equal for one in found if one.gap is not None]
    return {
        "answers": len(found),
        "answers_equal": len(found) - len(gaps),
        "parted_beyond_ties": sum(gap > tie for gap in gaps),
        "tokens_until_parted": statistics.mean(equal) if equal else None,
        "widest_gap": max(gaps, default=0.0),
        "largest_logprob_difference": max(one.distance for one in found),
        **{name: value for name, value in many.items() if name != "answers"},
    }


def table_of(
    rows: Mapping[str, Engine], found: Mapping[str, dict[str, Any]], tie: float
) -> dict[str, dict[str, Any]]:
    """The rows whose engines have ended, judged where those on one GPU have too."""
    table = {}
    for name, engine in rows.items():
        if name not in found:
            continue
        given = {"model": engine.kind, "seconds": found[name]["seconds"]}
        one, control = (found.get(f"{which}, {engine.kind}", {}) for which in ("one", "control"))
        if "refused" in found[name]:
            given["refused"] = found[name]["refused"]
        elif "answers" in one and "answers" in control:
            given |= judge(one, found[name], tie)
            rounding = judge(one, control, tie)
            allowed = NOISE * rounding["parted_beyond_ties"]
            after, due = given["tokens_until_parted"], rounding["tokens_until_parted"]
            shown = ("parted_beyond_ties", "tokens_until_parted", "widest_gap")
            given["control"] = {name: rounding[name] for name in shown}
            sooner = None not in (after, due) and SOONER * after < due
            given["equal"] = given["parted_beyond_ties"] <= allowed and not sooner
        table[name] = given
    return table


def main() -> int:
    """Run, print and write."""
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if gpus == [""]:
        gpus = [str(index) for index in range(torch.cuda.device_count())]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    every = rows_of(max(len(gpus), 1) if torch.cuda.is_available() else 4)
    parser.add_argument("--row", choices=every, action="append", help="all when left out")
    parser.add_argument("--dtype", choices=TIES, default="float32")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--longest", type=int, default=20_000)
    parser.add_argument("--output-tokens", type=int, default=24)
    parser.add_argument("--engines", type=int, help="at a time; 3 a GPU when left out")
    parser.add_argument("--silence", type=float, default=150.0, help="seconds; then one has hung")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--commit", default="", help="to record where there is no git")
    arguments = parser.parse_args()
    rows = {name: every[name] for name in arguments.row or every}
    machine = dataclasses.asdict(describe_machine(choose_device(), arguments.commit))
    os.environ["PYTHONPATH"] = os.pathsep.join(
        path for path in (str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")) if path
    )
    found: dict[str, dict[str, Any]] = {}

    def answers(name: str, engine: Engine, model: Path, first: int) -> dict[str, Any]:
        begin = time.perf_counter()
        chosen = [gpus[i % len(gpus)] for i in range(first, first + engine.gpus) if gpus]
        try:
            found = run_worker(
                "parallel_serving_worker",
                job_of(engine, model, arguments),
                label=name,
                on_progress=lambda line: tell(f"{name}: {line}"),
                timeout=arguments.silence,
                environment={"CUDA_VISIBLE_DEVICES": ",".join(chosen)} if chosen else {},
            )
        except WorkerError as error:
            found = {"refused": str(error)[-2000:]}
        return {"seconds": round(time.perf_counter() - begin, 1), **found}

    with tempfile.TemporaryDirectory(prefix="sparsek-parallel-") as folder:
        models = {}
        for kind in dict.fromkeys(engine.kind for engine in rows.values()):
            model = write_llama(Path(folder, kind.replace(" ", "-")), **KINDS[kind])
            models[kind] = model, reorder_neurons(model, Path(folder, f"{model.name}-reordered"))
        engines = {
            f"{which}, {kind}": (Engine(kind, {}), model)
            for kind, pair in models.items()
            for which, model in zip(("one", "control"), pair, strict=True)
        }
        engines |= {name: (engine, models[engine.kind][0]) for name, engine in rows.items()}
        place, together = 0, arguments.engines or 3 * max(len(gpus), 1)
        with ThreadPoolExecutor(together) as pool:
            runs = {}
            for name, (engine, model) in engines.items():
                runs[pool.submit(answers, name, engine, model, place)] = name
                place += engine.gpus
            for run in as_completed(runs):
                found[runs[run]] = run.result()
                table = table_of(rows, found, TIES[arguments.dtype])
                table |= {
                    name: {key: value for key, value in one.items() if key != "answers"}
                    for name, one in found.items()
                    if name not in rows
                }
                result = {"dtype": arguments.dtype, "rows": table, "machine": machine}
                arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
                tell(f"{runs[run]}: {json.dumps(table[runs[run]])}")
    for name in rows:
        print(name, "equal" if table[name].get("equal") else json.dumps(table[name]))
    return int(not all(table[name].get("equal") for name in rows))


def tell(line: str) -> None:
    """A line of progress."""
    console.print(f"{time.perf_counter() - BEGIN:.0f} s {line}", highlight=False)


if __name__ == "__main__":
    sys.exit(main())
