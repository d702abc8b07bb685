"""Serve mixed lengths with random aborts for minutes and hold every answer against a solo run.

    python benchmarks/soak.py --seconds 600 --prompts 48 --kv-gib 1.5 --json soak_h200.json
    python benchmarks/soak.py --seconds 20 --prompts 8 --longest 600 --concurrent 6      # a CPU
    python benchmarks/soak.py --seconds 540 --speculate 3 --attend-all --answers ours.json
    python benchmarks/soak.py --seconds 540 --speculate 3 --backend FLASH_ATTN --answers theirs.json
    python benchmarks/soak.py --compare ours.json theirs.json

Prompts of 100 to 100,000 tokens (log-uniform, many of them beginnings of each other) are first
answered alone, then drawn at random by concurrent clients of the same ``AsyncLLM`` engine.  Half of
the requests may hit the prefix cache, half are salted and prefill anew; some are aborted, after a
random time or after a random number of tokens.  Where ``--kv-gib`` holds less than the prompts
together, pages are evicted and requests wait or are preempted.

On a GPU the engine is batch-invariant (``VLLM_BATCH_INVARIANT``): every finished request must have
the tokens and log-probabilities of its solo run, bit for bit.

Without (``--no-batch-invariant``, and on a CPU), selection per query (``query_tile=1``) still makes
what a query attends a function of the pages alone, so an answer may depend on its company through
rounding only: matrix multiplications add in another order in another batch.  In float32 a token may
therefore differ only where the solo run holds both for equally likely, and the log-probabilities of
equal tokens lie close together.

``--speculate`` drafts tokens by n-grams of the request, most of which are refused.  ``--answers``
writes what each prompt is answered alone.  ``--compare`` takes two such files, of two backends,
each served with ``--attend-all``: their answers may part at ties alone.

Exit status 1: a request failed, an answer differed (by more than a tie), device memory grew, pages
were still held at the end, Triton compiled a kernel of SparseK for a request, or nothing was
drafted where something should be.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from random_llama import SHAPE, Answer, compare, random_prompts, write_llama
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from soak_verdict import TIES, Totals, bits, compare_backends, flatness, verdict

DRAFTS = ("drafted", "accepted")
SETTINGS = {
    "num_sink": 64,
    "window_size": 256,
    "top_k": 16,
    "dense_below": 2048,
    "query_tile": 1,
}
console = Console(stderr=True)


def read_memory(_worker: Any) -> dict[str, int]:
    """Runs in vLLM's worker process: bytes of the device and of the process."""
    import resource
    from pathlib import Path

    import torch

    pages = int(Path("/proc/self/statm").read_text().split()[1])
    found = {"host": pages * resource.getpagesize()}
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        found |= {
            "allocated": torch.cuda.memory_allocated(),
            "reserved": torch.cuda.memory_reserved(),
            "device_used": total - free,
        }
    return found


