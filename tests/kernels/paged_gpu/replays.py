"""Layers and calls whose launches are repeated."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from problems import Problem, make_problem

from sparsek_kernels.common.recording import Tensors
from sparsek_kernels.paged.operands import Located
from sparsek_kernels.paged.policy import SelectionPolicy
from sparsek_kernels.paged.replay import ReplayableCall, Replays

TOP_K = SelectionPolicy(num_sink=64, window_size=512, top_k=8)
POLICIES = {
    "dense": SelectionPolicy(),
    "window": SelectionPolicy(num_sink=4, window_size=300),
    "topk": TOP_K,
}


def call_of(tensors: Tensors, key: Hashable, replays: Replays) -> ReplayableCall:
    addresses = [0 if x is None else x.data_ptr() for x in tensors]
    return ReplayableCall(Located(tensors, addresses, None, -1), key, replays)


def layer(seed: int, **options: Any) -> Problem:
    """A layer of a step with two decodes and two prefills; layers have the same pages."""
    lengths = [(1, 1800), (1, 900), (2200, 2300), (64, 64)]
    shape = {"heads": 4, "dim": 64, "page_size": 64, "head_major": True}
    found = make_problem(lengths, num_decodes=2, dtype=torch.bfloat16, **shape, **options)
    generator = torch.Generator(device=found.q.device).manual_seed(seed)
    found.q.normal_(generator=generator)
    return found
