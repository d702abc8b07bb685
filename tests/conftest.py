"""Kernels run in Triton's interpreter where there is no GPU; every run draws the same numbers."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator

if "PYTEST_XDIST_WORKER" in os.environ:  # one thread each, told before torch is loaded
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
if "OMP_NUM_THREADS" in os.environ:  # Numba, which vLLM drafts n-grams with, would set it anew
    os.environ.setdefault("NUMBA_NUM_THREADS", os.environ["OMP_NUM_THREADS"])

import pytest
import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.kernels.interpreter import hasten_interpreter

    hasten_interpreter()

# Hypothesis draws the same examples in every run, however long they take.
settings.register_profile(
    "repeatable",
    deadline=None,
    derandomize=True,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("repeatable")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What collection imports is no garbage: no search of the heap, now or later, looks at it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """A test's numbers depend on no test that ran before it in this process."""
    torch.manual_seed(0)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put files first that start engines and servers, or are long: nobody waits for them alone."""
    first = {
        item.path
        for item in items
        if any(item.get_closest_marker(name) for name in ("engine", "serve", "long"))
    }
    items.sort(key=lambda item: item.path not in first)
