"""The C functions of the CPU path: whether they are there, and as other processors have them."""

from __future__ import annotations

import ctypes
import os
import shutil

import pytest

from sparsek_kernels.paged.cpu.native import build

needs_compiler = pytest.mark.skipif(
    build.library() is None, reason="no C compiler: the torch path takes over"
)


def built_without(*features: str) -> ctypes.CDLL:
    """The C functions as a processor without some features has them."""
    compiler = os.environ.get("CC") or shutil.which("cc") or "gcc"
    less = [f"-mno-{feature}" for feature in features]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "_FLAGS", (*build._FLAGS, "-O1", *less))
        return build._build(compiler)
