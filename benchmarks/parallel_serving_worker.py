"""Worker of parallel_serving.py: greedy answers of one engine, in a process of its own."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from random_llama import Answer, random_prompts

from sparsek_backend.bench.load_worker import open_server
from sparsek_backend.bench.serve_worker import read_stats
from sparsek_backend.eval.engine import ensure_entry_point, open_engine
from sparsek_backend.eval.workers import report_progress, serve_job

AGAIN = 8
"""The longest prompts, which are asked again: then they are in the prefix cache."""


def work(job: Mapping[str, Any]) -> dict[str, Any]:
    """Answer every prompt, all of them together, then the longest once more."""
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # read_stats is sent by reference
    ensure_entry_point()
    return asyncio.run(answer_all(job))


async def answer_all(job: Mapping[str, Any]) -> dict[str, Any]:
    """The answers, and what shows how they came about."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.metrics.reader import get_metrics_snapshot

    engine = open_engine(
        job["model"],
        settings=job["settings"],
        in_process=False,
        create=open_server,
        max_model_len=max(job["lengths"]) + job["output_tokens"],
        max_num_seqs=8,
        skip_tokenizer_init=True,
        **job["engine"],
    )
    params = SamplingParams(
        temperature=0.0,
        max_tokens=job["output_tokens"],
        ignore_eos=True,
        detokenize=False,
        logprobs=5,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    engines = job["engine"].get("data_parallel_size", 1)

    async def ask(name: str, index: int, prompt: list[int]) -> Any:
        request, rank = {"prompt_token_ids": prompt}, index % engines if engines > 1 else None
        async for output in engine.generate(request, params, name, data_parallel_rank=rank):
            return output
        raise RuntimeError(f"request {name}: the engine gave no answer")

    try:
        report_progress("engine ready")
        prompts = list(enumerate(random_prompts(job["lengths"], job["seed"])))
        outputs = await asyncio.gather(*(ask(f"{i}", i, prompt) for i, prompt in prompts))
        again = await asyncio.gather(*(ask(f"{i} again", i, x) for i, x in prompts[-AGAIN:]))
        ranks = await engine.collective_rpc(read_stats)  # of the first of several engines
        if not all(forward_calls for forward_calls, _ in ranks):
            raise RuntimeError(f"SPARSEK did not run on every rank: {ranks}")
        counts = {
            "vllm:spec_decode_num_draft_tokens": 0.0,
            "vllm:spec_decode_num_accepted_tokens": 0.0,
        }
        for metric in get_metrics_snapshot():
            if metric.name in counts:
                counts[metric.name] += metric.value
        drafted, accepted = counts.values()
        if ("speculative_config" in job["engine"]) != (drafted > 0):
            raise RuntimeError(f"the draft model proposed {drafted:g} tokens")
        return {
            "answers": [asdict(Answer.of(output)) for output in (*outputs, *again)],
            "cached_tokens": sum(output.num_cached_tokens or 0 for output in again),
            "asked_again_tokens": sum(len(output.prompt_token_ids) for output in again),
            "draft_tokens": drafted,
            "accepted_tokens": accepted,
            "attended_share": ranks[0][1],
            "ranks": len(ranks) * engines,
        }
    finally:
        engine.shutdown()


if __name__ == "__main__":
    serve_job(work)
