"""Kernels run in Triton's interpreter where there is no GPU; Triton decides that at its import."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.kernels.interpreter import replace_language_once_a_launch

    replace_language_once_a_launch()
