"""Tensors of the three branches, by their names."""

from __future__ import annotations

from typing import NamedTuple

import torch


class PerBranch(NamedTuple):
    """A tensor of the compressed, of the selected and of the sliding branch."""

    cmp: torch.Tensor
    slc: torch.Tensor
    swa: torch.Tensor
