"""The C functions of the CPU path: whether they are there, and as other processors have them."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from sparsek_kernels.paged.cpu.native import build

needs_compiler = pytest.mark.skipif(
    build.library() is None, reason="no C compiler: the torch path takes over"
)


_SAMPLE = """
#include "choose.h"

int32_t sample(const uint8_t *keys, int64_t first, int64_t last, int64_t places, int64_t position,
               int32_t *chosen) {
    return sample_cells(keys, first, last, places, first_sum(position), chosen);
}
"""


def built_sample(folder: Path, *flags: str) -> Any:
    """The sample of ``choose.h`` by keys, as a C function."""
    compiler = os.environ.get("CC") or shutil.which("cc") or "gcc"
    source, made = folder / "sample.c", folder / "sample.so"
    source.write_text(_SAMPLE)
    headers = str(Path(build.__file__).parent)
    command = [compiler, *build._FLAGS, *flags, "-shared", "-I", headers, "-o", str(made)]
    subprocess.run([*command, str(source), "-lm"], check=True)
    function = ctypes.CDLL(str(made)).sample
    function.argtypes = (ctypes.c_void_p, *(ctypes.c_int64,) * 4, ctypes.c_void_p)
    return function


def built_without(*features: str) -> ctypes.CDLL:
    """The C functions as a processor without some features has them."""
    compiler = os.environ.get("CC") or shutil.which("cc") or "gcc"
    less = [f"-mno-{feature}" for feature in features]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "_FLAGS", (*build._FLAGS, "-O1", *less))
        return build._build(compiler)
