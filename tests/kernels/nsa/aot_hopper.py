"""Ahead-of-time compilation of compressed attention's backward kernel for Hopper; a script.

It is the sink-window kernel with keys that stand for blocks, so the script of that family compiles
it.  ``aot.py`` compiles the forward kernel.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

from sparsek_kernels.nsa.config import ProblemShape, select_config

PATH = Path(__file__).parents[1] / "sink_window" / "aot.py"
place = importlib.util.spec_from_file_location("sink_window_aot", PATH)
if place is None or place.loader is None:
    raise ImportError(PATH)
window = importlib.util.module_from_spec(place)
place.loader.exec_module(window)


def compile_backward(dim: int, varlen: bool) -> None:
    """The kernel at the table's tile sizes."""
    shape = ProblemShape(1, 65536, 65536, 64, 4, dim)
    tile = select_config(shape, 16, torch.bfloat16, 90).compressed_bwd_hopper
    if tile is None:
        raise RuntimeError(f"no Hopper kernel is selected for {shape}")
    rows = window.described("bf16", tile.block_m, dim)
    keys = window.described("bf16", tile.block_n, dim)
    tiles = {"q_desc": rows, "dout_desc": rows, "k_desc": keys, "v_desc": keys,
             "dq_desc": window.described("fp32", tile.block_m, dim)}  # fmt: skip
    options = {
        "GROUP": 2, "HEAD_DIM": dim, "CAUSAL": True, "WINDOWED": False, "HAS_SINK_KEYS": False,
        "HAS_TERMS": False, "VARLEN": varlen, "OVERWRITES": False, "KEY_BLOCK": 32,
        "KEY_STRIDE": 16, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n,
        "Q_STAGES": tile.num_stages, "G_STAGES": 2,
    }  # fmt: skip
    kernel = window.sink_window_hopper_bwd_kernel
    window.report(kernel, 90, options, tile.num_warps, tiles=tiles)


if __name__ == "__main__":
    compile_backward(128, False)
    compile_backward(128, True)
    compile_backward(64, False)
