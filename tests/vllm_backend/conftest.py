"""Fixtures of the vLLM tests: the environment of engines on CPU, the small real model, texts."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

ENGINE_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2"),
}

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]


@pytest.fixture(scope="session", autouse=True)
def engine_environment() -> Iterator[None]:
    """Set what engines read from the environment, drop stray settings, restore all of it after."""
    before = dict(os.environ)
    stray = ("SPARSEK_", "VLLM_CPU_KVCACHE_SPACE")
    for name in [name for name in os.environ if name.startswith(stray)]:
        del os.environ[name]
    os.environ.update(ENGINE_ENVIRONMENT)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session")
def registered(engine_environment: None) -> None:
    """Do what vLLM does with our entry point."""
    from sparsek_backend.plugin import register

    register()


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of SmolLM2-135M-Instruct."""
    from sparsek_backend.models import fetch_model

    return fetch_model()


@pytest.fixture(scope="session")
def text_ids(smollm2: Path) -> list[int]:
    """Tokens of a long real text."""
    from transformers import AutoTokenizer

    from sparsek_backend.models import fetch_texts

    speeches = sorted(fetch_texts().rglob("*.txt"), key=lambda path: -path.stat().st_size)
    text = speeches[0].read_text(encoding="utf-8")[:80_000]
    ids: list[int] = AutoTokenizer.from_pretrained(smollm2)(text).input_ids
    return ids
