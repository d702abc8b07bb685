"""Worker of `served_layer.py`: one backend serves, and its kernels are noted."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import benchmarks.random_weights  # noqa: F401 - the engine finds its loader
from benchmarks.long_prompts_worker import ANSWER, answer
from sparsek_backend.bench.serve_worker import Bench
from sparsek_backend.eval.engine import close_engine, ensure_entry_point, open_engine
from sparsek_backend.eval.workers import report_progress, serve_job

SHORT = 500
"""Tokens of the prompt that both backends attend whole."""
WARM, TIMED, NOTED = 40, 64, 6
"""Steps before anything is measured, those that are timed, and those whose kernels are noted."""


class Profiled:
    """An engine of this process, whose steps are timed and looked into.

    Args:
        llm: the engine.
        tokens: of an answer; requests that decode have more to come when all is measured.
    """

    def __init__(self, llm: Any, tokens: int) -> None:
        self.engine = llm.llm_engine
        self.tokens = tokens
        self.sent = 0

    def send(self, prompts: list[list[int]]) -> None:
        """Requests whose prompts the next steps compute, or find in the cache."""
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0.0, max_tokens=self.tokens, ignore_eos=True, detokenize=False
        )
        for prompt in prompts:
            self.engine.add_request(f"profiled-{self.sent}", {"prompt_token_ids": prompt}, params)
            self.sent += 1

    def step(self, count: int) -> float:
        """Milliseconds of each of so many steps."""
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(count):
            self.engine.step()
        torch.cuda.synchronize()
        return (time.perf_counter() - begin) / max(count, 1) * 1e3

    def noted(self, count: int) -> list[tuple[str, float, float]]:
        """Name, begin and microseconds of each kernel of so many steps."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            self.step(count)
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder, "trace.json")
            profile.export_chrome_trace(str(trace))
            events = json.loads(trace.read_text())["traceEvents"]
        kernels = [
            (event["name"][:60], event["ts"], event["dur"])
            for event in events
            if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
        ]
        return sorted(kernels, key=lambda kernel: kernel[1])

    def finish(self) -> None:
        """Serve every request to its end."""
        while self.engine.has_unfinished_requests():
            self.engine.step()

    def prompt(self, prompt: list[int], chunk: int) -> dict[str, Any]:
        """The last whole chunk of a prompt."""
        self.send([prompt])
        self.step(max(len(prompt) // chunk - 1, 0))
        kernels = self.noted(1)
        self.finish()
        return {"phase": "prompt", "new_tokens": min(chunk, len(prompt)), "kernels": kernels}

    def decode(self, prompts: list[list[int]]) -> dict[str, Any]:
        """Steps in which requests decode together; their prompts are cached."""
        self.send(prompts)
        self.step(WARM)
        step_ms = round(self.step(TIMED), 4)
        kernels = self.noted(NOTED)
        self.finish()
        return {"phase": "decode", "step_ms": step_ms, "kernels": kernels}


def work(job: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to a short prompt, and every context's steps."""
    ensure_entry_point()
    requests = job["requests"]
    llm = open_engine(
        job["model"],
        settings=job["settings"],
        baseline=job["baseline"],
        in_process=True,
        max_model_len=max(job["contexts"]) + 512,
        max_num_seqs=max(8, requests),
        skip_tokenizer_init=True,
        load_format="random",
        gpu_memory_utilization=job["gpu_memory_utilization"],
    )
    report_progress("engine ready")
    try:
        bench = Bench(llm, llm.llm_engine.vllm_config.model_config.get_vocab_size(), seed=0)
        found = answer(bench.generate([bench.prompt(SHORT)], ANSWER, logprobs=1)[0])
        chunk = llm.llm_engine.vllm_config.scheduler_config.max_num_batched_tokens
        profiled = Profiled(llm, WARM + TIMED + NOTED + requests + 32)
        cases = []
        for context in job["contexts"]:
            prompts = [bench.prompt(context) for _ in range(requests)]
            cases.append({"context": context, **profiled.prompt(prompts[0], chunk)})
            bench.generate(prompts, 1)  # so that their keys are cached, and all decode at once
            cases.append({"context": context, **profiled.decode(prompts)})
            report_progress(f"{requests} x {context}: {cases[-1]['step_ms']} ms a step")
        return {**found, "cases": cases}
    finally:
        close_engine(llm)


if __name__ == "__main__":
    serve_job(work)
