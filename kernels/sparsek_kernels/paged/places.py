"""How many blocks each KV head keeps, as a tensor that kernels read."""

from __future__ import annotations

from functools import cache

import torch

from sparsek_kernels.paged.policy import SelectionPolicy


def head_places(policy: SelectionPolicy, device: torch.device) -> torch.Tensor | None:
    """``[Hkv]`` int32 of :attr:`SelectionPolicy.head_places`; ``None`` where heads do not differ.

    It is made once for each device.  A CUDA graph that is being captured must find it made.
    """
    return _tensor(policy.head_places, device) if policy.head_places else None


@cache
def _tensor(places: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(places, dtype=torch.int32, device=device)
