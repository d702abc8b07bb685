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
    """Tiny tensors: threads only wait for each other, and add up in any order.

    ``torch.set_num_threads`` does nothing in a process in which vLLM has run a model on a CPU.
    """
    threads = torch.get_num_threads()
    torch._C.set_num_threads(1)
    yield
    torch._C.set_num_threads(threads)
