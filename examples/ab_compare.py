"""Dense and sparse attention on one set of prompts: which answers differ, and how fast each is.

    python examples/ab_compare.py MODEL prompts.txt --top-k 16

One prompt a line. For a verdict with statistics use `sparsek eval`; this is for looking at answers.
Without a GPU add `--cpu`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Run:
    """Answers of one setting, and the seconds that they took together."""

    answers: list[str]
    seconds: float


def answer(
    model: str, settings: dict[str, Any], prompts: list[str], max_tokens: int, cpu: bool
) -> Run:
    """Answer the prompts in this process, which then gives its memory back by ending."""
    from vllm import LLM, SamplingParams

    on_cpu = {"enforce_eager": True, "gpu_memory_utilization": 0.5} if cpu else {}
    config = {"sparsek": settings}
    llm = LLM(model, attention_backend="SPARSEK", additional_config=config, **on_cpu)
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens)
    llm.generate(prompts[:1], sampling)  # warm
    began = time.perf_counter()
    outputs = llm.generate(prompts, sampling)
    seconds = time.perf_counter() - began
    llm.llm_engine.engine_core.shutdown()  # else this process waits for the engine's at its end
    return Run([output.outputs[0].text for output in outputs], seconds)


def main() -> None:
    """Answer with both, and print what differs."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--top-k", type=int, default=32, help="blocks that a query selects")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--cpu", action="store_true", help="no compilation, half of the memory")
    options = parser.parse_args()
    prompts = [line for line in options.prompts.read_text().splitlines() if line]

    settings = {"dense": {"mode": "dense"}, "sparse": {"top_k": options.top_k, "dense_below": 0}}
    runs = {}
    for name, chosen in settings.items():
        # An engine a process, of a kind that may start processes of its own, as vLLM does.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            asked = (options.model, chosen, prompts, options.max_tokens, options.cpu)
            runs[name] = pool.submit(answer, *asked).result()

    differ = 0
    pairs = zip(prompts, runs["dense"].answers, runs["sparse"].answers, strict=True)
    for prompt, dense, sparse in pairs:
        if dense != sparse:
            differ += 1
            print(f"--- ...{prompt[-80:]}\ndense:  {dense!r}\nsparse: {sparse!r}")
    print(f"{differ} of {len(prompts)} answers differ")
    for name, run in runs.items():
        print(f"{name}: {run.seconds:.2f} s")


if __name__ == "__main__":
    main()