def watch_compilations(worker: Any) -> None:
    """Runs in vLLM's worker process: keep what Triton compiles there from now on."""
    from triton import knobs

    compiled: list[str] = []

    def note(*, src: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            kernel = getattr(src, "fn", None)
            compiled.append(f"{getattr(kernel, 'module', '')}.{getattr(src, 'name', '')}")

    worker.late_compilations = compiled
    knobs.compilation.listener = note


def read_compilations(worker: Any) -> list[str]:
    """Runs in vLLM's worker process: module and name of each kernel that was compiled."""
    found: list[str] = worker.late_compilations
    return found


class Soak:
    """One engine, the solo answers, and the clients."""

    def __init__(self, engine: Any, arguments: argparse.Namespace) -> None:
        self.engine = engine
        self.arguments = arguments
        self.random = random.Random(arguments.seed)
        self.totals = Totals()
        self.memory: list[dict[str, float]] = []
        self.solo: list[Answer] = []
        self.solo_distance = 0.0
        self._counter = 0
        spread = math.log(arguments.longest / arguments.shortest)
        shares = [index / max(arguments.prompts - 1, 1) for index in range(arguments.prompts)]
        lengths = [round(arguments.shortest * math.exp(spread * share)) for share in shares]
        self.random.shuffle(lengths)
        self.prompts = random_prompts(lengths, arguments.seed)
        self.answer_lengths = [self.random.randint(8, 64) for _ in self.prompts]

    def request(self, index: int, *, salted: bool, streamed: bool = False) -> Any:
        """Start a request; returns vLLM's stream of outputs."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._counter += 1
        name = f"soak-{self._counter}"
        prompt: dict[str, Any] = {"prompt_token_ids": self.prompts[index]}
        if salted:
            prompt["cache_salt"] = name
        kind = RequestOutputKind.DELTA if streamed else RequestOutputKind.FINAL_ONLY
        params = SamplingParams(
            temperature=0.0,
            max_tokens=self.answer_lengths[index],
            ignore_eos=True,
            detokenize=False,
            logprobs=5,
            output_kind=kind,
        )
        return self.engine.generate(prompt, params, name)

    async def answer(self, index: int, *, salted: bool) -> Answer:
        """Run a request to its end."""
        last = None
        async with contextlib.aclosing(self.request(index, salted=salted)) as stream:
            async for output in stream:
                last = output
        if last is None or not last.finished:
            raise RuntimeError("the stream ended before the request did")
        return Answer.of(last)

    async def answer_alone(self, tell: Callable[[str], None]) -> None:
        """Answer every prompt with nothing else in the engine; some twice."""
        for index in range(len(self.prompts)):
            self.solo.append(await self.answer(index, salted=True))
            tell(f"solo answers {index + 1} of {len(self.prompts)}")
        for index in range(0, len(self.prompts), 8):
            answer = await self.answer(index, salted=True)
            again = compare(answer, self.solo[index])
            differs = again.gap is not None
            if self.arguments.batch_invariant:
                differs = bits(answer) != bits(self.solo[index])
            if differs:
                raise RuntimeError(f"prompt {index} alone gets two different answers: {again}")
            self.solo_distance = max(self.solo_distance, again.distance)

    async def client(self, until: float) -> None:
        """One client: request after request until the time is over."""
        while time.monotonic() < until:
            index = self.random.randrange(len(self.prompts))
            fate = self.random.random()
            salted = self.random.random() < 0.5
            self.totals.in_flight += 1
            self.totals.most_in_flight = max(self.totals.most_in_flight, self.totals.in_flight)
            try:
                if fate < self.arguments.aborts / 2:
                    await self.abort_after_time(index, salted, self.random.random() * 3.0)
                elif fate < self.arguments.aborts:
                    await self.abort_after_tokens(index, salted)
                else:
                    self.record(index, await self.answer(index, salted=salted))
            except Exception as error:
                self.totals.errors.append(f"{type(error).__name__}: {error}"[:300])
                if len(self.totals.errors) > 20:
                    return
            finally:
                self.totals.in_flight -= 1

    async def abort_after_time(self, index: int, salted: bool, seconds: float) -> None:
        """Cancel wherever the request is by then: waiting, prefilling, decoding or done."""
        task = asyncio.create_task(self.answer(index, salted=salted))
        await asyncio.wait({task}, timeout=seconds)
        if task.done():
            self.record(index, task.result())
            return
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        self.totals.aborted += 1

    async def abort_after_tokens(self, index: int, salted: bool) -> None:
        """Leave a stream after some tokens."""
        stop = self.random.randint(1, self.answer_lengths[index] - 1)
        tokens = 0
        async with contextlib.aclosing(self.request(index, salted=salted, streamed=True)) as stream:
            async for output in stream:
                tokens += len(output.outputs[0].token_ids)
                if tokens >= stop:
                    break
        self.totals.aborted += 1

    def record(self, index: int, answer: Answer) -> None:
        """Hold a finished request against its solo run."""
        found = compare(answer, self.solo[index])
        totals = self.totals
        totals.finished += 1
        totals.prompt_tokens += len(self.prompts[index])
        totals.output_tokens += len(answer.tokens)
        totals.distance = max(totals.distance, found.distance)
        totals.identical += bits(answer) == bits(self.solo[index])
        if found.gap is None:
            totals.equal += 1
        else:
            totals.gaps.append(found.gap)

    async def sample_memory(self, begin: float) -> None:
        """Add one sample."""
        (found, *_) = await self.engine.collective_rpc(read_memory)
        self.memory.append({"seconds": round(time.monotonic() - begin, 1), **found})

    async def watch_memory(self, begin: float, every: float) -> None:
        """Sample until cancelled."""
        while True:
            await self.sample_memory(begin)
            await asyncio.sleep(every)

    async def run(self, tell: Callable[[str], None]) -> float:
        """Serve for the time asked for and let the last requests finish; returns the seconds."""
        begin = time.monotonic()
        until = begin + self.arguments.seconds
        watch = asyncio.create_task(self.watch_memory(begin, self.arguments.sample_every))
        clients = [
            asyncio.create_task(self.client(until)) for _ in range(self.arguments.concurrent)
        ]
        while not all(client.done() for client in clients):
            await asyncio.wait(clients, timeout=1.0)
            totals = self.totals
            tell(
                f"{totals.finished} finished, {totals.equal} equal ({totals.identical} to the "
                f"bit), {totals.aborted} aborted, "
                f"{len(totals.errors)} errors, {totals.in_flight} in flight"
            )
        watch.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watch
        for client in clients:
            client.result()
        await self.answer(
            min(range(len(self.prompts)), key=lambda i: len(self.prompts[i])), salted=True
        )
        await self.sample_memory(begin)
        await self.engine.check_health()
        return time.monotonic() - begin


def counters() -> dict[str, float]:
    """vLLM's own counts."""
    from prometheus_client import REGISTRY

    names = {
        "vllm:num_preemptions_total": "preemptions",
        "vllm:prefix_cache_queries_total": "prefix_cache_queries",
        "vllm:prefix_cache_hits_total": "prefix_cache_hits",
        "vllm:kv_cache_usage_perc": "kv_cache_usage_at_end",
        "vllm:spec_decode_num_draft_tokens_total": "drafted",
        "vllm:spec_decode_num_accepted_tokens_total": "accepted",
    }
    found: dict[str, float] = {}
    for family in REGISTRY.collect():
        for sample in family.samples:
            if sample.name in names:
                name = names[sample.name]
                found[name] = found.get(name, 0.0) + sample.value
    return found


def open_async_engine(folder: Path, arguments: argparse.Namespace) -> Any:
    """An ``AsyncLLM``, its core in a process of its own, as ``vllm serve`` runs it."""
    from sparsek_backend.eval.engine import ensure_entry_point
    from sparsek_backend.plugin import register

    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # read_memory is sent as code
    os.environ["VLLM_BATCH_INVARIANT"] = str(int(arguments.batch_invariant))
    # A forked engine would hang: the weights were made by torch's threads, which no fork survives.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    ensure_entry_point()
    register()
    from vllm import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.async_llm import AsyncLLM

    whole = arguments.longest + 64
    below = whole if arguments.attend_all else min(SETTINGS["dense_below"], arguments.longest // 4)
    options: dict[str, Any] = {"kv_cache_memory_bytes": int(arguments.kv_gib * 2**30)}
    if arguments.backend == "SPARSEK":
        options["additional_config"] = {"sparsek": SETTINGS | {"dense_below": below}}
    if arguments.speculate:  # any token that the text had before
        options["speculative_config"] = {
            "method": "ngram",
            "num_speculative_tokens": arguments.speculate,
            "prompt_lookup_min": 1,
            "prompt_lookup_max": 3,
        }
    if current_platform.is_cpu() or arguments.eager:
        options["enforce_eager"] = True
    return AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=str(folder),
            attention_backend=arguments.backend,
            dtype=arguments.dtype,
            max_model_len=whole,
            max_num_seqs=arguments.concurrent,
            max_num_batched_tokens=arguments.batched_tokens,
            gpu_memory_utilization=0.1,
            skip_tokenizer_init=True,
            enable_prefix_caching=True,
            seed=0,
            **options,
        )
    )


