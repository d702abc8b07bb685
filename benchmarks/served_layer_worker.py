"""Worker of `served_layer.py`: one backend decodes, and its kernels are noted."""

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


def decode(llm: Any, prompts: list[list[int]]) -> dict[str, Any]:
    """Milliseconds of a step in which all requests decode, and the kernels of some steps."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    tokens = WARM + TIMED + NOTED + len(prompts) + 32
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    for number, prompt in enumerate(prompts):
        engine.add_request(f"{time.monotonic_ns()}-{number}", {"prompt_token_ids": prompt}, params)
    for _ in range(WARM):
        engine.step()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(TIMED):
        engine.step()
    torch.cuda.synchronize()
    step_ms = (time.perf_counter() - begin) / TIMED * 1e3
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(NOTED):
            engine.step()
        torch.cuda.synchronize()
    while engine.has_unfinished_requests():
        engine.step()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        profile.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    kernels = [
        (event["name"][:60], event["ts"], event["dur"])
        for event in events
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]
    return {"step_ms": round(step_ms, 4), "kernels": sorted(kernels, key=lambda one: one[1])}


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
        cases = []
        for context in job["contexts"]:
            prompts = [bench.prompt(context) for _ in range(requests)]
            bench.generate(prompts, 1)  # so that their keys are cached, and all decode at once
            cases.append({"context": context, **decode(llm, prompts)})
            report_progress(f"{requests} x {context}: {cases[-1]['step_ms']} ms a step")
        return {**found, "cases": cases}
    finally:
        close_engine(llm)


if __name__ == "__main__":
    serve_job(work)
