"""`sparsek bench serve --rate`: a server of each backend under the load of `vllm bench serve`."""

from __future__ import annotations

import json
import os
import socket
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table

from sparsek_backend.bench.load_mix import (
    draw_lengths,
    longest,
    write_number_tokenizer,
    write_prompts,
)
from sparsek_backend.bench.shapes import SHAPES, model_folder
from sparsek_backend.bench.together import Together
from sparsek_backend.eval.engine import ensure_entry_point
from sparsek_backend.machine import Machine
from sparsek_backend.quickstart_server import HOST, Server, vllm_command
from sparsek_backend.vllm_backend.names import BACKEND_NAME

START_TIMEOUT_SECONDS = 1800.0
SERVED_NAME = "model"
WARM = 0.0
"""Stands for the rate of the few requests before the first one: graphs, kernels, connections."""

Row = dict[str, Any]
"""A row of a result file by column; the columns that describe the machine come last."""


@dataclass(frozen=True)
class LoadPlan:
    """Model, request rates and limits of a measurement under load.

    Args:
        model: model folder, or a name of `SHAPES`.
        rates: requests a second, whose arrivals are a Poisson process.
        mix: `sharegpt` or `documents`.
        num_requests: requests of each rate.
        document_tokens: mean prompt of `documents`.
        settings: our `sparsek` settings; empty for the defaults.
        baseline: vLLM backend to compare with, None for vLLM's own choice.
        tpot_limit_ms: a request counts as good with at most this time per output token.
        ttft_limit_ms: and at most this time to its first token; None for any.
        engine: further arguments of `vllm.LLM`.
        seed: of lengths and arrivals.
        side_by_side: both servers run at once, each on a GPU of its own.
    """

    model: str
    rates: tuple[float, ...]
    mix: str
    num_requests: int
    document_tokens: int
    settings: Mapping[str, Any]
    baseline: str | None
    tpot_limit_ms: float
    ttft_limit_ms: float | None
    engine: Mapping[str, Any]
    seed: int = 0
    side_by_side: bool = False


def run_load(plan: LoadPlan, machine: Machine, on_progress: Callable[[str], None]) -> list[Row]:
    """Measure both backends, one server after the other or side by side: a row for each rate.

    The first failure ends both.

    Raises:
        ValueError: the plan does not fit, or the machine does not; the message names the argument.
        ServerError: a server did not start; the message names its backend and has the end of its
            log.
        RuntimeError: `vllm bench serve` failed, or requests did; the message names the backend.
    """
    for rate in plan.rates:
        if not 0 < rate < float("inf"):
            raise ValueError(f"rate: expected requests a second above 0, got {rate}")
    lengths = draw_lengths(plan.mix, plan.num_requests, plan.document_tokens, plan.seed)
    names = (plan.baseline or "vLLM's own", BACKEND_NAME)
    gpus = _gpu_each(len(names)) if plan.side_by_side else (None,) * len(names)
    with tempfile.TemporaryDirectory(prefix="sparsek-load-") as scratch:
        folder = Path(scratch)
        model, loading = model_folder(plan.model, folder / "shape")
        engine = {**plan.engine, **loading}
        if plan.model in SHAPES:
            write_number_tokenizer(model, SHAPES[plan.model]["vocab_size"])
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model)
        for turn, _ in enumerate((WARM, *plan.rates)):  # no rate finds another's prefixes cached
            path, seed = folder / f"prompts-{turn}.jsonl", plan.seed + turn
            write_prompts(path, lengths, len(tokenizer), tokenizer.decode, seed)
        ensure_entry_point()
        load = _Load(plan, machine, model, engine, longest(lengths), folder, on_progress)
        works = [partial(load.measure, *each) for each in zip(names, gpus, strict=True)]
        found = load.together.call(works) if plan.side_by_side else [work() for work in works]
    rows = [row for of_backend in found for row in of_backend]
    return sorted(rows, key=lambda row: (row["rate"], row["backend"] == BACKEND_NAME))