def parse() -> argparse.Namespace:
    """Read the command line."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--concurrent", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=96)
    parser.add_argument("--shortest", type=int, default=100)
    parser.add_argument("--longest", type=int, default=100_000)
    parser.add_argument("--aborts", type=float, default=0.15, help="share of requests")
    parser.add_argument(
        "--batch-invariant",
        action=argparse.BooleanOptionalAction,
        default=torch.cuda.is_available(),
        help="demand the solo runs' very bits; default: on a GPU",
    )
    parser.add_argument(
        "--dtype",
        choices=sorted(TIES),
        help="default: bfloat16 where the engine is batch-invariant, else float32",
    )
    parser.add_argument("--eager", action="store_true", help="no compilation, no CUDA graphs")
    parser.add_argument("--kv-gib", type=float, default=6.0, help="size of the KV cache")
    parser.add_argument("--backend", default="SPARSEK", help="vLLM's name of it")
    parser.add_argument("--attend-all", action="store_true", help="a budget over every context")
    parser.add_argument("--speculate", type=int, default=0, help="tokens drafted by n-grams")
    parser.add_argument("--answers", type=Path, help="where to write the solo answers")
    parser.add_argument("--compare", type=Path, nargs=2, help="two files of --answers; no run")
    parser.add_argument("--batched-tokens", type=int, default=8192)
    parser.add_argument("--sample-every", type=float, default=5.0, help="seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit", default="", help="to record where there is no git")
    arguments = parser.parse_args()
    for name, low in (("seconds", 1), ("concurrent", 1), ("prompts", 1), ("shortest", 1)):
        if getattr(arguments, name) < low:
            parser.error(f"--{name}: expected at least {low}, got {getattr(arguments, name)}")
    if arguments.longest < arguments.shortest:
        parser.error(f"--longest: expected at least --shortest, got {arguments.longest}")
    if arguments.dtype is None:
        arguments.dtype = "bfloat16" if arguments.batch_invariant else "float32"
    return arguments


async def shown(
    title: str, seconds: float | None, work: Callable[[Callable[[str], None]], Awaitable[Any]]
) -> Any:
    """Run ``work`` under a progress bar; without a terminal, a line now and then."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    begin = last = time.monotonic()
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=seconds)

        def tell(text: str) -> None:
            nonlocal last
            now = time.monotonic()
            progress.update(task, description=text, completed=now - begin)
            if not console.is_terminal and now - last > 15:
                last = now
                console.print(f"{now - begin:.0f} s: {text}", highlight=False)

        return await work(tell)


