"""Worker of `sparsek bench serve`: one backend's engine in a process of its own.

TTFT: one request of fresh random tokens at a time, from its arrival to its first token.
TPOT: the requests of a case together, their prompts in the prefix cache already, so that all of
them decode at once; per request (last - first token) / (tokens - 1).
"""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from operator import sub
from pathlib import Path
from typing import Any

from sparsek_backend.eval.engine import close_engine, ensure_entry_point, open_engine
from sparsek_backend.eval.record import append_rows
from sparsek_backend.eval.workers import report_progress, serve_job

FIRST_TOKEN_ID = 100
"""Prompts draw token ids from here on: the lowest are special tokens."""


def read_stats(_worker: Any) -> tuple[int, float]:
    """Runs in vLLM's worker process: forward calls and attended share of our backend there."""
    from sparsek_backend.vllm_backend.stats import STATS

    return STATS.forward_calls, STATS.attended_share


def read_keys(_worker: Any) -> tuple[int, int, int]:
    """Runs in vLLM's worker process: forward calls, keys attended and keys of the contexts."""
    from sparsek_backend.vllm_backend.stats import STATS

    return STATS.forward_calls, sum(STATS.attended), sum(STATS.context)


def checked_share(found: Sequence[tuple[int, float]]) -> float:
    """The attended share of what :func:`read_stats` found in vLLM's workers."""
    calls, share = found[0]
    if not calls:
        raise RuntimeError("SPARSEK was chosen, but its forward never ran")
    return share


def open_measured(job: Mapping[str, Any], **arguments: Any) -> Any:
    """The engine of a job, with processes of its own as a server's."""
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # read_stats is sent by reference
    ensure_entry_point()
    return open_engine(
        job["model"],
        settings=job["settings"],
        baseline=job["baseline"],
        in_process=False,
        skip_tokenizer_init=True,
        **arguments,
        **job["engine"],
    )


def cache_tokens(vllm_config: Any) -> int:
    """Tokens of an engine's KV cache."""
    cache = vllm_config.cache_config
    return int(cache.num_gpu_blocks or 0) * int(cache.block_size)


class Bench:
    """One engine and its measurements."""

    def __init__(self, engine: Any, vocab_size: int, seed: int) -> None:
        self._engine = engine
        self._vocab_size = vocab_size
        self._random = random.Random(seed)

    def prompt(self, length: int) -> list[int]:
        """Random token ids that no earlier prompt shares a page with."""
        return self._random.choices(range(FIRST_TOKEN_ID, self._vocab_size), k=length)

    def generate(
        self, prompts: list[list[int]], max_tokens: int, logprobs: int | None = None
    ) -> list[Any]:
        """Requests sent together; their finished outputs, with so many log-probabilities."""
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=logprobs,
        )
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs: list[Any] = self._engine.generate(requests, params, use_tqdm=False)
        return outputs

    def ttft(self, length: int) -> float:
        """Seconds to the first token of one fresh prompt."""
        output = self.generate([self.prompt(length)], 1)[0]
        return float(output.metrics.first_token_latency)

    def tpot(self, prompts: list[list[int]], max_tokens: int) -> list[float]:
        """Seconds per output token of each request, all decoding together."""
        found = [output.metrics for output in self.generate(prompts, max_tokens)]
        return [(x.last_token_ts - x.first_token_ts) / (max_tokens - 1) for x in found]


def work(job: Mapping[str, Any]) -> None:
    """Measure the cases that are left, and append each to the job's file as it ends."""
    cases = job["cases"]
    longest = max(case["context"] for case in cases) + job["output_tokens"]
    together = max(8, *(case["requests"] for case in cases))
    engine = open_measured(job, max_model_len=longest, max_num_seqs=together)
    report_progress("engine ready")
    try:
        config = engine.llm_engine.vllm_config
        capacity = cache_tokens(config)
        bench = Bench(engine, config.model_config.get_vocab_size(), job["seed"])
        about = {"backend": job["backend"], "round": job["round"], "kv_cache_tokens": capacity}
        before = (0, 0, 0)
        for case in job["left"]:
            line = {**about, **_measure(bench, case, job, capacity), "attended_share": 1.0}
            if job["settings"] is not None:
                now = engine.collective_rpc(read_keys)[0]
                calls, attended, context = map(sub, now, before)
                line["attended_share"] = checked_share([(calls, attended / max(1, context))])
                before = now
            append_rows(Path(job["path"]), [line])
    finally:
        close_engine(engine)


def _measure(
    bench: Bench, case: Mapping[str, Any], job: Mapping[str, Any], capacity: int
) -> dict[str, Any]:
    context, requests, tokens = case["context"], case["requests"], job["output_tokens"]
    label = f"{requests} x {context}"
    needed = requests * (context + tokens)
    if needed > capacity:
        raise RuntimeError(
            f"{label}: its requests need {needed} tokens of KV cache, the engine has {capacity}; "
            "ask for fewer requests, or more memory with --gpu-memory"
        )
    bench.generate([bench.prompt(context)], 2)
    report_progress(f"{label}: warm")
    ttft = []
    for _ in range(job["repeats"]):
        ttft.append(bench.ttft(context))
        report_progress(f"{label}: first token after {ttft[-1]:.3f} s")
    prompts = [bench.prompt(context) for _ in range(requests)]
    bench.generate(prompts, 4)
    tpot: list[float] = []
    for _ in range(job["repeats"]):
        tpot += bench.tpot(prompts, tokens)
        report_progress(f"{label}: {1e3 * tpot[-1]:.2f} ms per token")
    return {"context": context, "requests": requests, "ttft_s": ttft, "tpot_s": tpot}


if __name__ == "__main__":
    serve_job(work)
