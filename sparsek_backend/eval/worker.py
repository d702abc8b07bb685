"""Worker of `sparsek eval`: scores one budget in a process of its own."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sparsek_backend.eval.engine import (
    LocalScorer,
    backend_report,
    close_engine,
    open_scoring_engine,
)
from sparsek_backend.eval.job import pending, score
from sparsek_backend.eval.prompt_file import load_prompts
from sparsek_backend.eval.record import append_rows
from sparsek_backend.eval.tokenizer import HubTokenizer
from sparsek_backend.eval.workers import report_progress, serve_job
from sparsek_backend.machine import choose_device, describe_machine


def work(data: Mapping[str, Any]) -> dict[str, Any]:
    """Open the engine of one budget and score what its record lacks."""
    prompts = load_prompts(Path(data["prompts"]))
    record, settings = Path(data["record"]), data["settings"]
    missing = pending(prompts, record, data["run"])
    engine = open_scoring_engine(
        data["model"], settings=settings, max_model_len=prompts.longest_request, **data["engine"]
    )
    report_progress("0 the engine is ready")
    row = {"kind": "run", "run": data["run"], **data["about"]}
    row["machine"] = asdict(describe_machine(choose_device(), data["commit"]))
    append_rows(record, [row])
    begin = time.perf_counter()
    try:
        score(
            LocalScorer(engine, _decoder(data["model"])),
            missing,
            record=record,
            run=data["run"],
            batch=data["batch"],
            on_progress=lambda count, what: report_progress(f"{count} {what}"),
        )
        row["backend"] = backend_report(settings)
        row["seconds"] = time.perf_counter() - begin
        append_rows(record, [row])
        return {}
    finally:
        close_engine(engine)


def _decoder(model: str) -> Any:
    """Token ids to text, ``None`` where the model comes without a tokenizer."""
    try:
        return HubTokenizer(model).decode
    except ValueError:
        return None


if __name__ == "__main__":
    serve_job(work)