async def soak(folder: Path, arguments: argparse.Namespace) -> int:
    """Start the engine, serve, judge, write the result."""
    from sparsek_backend.machine import choose_device, describe_machine

    engine = open_async_engine(folder, arguments)
    try:
        one = Soak(engine, arguments)
        await engine.collective_rpc(watch_compilations)
        console.print(f"{len(one.prompts)} prompts, {sum(map(len, one.prompts))} tokens")
        await shown("solo answers", None, one.answer_alone)
        before = counters()
        seconds = await shown("serving", arguments.seconds, one.run)
        seen = counters()
        compiled = (await engine.collective_rpc(read_compilations))[0]
        for name in ("preemptions", "prefix_cache_queries", "prefix_cache_hits", *DRAFTS):
            seen[name] = seen.get(name, 0.0) - before.get(name, 0.0)
    finally:
        engine.shutdown()
    one.engine = engine = None
    gc.collect()
    memory = flatness(one.memory, arguments.seconds)
    reasons = verdict(one.totals, arguments, memory, seen, compiled)
    machine = describe_machine(choose_device(), arguments.commit)
    totals = asdict(one.totals)
    gaps = totals.pop("gaps")
    totals.pop("in_flight")
    result = {
        "passed": not reasons,
        "reasons": reasons,
        "seconds": round(seconds, 1),
        **totals,
        "solo_distance": one.solo_distance,
        "parted": len(gaps),
        "widest_gap": max(gaps, default=0.0),
        "tie": TIES[arguments.dtype],
        **seen,
        "compiled": compiled,
        "memory_bytes": memory,
        "memory_samples": one.memory[:: max(len(one.memory) // 60, 1)],
        "arguments": {
            name: value
            for name, value in vars(arguments).items()
            if name not in ("json", "commit", "answers", "compare")
        },
        "settings": SETTINGS,
        "shape": SHAPE,
        "machine": asdict(machine),
    }
    if arguments.answers is not None:
        own = {"dtype": arguments.dtype, "prompts": [len(prompt) for prompt in one.prompts]}
        own["answers"] = [asdict(answer) for answer in one.solo]
        arguments.answers.write_text(json.dumps(own) + "\n", encoding="utf-8")
    text = json.dumps(result, indent=1)
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(text + "\n", encoding="utf-8")
    short = {k: v for k, v in result.items() if k not in ("memory_samples", "settings", "shape")}
    print(json.dumps(short))
    return 0 if not reasons else 1


def main() -> int:
    """Write the model, then serve it."""
    arguments = parse()
    if arguments.compare is not None:
        return compare_backends(*arguments.compare)
    with tempfile.TemporaryDirectory(prefix="sparsek-soak-") as folder:
        model = write_llama(Path(folder), arguments.seed)
        return asyncio.run(soak(model, arguments))


if __name__ == "__main__":
    sys.exit(main())
