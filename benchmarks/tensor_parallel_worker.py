"""Worker of tensor_parallel.py: greedy answers of one engine, in a process of its own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from random_llama import Answer, random_prompts

from sparsek_backend.bench.serve_worker import read_stats
from sparsek_backend.eval.engine import close_engine, ensure_entry_point, open_engine
from sparsek_backend.eval.workers import report_progress, serve_job


def work(job: Mapping[str, Any]) -> dict[str, Any]:
    """Answer every prompt, all of them together."""
    from vllm import SamplingParams

    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # read_stats is sent by reference
    ensure_entry_point()
    prompts = random_prompts(job["lengths"], job["seed"])
    engine = open_engine(
        job["model"],
        settings=job["settings"],
        in_process=False,
        max_model_len=max(job["lengths"]) + job["output_tokens"],
        max_num_seqs=8,
        skip_tokenizer_init=True,
        **job["engine"],
    )
    report_progress("engine ready")
    try:
        params = SamplingParams(
            temperature=0.0,
            max_tokens=job["output_tokens"],
            ignore_eos=True,
            detokenize=False,
            logprobs=5,
        )
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = engine.generate(requests, params, use_tqdm=False)
        ranks = engine.collective_rpc(read_stats)
        if not all(forward_calls for forward_calls, _ in ranks):
            raise RuntimeError(f"SPARSEK did not run on every rank: {ranks}")
        return {
            "answers": [asdict(Answer.of(output)) for output in outputs],
            "attended_share": ranks[0][1],
            "ranks": len(ranks),
        }
    finally:
        close_engine(engine)


if __name__ == "__main__":
    serve_job(work)
