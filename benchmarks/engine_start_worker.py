"""Worker of `engine_start.py`: one engine's start, its answers, and what Triton compiles later."""

from __future__ import annotations

import math
import os
import random
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import benchmarks.random_weights  # noqa: F401 - workers of the engine find its loader
from benchmarks.long_prompts_worker import ANSWER, answer
from sparsek_backend.bench.serve_worker import Bench, checked_share, open_measured, read_stats
from sparsek_backend.eval.engine import close_engine
from sparsek_backend.eval.workers import report_progress, serve_job

EXTENSION = "benchmarks.engine_start_worker.Extension"
SHORT, LONGEST_ANSWER, MOST_TOGETHER = 500, 48, 64
"""Tokens of the prompt that is attended whole, and of an answer under load; requests together."""
_PART = re.compile(r"\b(?:took|takes|finished in|ready)\b.*\d")
"""Lines of vLLM's log that say how long a part of the start took."""
_compiled: list[list[Any]] = []


class Extension:
    """Methods of vLLM's worker that count what Triton compiles in its process."""

    def watch_compilations(self) -> None:
        """Count from now on."""
        from triton import knobs

        _compiled.clear()
        knobs.compilation.listener = _note

    def compilations(self) -> list[list[Any]]:
        """Module and name of each kernel since, and whether Triton's cache on disk had it."""
        return _compiled


def _note(*, src: Any, metadata: Mapping[str, Any], cache_hit: bool, **_: Any) -> None:
    module = getattr(getattr(src, "fn", None), "module", "")
    _compiled.append([str(module), str(metadata.get("name", "")), bool(cache_hit)])


@contextmanager
def said() -> Iterator[list[str]]:
    """The lines that this process and its children write meanwhile; they are written on after."""
    lines: list[str] = []
    sys.stdout.flush()
    kept = [os.dup(descriptor) for descriptor in (1, 2)]
    with tempfile.TemporaryFile("w+", errors="replace") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
        try:
            yield lines
        finally:
            sys.stdout.flush()
            for descriptor, old in zip((1, 2), kept, strict=True):
                os.dup2(old, descriptor)
                os.close(old)
            with open(f"/proc/self/fd/{file.fileno()}", errors="replace") as copy:
                lines += copy.read().splitlines()
            print("\n".join(lines), flush=True)


def load(bench: Bench, longest: int, tokens: int) -> int:
    """Send steps of requests of every length until ``tokens`` tokens were asked; returns how many.

    Lengths are drawn evenly by their logarithm, numbers of requests too, but for the tokens of a
    step, which are at most an eighth of all (or one request's).
    """
    chance, sent, requests = random.Random(0), 0, 0
    while sent < tokens:
        together = round(math.exp(chance.uniform(0, math.log(MOST_TOGETHER))))
        lengths = [
            round(math.exp(chance.uniform(0, math.log(longest - LONGEST_ANSWER))))
            for _ in range(together)
        ]
        while len(lengths) > 1 and sum(lengths) > tokens // 8:
            lengths.pop()
        bench.generate(
            [bench.prompt(length) for length in lengths], chance.randint(1, LONGEST_ANSWER)
        )
        sent, requests = sent + sum(lengths), requests + len(lengths)
        report_progress(f"{requests} requests, {sent} tokens")
    return requests


def work(job: Mapping[str, Any]) -> dict[str, Any]:
    """Seconds until the engine is there, its answer, and what was compiled under load."""
    begin = time.perf_counter()
    with said() as lines:
        engine = open_measured(job, load_format="random", worker_extension_cls=EXTENSION)
    found: dict[str, Any] = {
        "start_s": time.perf_counter() - begin,
        "parts": [line for line in lines if _PART.search(line)],
    }
    report_progress(f"started in {found['start_s']:.1f} s")
    try:
        engine.collective_rpc("watch_compilations")
        vocabulary = engine.llm_engine.vllm_config.model_config.get_vocab_size()
        bench = Bench(engine, vocabulary, seed=0)
        longest = job["engine"]["max_model_len"]
        prompt = bench.prompt(min(SHORT, longest - ANSWER))
        found |= answer(bench.generate([prompt], ANSWER, logprobs=1)[0])
        if job["load_tokens"]:
            found["requests"] = load(bench, longest, job["load_tokens"])
            found["compiled"] = engine.collective_rpc("compilations")[0]
        if job["settings"] is not None:
            found["attended_share"] = checked_share(engine.collective_rpc(read_stats))
        return found
    finally:
        close_engine(engine)


if __name__ == "__main__":
    serve_job(work)
