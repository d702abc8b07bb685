"""Prefill by one engine, decoding by another, which fetches the pages through NIXL."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.ports import hold_port
from tests.processes import ended, wait_until
from tests.vllm_backend.engines import (
    counted_forwards,
    engine,
    generate,
    pages_of_request,
    requires_cpu_vllm,
    tokens,
)
from tests.vllm_backend.tiny_models import VOCABULARY, make_tiny_model

pytestmark = [pytest.mark.engine, requires_cpu_vllm]

ROOT = Path(__file__).resolve().parents[3]
LENGTH = 500
SPARSE = {
    "dense_below": 0,
    "num_sink": 16,
    "window_size": 64,
    "sel_block_size": 32,
    "top_k": 3,
    "decode_tokens": 96,
    "query_tile": 1,
}


def test_pages_of_another_engine(
    registered: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bits, and the tokens of one engine that does both."""
    pytest.importorskip("nixl", reason="NIXL is not installed")
    from vllm.config import KVTransferConfig

    folder = tmp_path / "job"
    folder.mkdir()
    model = make_tiny_model("llama", tmp_path)
    options = {
        "max_model_len": 600,
        "max_num_batched_tokens": 600,
        "num_gpu_blocks_override": 40,
        "skip_tokenizer_init": True,
        "disable_log_stats": False,
    }
    transfer = {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        "kv_buffer_device": "cpu",
        "kv_load_failure_policy": "fail",
    }
    generator = torch.Generator().manual_seed(7)
    prompt = torch.randint(3, VOCABULARY, (LENGTH,), generator=generator).tolist()
    job = {"model": str(model), "settings": SPARSE, "options": options}
    job |= {"transfer": transfer, "prompt": prompt}
    path = folder / "job.json"
    path.write_text(json.dumps(job), encoding="utf-8")
    with engine(model, "SPARSEK", SPARSE, **options) as alone:
        expected = tokens(generate(alone, [prompt], together=False))
    with hold_port() as ours, hold_port() as theirs, (folder / "log").open("w") as log:
        monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1")
        monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(theirs.getsockname()[1]))
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.vllm_backend.prefiller", str(path)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(ours.getsockname()[1]))
        config = KVTransferConfig(**transfer)
        with (
            ended(process),
            engine(model, "SPARSEK", SPARSE, kv_transfer_config=config, **options) as other,
        ):
            told = folder / "transfer.json"

            def ready() -> bool:
                assert process.poll() is None, (folder / "log").read_text()[-3000:]
                return told.exists() and "ready" in (folder / "log").read_text()

            wait_until(ready)
            params = json.loads(told.read_text(encoding="utf-8"))
            with counted_forwards() as calls:
                answer, fetched = pages_of_request(
                    other, prompt, extra_args={"kv_transfer_params": params}
                )
            counts = {metric.name: getattr(metric, "value", None) for metric in other.get_metrics()}
    assert set(calls) == {"SPARSEK"}
    assert tokens([answer]) == expected
    assert counts["vllm:external_prefix_cache_hits"] >= LENGTH - 1
    for before, after in zip(torch.load(folder / "pages.pt"), fetched, strict=True):
        assert torch.equal(before, after)