@dataclass(frozen=True)
class _Load:
    """What the servers of a plan share; prompts lie in ``folder``."""

    plan: LoadPlan
    machine: Machine
    model: Path
    engine: Mapping[str, Any]
    max_len: int
    folder: Path
    on_progress: Callable[[str], None]
    together: Together = field(default_factory=Together)

    def measure(self, name: str, gpu: str | None) -> list[Row]:
        """Start one backend's server, on ``gpu`` alone if one is named, and measure every rate."""
        try:
            return self._measure_rates(name, gpu)
        except RuntimeError as error:
            raise type(error)(f"{name}: {error}") from error

    def _measure_rates(self, name: str, gpu: str | None) -> list[Row]:
        plan, rows = self.plan, []
        backend = BACKEND_NAME if name == BACKEND_NAME else plan.baseline
        self.on_progress(f"{name}: starting the server")
        held, port = _hold_port()
        with held:
            command = server_command(plan, self.model, backend, self.engine, self.max_len, port)
            environment = _environment(self.folder, name, gpu)
            server = Server(command, environment, port, self.folder / f"{name}.log")
            with self.together.running(server.stop):
                server.wait_until_healthy(
                    START_TIMEOUT_SECONDS, lambda line: self.on_progress(f"{name}: {line}"), 60
                )
                for turn, rate in enumerate((WARM, *plan.rates)):
                    prompts = self.folder / f"prompts-{turn}.jsonl"
                    result = self._measure_rate(server, prompts, rate, name)
                    if rate == WARM:
                        continue
                    rows.append(_row(plan, self.machine, name, rate, result))
                    self.on_progress(
                        f"{name}, {rate:g} requests/s: goodput {rows[-1]['goodput']:.3g}, "
                        f"p99 of TPOT {rows[-1]['tpot_p99_ms']:.1f} ms"
                    )
        return rows

    def _measure_rate(
        self, server: Server, prompts: Path, rate: float, name: str
    ) -> dict[str, Any]:
        """Run `vllm bench serve` and return its result.

        Raises:
            RuntimeError: it failed, or a request did.
        """
        result = prompts.with_name(f"result-{name}-{rate:g}.json")
        result.unlink(missing_ok=True)
        command = bench_command(self.plan, server.url, self.model, prompts, rate, result)
        done = self.together.run(command)
        if done.returncode or not result.exists():
            tail = "\n".join(done.stdout.splitlines()[-15:])
            raise RuntimeError(f"vllm bench serve failed at {rate:g} requests a second:\n{tail}")
        found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
        if found["failed"]:
            raise RuntimeError(
                f"{found['failed']} requests failed at {rate:g} a second; the end of the server's "
                f"log:\n{server.log_tail()}"
            )
        return found


def server_command(
    plan: LoadPlan,
    model: Path,
    backend: str | None,
    engine: Mapping[str, Any],
    max_len: int,
    port: int,
) -> list[str]:
    """Return the `vllm serve` command of one backend."""
    command = [*vllm_command(), "serve", str(model), "--served-model-name", SERVED_NAME]
    command += ["--max-model-len", str(max_len)]
    if backend is not None:
        command += ["--attention-backend", backend]
    if backend == BACKEND_NAME and plan.settings:
        command += ["--additional-config", json.dumps({"sparsek": dict(plan.settings)})]
    for name, value in engine.items():
        flag = "--" + name.replace("_", "-")
        command += [flag] if value is True else [flag, str(value)]
    return [*command, "--host", HOST, "--port", str(port)]


