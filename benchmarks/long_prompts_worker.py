"""Worker of `long_prompts.py`: one backend's engine in a process of its own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from sparsek_backend.bench.serve_worker import Bench, read_stats
from sparsek_backend.eval.engine import close_engine, ensure_entry_point, open_engine
from sparsek_backend.eval.workers import report_progress, serve_job
from sparsek_backend.vllm_backend.names import BACKEND_NAME

ANSWER, LONG_ANSWER, SHORT_PROMPT = 16, 128, 4000
"""Tokens: of an answer, of one that is timed, and of a prompt that is attended whole."""


def tokens_of(output: Any) -> list[int]:
    """Generated token ids."""
    return list(output.outputs[0].token_ids)


def offload(bench: Bench, job: Mapping[str, Any]) -> dict[str, Any]:
    """Seconds to the first token, computed and loaded, and both answers."""
    bench.generate([bench.prompt(job["context"] // 8)], 2)
    first, other = bench.prompt(job["context"]), bench.prompt(job["context"])
    found: dict[str, Any] = {}
    for name, prompt in (("computed", first), ("evicting", other), ("loaded", first)):
        output = bench.generate([prompt], ANSWER)[0]
        seconds = float(output.metrics.first_token_latency)
        report_progress(f"{name}: first token after {seconds:.3f} s")
        found[name] = {
            "ttft_s": seconds,
            "cached_tokens": output.num_cached_tokens,
            "tokens": tokens_of(output),
        }
    return found


def ngrams(bench: Bench, job: Mapping[str, Any]) -> dict[str, Any]:
    """Seconds per output token of one request whose prompt is cached, and its tokens."""
    passage = bench.prompt(job["context"] // 64)
    prompt = passage * 64
    answer = tokens_of(bench.generate([prompt], LONG_ANSWER)[0])
    times = []
    for _ in range(job["repeats"]):
        times += bench.tpot([prompt], LONG_ANSWER)
        report_progress(f"{1e3 * times[-1]:.2f} ms per token")
    return {"tpot_s": times, "tokens": answer}


def hybrid(bench: Bench, job: Mapping[str, Any]) -> dict[str, Any]:
    """Seconds to the first and per output token, and log-probabilities after a short prompt."""
    short = bench.prompt(min(SHORT_PROMPT, job["context"]))
    first = bench.generate([short], ANSWER, logprobs=1)[0].outputs[0]
    chosen = [
        step[token].logprob for token, step in zip(first.token_ids, first.logprobs, strict=True)
    ]
    times = []
    for _ in range(job["repeats"]):
        times.append(bench.ttft(job["context"]))
        report_progress(f"first token after {times[-1]:.3f} s")
    prompt = bench.prompt(job["context"])
    bench.generate([prompt], 2)
    tpot = bench.tpot([prompt], LONG_ANSWER)
    report_progress(f"{1e3 * tpot[0]:.2f} ms per token")
    return {"ttft_s": times, "tpot_s": tpot, "tokens": list(first.token_ids), "logprobs": chosen}


STUDIES = {"offload": offload, "ngrams": ngrams, "hybrid": hybrid}


def work(job: Mapping[str, Any]) -> dict[str, Any]:
    """One engine's measurements."""
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # read_stats is sent by reference
    ensure_entry_point()
    arguments = dict(job["engine"])
    if job["offload_bytes"]:
        from vllm.config import KVTransferConfig

        arguments["kv_transfer_config"] = KVTransferConfig(
            kv_connector="OffloadingConnector",
            kv_role="kv_both",
            kv_connector_extra_config={"cpu_bytes_to_use": job["offload_bytes"]},
        )
    engine = open_engine(
        job["model"],
        settings=job["settings"],
        baseline=job["baseline"],
        in_process=False,
        max_model_len=job["context"] + LONG_ANSWER,
        max_num_seqs=8,
        skip_tokenizer_init=True,
        load_format="dummy",
        **arguments,
    )
    report_progress("engine ready")
    try:
        vocabulary = engine.llm_engine.vllm_config.model_config.get_vocab_size()
        found = STUDIES[job["study"]](Bench(engine, vocabulary, seed=0), job)
        if job["settings"] is not None:
            calls, found["attended_share"] = engine.collective_rpc(read_stats)[0]
            if not calls:
                raise RuntimeError(f"{BACKEND_NAME} was chosen, but its forward never ran")
        return found
    finally:
        close_engine(engine)


if __name__ == "__main__":
    serve_job(work)
