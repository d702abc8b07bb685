"""Ahead-of-time compilation of every kernel, with no GPU; started by ``test_aot.py``.

Prints one JSON line per kernel, block size and head size.  It is a process of its own because
kernels imported for the interpreter cannot be compiled.
"""

from __future__ import annotations

import sys

import torch

from sparsek_kernels.block_sparse.config import (
    ProblemShape,
    hopper_backward,
    hopper_stages,
    select_config,
)
from sparsek_kernels.block_sparse.kernels import bwd as kernels_bwd
from sparsek_kernels.block_sparse.kernels.bwd_dkdv_sm90 import block_sparse_hopper_dkdv_kernel
from sparsek_kernels.block_sparse.kernels.bwd_dq_sm90 import block_sparse_hopper_dq_kernel
from sparsek_kernels.block_sparse.kernels.bwd_parts import block_sparse_bwd_parts_kernel
from sparsek_kernels.block_sparse.kernels.fwd import block_sparse_fwd_kernel
from sparsek_kernels.block_sparse.kernels.fwd_sm90 import block_sparse_hopper_fwd_kernel
from sparsek_kernels.block_sparse.kernels.item_queue import block_sparse_queue_kernel
from sparsek_kernels.common.descriptors import box_layout
from tests.kernels.sink_window.aot import INTEGERS, described, report

INTEGERS |= {"crow", "col", "ccol", "row", "ends", "columns", "queue"}
OPTIONS = {"part_ptr": "*fp32", "key_mask_ptr": "*u8", "query_mask_ptr": "*u8", "rng_ptr": "*i64"}


def compile_all(arch: int, dim: int, block: int, options: bool) -> None:
    """Compile the kernels of one shape as :func:`select_config` has them, with padding or without.

    Dropout comes with padding.
    """
    shape = ProblemShape(32, 8, dim, block, 8, masked=options, dropout=options)
    config = select_config(shape, torch.bfloat16, arch)
    shared = {
        "GROUP": shape.group, "HEAD_DIM": dim, "BLOCK_D": shape.padded_dim, "CAUSAL": True,
        "BLOCK": block, "PRECISION": config.precision, **{f"stride_{x}d": 1 for x in "oqkvg"},
        **dict.fromkeys(("HAS_KEY_MASK", "HAS_QUERY_MASK", "DROPOUT"), options),
    }  # fmt: skip
    for kernel, tile, is_query in (
        (block_sparse_fwd_kernel, config.forward, True),
        (kernels_bwd.block_sparse_bwd_dq_kernel, config.dq, True),
        (kernels_bwd.block_sparse_bwd_dkdv_kernel, config.dkdv, False),
    ):
        sizes = {
            "PACK": tile.pack, "ROWS": tile.rows, "NUM_STAGES": tile.num_stages,
            "BLOCK_M": tile.own if is_query else tile.step,
            "BLOCK_N": tile.step if is_query else tile.own,
        }  # fmt: skip
        report(kernel, arch, {**shared, **sizes}, tile.num_warps, tile.num_stages, OPTIONS)


def compile_hopper(dim: int, block: int, causal: bool) -> None:
    """Compile the warp-specialised kernels."""
    shape = ProblemShape(32, 8, dim, block, 8, 65536)
    stages, backward = hopper_stages(shape), hopper_backward(shape)
    if stages is None or backward is None:
        raise RuntimeError(f"the Hopper kernel does not take {shape}")
    keys = described("bf16", block, 64)
    boxes = f"tensordesc<bf16[1, 64, 1, 64],{box_layout(torch.bfloat16)!r}>"
    tiles = {
        "out_desc": boxes, "q_desc": described("bf16", 64, 64), "k_desc": keys, "v_desc": keys,
    }  # fmt: skip
    constexprs = {
        "GROUP": shape.group, "HEAD_DIM": dim, "CAUSAL": causal, "BLOCK": block, "STAGES": stages,
    }  # fmt: skip
    report(block_sparse_hopper_fwd_kernel, 90, constexprs, 4, tiles=tiles)
    box = f"tensordesc<bf16[1, 64, 1, {dim}],{box_layout(torch.bfloat16)!r}>"
    types = {**dict.fromkeys(("q_desc", "g_desc", "k_desc", "v_desc"), box), **OPTIONS}
    constexprs |= {"HEADS": shape.group, "LISTS": 1, "ROWS": 32}
    for kernel, depth, held in (
        (block_sparse_hopper_dq_kernel, backward.dq_stages, 0),
        (block_sparse_hopper_dkdv_kernel, backward.dkdv_stages, backward.dkdv_held),
        (block_sparse_bwd_parts_kernel, 1, 0),
    ):
        report(kernel, 90, {**constexprs, "STAGES": depth, "HELD": held}, 4, tiles=types)


if __name__ == "__main__":
    for case in ((128, 128, False), (128, 64, True), (64, 48, False)):
        compile_all(int(sys.argv[1]), *case)
    if sys.argv[1] == "90":
        report(block_sparse_queue_kernel, 90, {"ROWS": 64, "SCAN": 128}, 4)
        # All values of any two together.
        for dim, block, causal in (
            (128, 128, True),
            (128, 64, False),
            (64, 128, False),
            (64, 64, True),
        ):
            compile_hopper(dim, block, causal)