def _hold_port() -> tuple[socket.socket, int]:
    """A free port, which nobody else gets before the server binds it; it reuses the address."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((HOST, 0))
    return held, held.getsockname()[1]


def bench_command(
    plan: LoadPlan, url: str, model: Path, prompts: Path, rate: float, result: Path
) -> list[str]:
    """Return the `vllm bench serve` command of one rate."""
    good = [f"tpot:{plan.tpot_limit_ms:g}"]
    if plan.ttft_limit_ms is not None:
        good.append(f"ttft:{plan.ttft_limit_ms:g}")
    warm = rate == WARM
    count = min(plan.num_requests, 4) if warm else plan.num_requests
    return [
        *(*vllm_command(), "bench", "serve", "--backend", "openai", "--base-url", url),
        *("--model", SERVED_NAME, "--tokenizer", str(model)),
        *("--dataset-name", "custom", "--dataset-path", str(prompts), "--custom-output-len", "-1"),
        *("--skip-chat-template", "--disable-shuffle", "--num-prompts", str(count)),
        *("--request-rate", "inf" if warm else f"{rate:g}", "--seed", str(plan.seed)),
        *("--ignore-eos", "--disable-tqdm", "--percentile-metrics", "ttft,tpot"),
        *("--metric-percentiles", "50,99", "--goodput", *good),
        *("--save-result", "--result-dir", str(result.parent), "--result-filename", result.name),
    ]


def load_table(rows: Sequence[Row]) -> Table:
    """Both backends side by side at every rate."""
    names = ("rate", "backend", "requests/s", "goodput", "TTFT p50 ms", "p99", "TPOT p50 ms", "p99")
    table = Table(*names, "goodput, ratio", title="a server under load", title_justify="left")
    base: dict[float, Row] = {}
    for row in rows:
        first = base.setdefault(row["rate"], row)
        gain = ""
        if first is not row and first["goodput"]:
            gain = f"{row['goodput'] / first['goodput']:.2f}x"
        times = (row[f"{time}_{part}_ms"] for time in ("ttft", "tpot") for part in ("p50", "p99"))
        table.add_row(
            f"{row['rate']:g}",
            row["backend"],
            f"{row['throughput']:.3g}",
            f"{row['goodput']:.3g}",
            *(f"{value:.4g}" for value in times),
            gain,
        )
    return table


def best_rates(rows: Sequence[Row]) -> dict[str, float]:
    """Return each backend's highest goodput among rates whose p99 of TPOT keeps to the limit."""
    best = dict.fromkeys((row["backend"] for row in rows), 0.0)
    for row in rows:
        if row["tpot_p99_ms"] <= row["tpot_limit_ms"]:
            best[row["backend"]] = max(best[row["backend"]], row["goodput"])
    return best


def _gpu_each(count: int) -> tuple[str, ...]:
    """Names of ``count`` of this process's GPUs, as ``CUDA_VISIBLE_DEVICES`` takes them.

    Raises:
        ValueError: there are fewer.
    """
    import torch

    there = torch.cuda.device_count()
    if there < count:
        raise ValueError(f"side_by_side: expected {count} GPUs, got {there}")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return tuple(visible.split(",")[:count] if visible else map(str, range(count)))


def _environment(folder: Path, name: str, gpu: str | None) -> dict[str, str]:
    metrics = folder / f"{name}.metrics"
    metrics.mkdir()
    wanted = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    given = {key: value for key, value in wanted.items() if key not in os.environ}
    if gpu is not None:
        given["CUDA_VISIBLE_DEVICES"] = gpu
    return {**given, "PROMETHEUS_MULTIPROC_DIR": str(metrics)}


def _row(
    plan: LoadPlan, machine: Machine, name: str, rate: float, result: Mapping[str, Any]
) -> Row:
    """One backend at one rate; times in milliseconds, throughputs in requests a second."""
    return {
        "backend": name,
        "model": Path(plan.model).name,
        "mix": plan.mix,
        "rate": rate,
        "requests": result["completed"],
        "failed": result["failed"],
        "throughput": result["request_throughput"],
        "goodput": result["request_goodput"],
        "ttft_p50_ms": result["p50_ttft_ms"],
        "ttft_p99_ms": result["p99_ttft_ms"],
        "tpot_p50_ms": result["p50_tpot_ms"],
        "tpot_p99_ms": result["p99_tpot_ms"],
        "tpot_limit_ms": plan.tpot_limit_ms,
        "ttft_limit_ms": plan.ttft_limit_ms,
        "mean_prompt_tokens": result["total_input_tokens"] / result["completed"],
        "settings": settings_text(plan.settings) if name == BACKEND_NAME else "",
        **asdict(machine),
    }


def settings_text(settings: Mapping[str, Any]) -> str:
    """Settings as a row has them."""
    return " ".join(f"{key}={value}" for key, value in settings.items()) or "defaults"
