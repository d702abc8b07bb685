"""Launches as on a GPU that is not there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from sparsek_kernels.paged import cache_sm90, scratch
from sparsek_kernels.paged.attend import launch as attend_launch
from sparsek_kernels.paged.attend import launch_sm90
from sparsek_kernels.paged.index.cell_means import launch_scores
from sparsek_kernels.paged.index.infllm import launch as infllm_launch
from sparsek_kernels.paged.index.page_records import launch as choose_launch
from sparsek_kernels.paged.index.seer import launch as seer_launch

MODULES = (
    attend_launch,
    cache_sm90,
    choose_launch,
    infllm_launch,
    launch_scores,
    launch_sm90,
    scratch,
    seer_launch,
)
"""All that ask for facts of a device."""


@contextlib.contextmanager
def simulated(arch: int, num_sms: int) -> Iterator[None]:
    """Launchers choose their configurations for this architecture and count of multiprocessors."""
    facts = {"device_arch": lambda _device: arch, "multiprocessors": lambda _device: num_sms}
    with contextlib.ExitStack() as stack:
        for module in MODULES:
            known = {name: value for name, value in facts.items() if hasattr(module, name)}
            stack.enter_context(mock.patch.multiple(module, **known))
        yield
