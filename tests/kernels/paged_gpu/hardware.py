"""Launches as on a GPU that is not there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from sparsek_kernels.paged.launch import attend as launch
from sparsek_kernels.paged.launch import attend_sm90 as launch_sm90
from sparsek_kernels.paged.launch import infllm as launch_infllm
from sparsek_kernels.paged.launch import rank as launch_rank
from sparsek_kernels.paged.launch import scores as launch_scores
from sparsek_kernels.paged.launch import scratch as runtime
from sparsek_kernels.paged.launch import seer as launch_seer
from sparsek_kernels.paged.launch import select as launch_select


@contextlib.contextmanager
def simulated(arch: int, num_sms: int) -> Iterator[None]:
    """Launchers choose their configurations for this architecture and count of multiprocessors."""
    facts = {"device_arch": lambda _device: arch, "multiprocessors": lambda _device: num_sms}
    launchers = (
        launch,
        launch_infllm,
        launch_rank,
        launch_scores,
        launch_seer,
        launch_select,
        launch_sm90,
    )
    with contextlib.ExitStack() as stack:
        for module in (*launchers, runtime):
            known = {name: value for name, value in facts.items() if hasattr(module, name)}
            stack.enter_context(mock.patch.multiple(module, **known))
        yield
