"""Worker of `sparsek eval`: scores one budget in a process of its own."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sparsek_backend.eval.engine import LocalScorer, backend_report, close_engine, open_engine
from sparsek_backend.eval.job import Job
from sparsek_backend.eval.tasks import Scorer, pick_texts, read_texts, run_passkey, run_perplexity
from sparsek_backend.eval.workers import report_progress, serve_job


def score(scorer: Scorer, job: Job, progress: Any) -> dict[str, Any]:
    """Run the job's tasks; the scores as JSON, and how long they took."""
    texts = read_texts(Path(job.texts_folder))
    begin = time.perf_counter()
    perplexity, passkey = [], []
    if job.num_texts:
        picked = pick_texts(texts, scorer, length=job.length, count=job.num_texts)
        perplexity = run_perplexity(scorer, picked, progress)
    if job.passkey_lengths:
        passkey = run_passkey(
            scorer,
            texts,
            lengths=job.passkey_lengths,
            depths=job.passkey_depths,
            seed=job.seed,
            progress=progress,
        )
    return {
        "perplexity": [asdict(entry) for entry in perplexity],
        "passkey": [asdict(entry) for entry in passkey],
        "seconds": time.perf_counter() - begin,
    }


def work(data: Mapping[str, Any]) -> dict[str, Any]:
    """Open the engine of one budget and score it."""
    job = Job(**data["job"])
    settings = data["settings"]
    engine = open_engine(
        data["model"],
        settings=settings,
        max_model_len=job.longest_request(),
        max_num_seqs=1,
        dtype=data["dtype"],
        max_num_batched_tokens=2048,
        **data["engine"],
    )
    report_progress("engine ready")
    try:
        scores = score(LocalScorer(engine), job, report_progress)
        return {**scores, "backend": backend_report(settings)}
    finally:
        close_engine(engine)


if __name__ == "__main__":
    serve_job(work)
