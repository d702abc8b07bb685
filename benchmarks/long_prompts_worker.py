"""Worker of `long_prompts.py`: one backend's engine in a process of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.random_weights import EXTENSION
from sparsek_backend.bench.serve_worker import Bench, checked_share, open_measured, read_stats
from sparsek_backend.eval.engine import close_engine
from sparsek_backend.eval.workers import report_progress, serve_job

ANSWER, LONG_ANSWER, SHORT_PROMPT = 16, 128, 4000
"""Tokens: of an answer, of one that is timed, and of a prompt that is attended whole."""


def answer(output: Any) -> dict[str, Any]:
    """Generated token ids and the log-probability of each."""
    (one,) = output.outputs
    tokens = list(one.token_ids)
    chosen = [step[token].logprob for token, step in zip(tokens, one.logprobs, strict=True)]
    return {"tokens": tokens, "logprobs": chosen}


def offload(bench: Bench, job: Mapping[str, Any]) -> dict[str, Any]:
    """Seconds to the first token of one prompt in three ways, and the answers."""
    bench.generate([bench.prompt(job["context"] // 8)], 2)
    first, other = bench.prompt(job["context"]), bench.prompt(job["context"])
    found: dict[str, Any] = {}
    steps = (("computed", first), ("cached", first), ("evicting", other), ("loaded", first))
    for name, prompt in steps:
        output = bench.generate([prompt], ANSWER, logprobs=1)[0]
        seconds = float(output.metrics.first_token_latency)
        report_progress(f"{name}: first token after {seconds:.3f} s")
        found[name] = {
            "ttft_s": seconds,
            "cached_tokens": output.num_cached_tokens,
            **answer(output),
        }
    return found


def ngrams(bench: Bench, job: Mapping[str, Any]) -> dict[str, Any]:
    """Seconds per output token of one request whose prompt is cached, and its answer."""
    passage = bench.prompt(job["context"] // 64)
    prompt = passage * 64
    found = answer(bench.generate([prompt], LONG_ANSWER, logprobs=1)[0])
    times = []
    for _ in range(job["repeats"]):
        times += bench.tpot([prompt], LONG_ANSWER)
        report_progress(f"{1e3 * times[-1]:.2f} ms per token")
    return {"tpot_s": times, **found}


def hybrid(bench: Bench, job: Mapping[str, Any]) -> dict[str, Any]:
    """Seconds to the first and per output token, and the answer to a short prompt."""
    short = bench.prompt(min(SHORT_PROMPT, job["context"]))
    found = answer(bench.generate([short], ANSWER, logprobs=1)[0])
    times = []
    for _ in range(job["repeats"]):
        times.append(bench.ttft(job["context"]))
        report_progress(f"first token after {times[-1]:.3f} s")
    prompt = bench.prompt(job["context"])
    bench.generate([prompt], 2)
    tpot = bench.tpot([prompt], LONG_ANSWER)
    report_progress(f"{1e3 * tpot[0]:.2f} ms per token")
    return {"ttft_s": times, "tpot_s": tpot, **found}


STUDIES = {"offload": offload, "ngrams": ngrams, "hybrid": hybrid}


def work(job: Mapping[str, Any]) -> dict[str, Any]:
    """One engine's measurements."""
    arguments: dict[str, Any] = {}
    if job["offload_bytes"]:
        from vllm.config import KVTransferConfig

        arguments["kv_transfer_config"] = KVTransferConfig(
            kv_connector="OffloadingConnector",
            kv_role="kv_both",
            kv_connector_extra_config={"cpu_bytes_to_use": job["offload_bytes"]},
        )
    engine = open_measured(
        job,
        max_model_len=job["context"] + LONG_ANSWER,
        max_num_seqs=8,
        load_format="random",
        worker_extension_cls=EXTENSION,
        model_loader_extra_config=job["weights"],
        **arguments,
    )
    report_progress("engine ready")
    try:
        vocabulary = engine.llm_engine.vllm_config.model_config.get_vocab_size()
        found = STUDIES[job["study"]](Bench(engine, vocabulary, seed=0), job)
        if job["settings"] is not None:
            found["attended_share"] = checked_share(engine.collective_rpc(read_stats))
        return found
    finally:
        close_engine(engine)


if __name__ == "__main__":
    serve_job(work)
