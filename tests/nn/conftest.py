"""What the tests of torch modules share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

# torch looks once, at the first product on a GPU, whether its algorithms can be deterministic.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Tiny tensors: threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
