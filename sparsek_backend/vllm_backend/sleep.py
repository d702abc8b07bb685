"""What an engine keeps while it sleeps."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def make_to_stay(make: Callable[[], T]) -> T:
    """Return what ``make`` returns, made in another thread.

    vLLM builds the KV cache of an engine with sleep mode in a memory pool, which takes what this
    thread makes. Some versions drop all of the pool when the engine sleeps.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(make).result()
