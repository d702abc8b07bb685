"""benchmarks/engine_start.py: the order of the starts, and the verdict on them."""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def script() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(FOLDER), *sys.path])
        return import_module("engine_start")


def run(kind: str, backend: str, seconds: float, logprob: float = -1.0, **more: Any) -> Any:
    answer = {"tokens": [1, 2], "logprobs": [logprob, -1.0]}
    return {"kind": kind, "backend": backend, "start_s": seconds, **answer, **more}


def test_backends_start_in_turn(script: Any) -> None:
    options = argparse.Namespace(repeats=2, cold=True, baseline="B")
    both = ("B", "SPARSEK")
    kinds = ("filling", "warm", "warm", "cold")
    assert script.schedule(options) == [(kind, name) for kind in kinds for name in both]


def test_the_middle_of_the_starts_counts(script: Any) -> None:
    runs = [run("warm", "B", 4.0), run("warm", "SPARSEK", 5.0), run("warm", "SPARSEK", 7.0)]
    found = script.judge("B", runs)
    assert found == ({"start_s": {"warm": {"B": 4.0, "SPARSEK": 6.0}}}, [])


def test_other_answers_and_late_kernels_are_wrong(script: Any) -> None:
    compiled = [["sparsek_kernels.paged", "a", True], ["vllm.sampler", "b", False]]
    runs = [run("warm", "B", 4.0), run("warm", "SPARSEK", 5.0, -1.5, compiled=compiled)]
    _, wrong = script.judge("B", runs)
    assert [line.partition(": ")[2] for line in wrong] == [
        "the short prompt is answered otherwise, 0.5 nats apart, at most 0.1 expected",
        "sparsek_kernels.paged.a was compiled for a request",
    ]


def test_cold_starts_have_an_empty_cache(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/before")
    with script.triton_cache("warm"):
        assert os.environ["TRITON_CACHE_DIR"] == "/before"
    with script.triton_cache("cold"):
        folder = Path(os.environ["TRITON_CACHE_DIR"])
        assert not list(folder.iterdir())
    assert os.environ["TRITON_CACHE_DIR"] == "/before"
    assert not folder.exists()
