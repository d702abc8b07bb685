"""An engine in a process of its own that computes a prompt's pages for another one to fetch.

``python -m tests.vllm_backend.prefiller JOB.json`` writes ``transfer.json``, what the other engine
is told, and ``pages.pt``, K, V and summaries, beside the job; it ends with its standard input.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from tests.vllm_backend.engines import engine, pages_of_request


def main() -> None:
    """Serve one prompt, then wait."""
    from vllm.config import KVTransferConfig

    from sparsek_backend.plugin import register

    register()
    path = Path(sys.argv[1])
    job = json.loads(path.read_text(encoding="utf-8"))
    transfer = KVTransferConfig(**job["transfer"])
    options = {**job["options"], "kv_transfer_config": transfer}
    with engine(Path(job["model"]), "SPARSEK", job["settings"], **options) as llm:
        asked = {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}
        answer, pages = pages_of_request(llm, job["prompt"], max_tokens=1, extra_args=asked)
        torch.save(pages, path.with_name("pages.pt"))
        told = json.dumps(answer.kv_transfer_params)
        path.with_name("transfer.json").write_text(told, encoding="utf-8")
        print("ready", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
