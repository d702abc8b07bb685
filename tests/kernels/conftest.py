"""GPU cases are skipped where there is no GPU; kernels leave their tickets at zero."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from sparsek_kernels.paged import scratch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture(autouse=True)
def cleared_tickets() -> Iterator[None]:
    """After each test the tickets of programs that shared work are what the next kernel needs."""
    yield
    for (_, name, _), space in scratch._workspaces.items():
        if name.endswith("tickets"):
            assert not space.any(), name
