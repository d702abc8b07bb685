"""Kernels run in Triton's interpreter where there is no GPU; Triton decides that at its import."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
