"""Ahead-of-time compilation of every kernel, with no GPU; started by ``test_aot.py``.

Prints one JSON line per kernel and GPU: spilled bytes, shared memory, tensor-core instructions.  It
is a process of its own because kernels imported for the interpreter cannot be compiled.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language import NVMMASharedLayout

from sparsek_kernels.common.kernels.row_dots import row_dots_kernel
from sparsek_kernels.common.kernels.sequences import tile_map_kernel
from sparsek_kernels.sink_window.config import ProblemShape, select_config
from sparsek_kernels.sink_window.kernels import bwd as kernels_bwd
from sparsek_kernels.sink_window.kernels import bwd_sink as kernels_bwd_sink
from sparsek_kernels.sink_window.kernels.bwd_rows import sink_window_bwd_finish_kernel
from sparsek_kernels.sink_window.kernels.bwd_sm90 import sink_window_hopper_bwd_kernel
from sparsek_kernels.sink_window.kernels.fwd import sink_window_fwd_kernel
from sparsek_kernels.sink_window.kernels.fwd_sm90 import sink_window_hopper_fwd_kernel
from sparsek_kernels.sink_window.kernels.fwd_small_sm90 import sink_window_hopper_small_kernel
from sparsek_kernels.sink_window.launch_sm90 import forward_rules
from tests.kernels.barriers import require_lasting_barriers

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
MASK = {"GROUP": 4, "CAUSAL": True, "WINDOWED": True}
POINTERS = {"lse", "delta", "sink_dk", "sink_dv", "part_dk", "part_dv", "term_dk", "term_dv",
            "dq_acc", "sinks", "dlse"}  # fmt: skip
INTEGERS = {"cu_seqlens_q", "cu_seqlens_k", "cu_seqlens", "tiles", "slots", "order", "ticket"}


def signature(kernel: Any, constexprs: dict[str, Any], tiles: dict[str, str]) -> dict[str, str]:
    """Types of every argument, told by its name."""
    types = {}
    for name in kernel.arg_names:
        base = name.removesuffix("_ptr")
        if name in constexprs:
            types[name] = "constexpr"
        elif name in tiles:
            types[name] = tiles[name]
        elif base in POINTERS:
            types[name] = "*fp32"
        elif base in INTEGERS:
            types[name] = "*i32"
        elif name.endswith("_ptr"):
            types[name] = "*bf16"
        else:
            types[name] = "fp32" if name.startswith("scale") else "i32"
    return types


def report(kernel: Any, arch: int, constexprs: dict[str, Any], warps: int, stages: int = 1,
           tiles: dict[str, str] | None = None) -> None:  # fmt: skip
    """Compile and print what the machine code needs."""
    defaults = {x.name: x.default for x in kernel.params if x.is_constexpr and x.has_default}
    constexprs = {name: x for name, x in constexprs.items() if name in kernel.arg_names}
    constexprs = {**defaults, **constexprs}
    kind = GluonASTSource if kernel.is_gluon() else ASTSource
    aligned = [
        (i,)
        for i, name in enumerate(kernel.arg_names)
        if name.endswith("_ptr") or (name.startswith("stride") and not name.endswith("d"))
    ]
    source = kind(
        kernel,
        signature(kernel, constexprs, tiles or {}),
        {(kernel.arg_names.index(name),): x for name, x in constexprs.items()},
        {i: [["tt.divisibility", 16]] for i in aligned},
    )
    options = {"num_warps": warps, "num_stages": stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    if kernel.is_gluon():
        require_lasting_barriers(kernel.__name__, compiled.asm["ttgir"])
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        listing = subprocess.run(
            [TOOLS / "cuobjdump", "--dump-resource-usage", "--dump-sass", file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    line = {
        "kernel": kernel.__name__,
        "arch": arch,
        "stack": max(map(int, re.findall(r"STACK:(\d+)", listing))),
        "shared": compiled.metadata.shared,
        "hgmma": listing.count("HGMMA"),
        "waits": listing.count("WARPGROUP.DEPBAR"),
        "mma": listing.count("HMMA") + listing.count("UTCHMMA") + listing.count("UTCMMA"),
    }
    print(json.dumps(line), flush=True)


def portable(arch: int, dim: int) -> None:
    """What runs on every GPU."""
    shape = ProblemShape(1, 65536, 65536, 32, 8, dim, num_sink=4, window_size=1024)
    config = select_config(shape, torch.bfloat16, arch)
    shared = {
        **MASK, "HEAD_DIM": dim, "BLOCK_D": shape.padded_dim, "PRECISION": config.precision,
        "HAS_SINK_KEYS": True, "HAS_SINKS": True, "STORE_LSE": True, "VARLEN": True,
        "HAS_DLSE": True, "WRITE_DQ": False, "HAS_TERMS": True,
    }  # fmt: skip
    unit = {f"stride_{x}d": 1 for x in "oqkvg"}
    kernels = (
        (sink_window_fwd_kernel, config.forward),
        (kernels_bwd.sink_window_bwd_dkdv_kernel, config.dkdv),
        (kernels_bwd.sink_window_bwd_dq_kernel, config.dq),
        (kernels_bwd_sink.sink_window_bwd_sink_kernel, config.sink),
    )
    for kernel, tile in kernels:
        sizes = {
            "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "NUM_STAGES": tile.num_stages,
            "BLOCK_S": config.sink_block,
        }  # fmt: skip
        report(kernel, arch, {**shared, **unit, **sizes}, tile.num_warps, tile.num_stages)
    for kernel in (row_dots_kernel, sink_window_bwd_finish_kernel):
        report(kernel, arch, {**shared, **unit, "BLOCK_M": 64}, 4)
    report(tile_map_kernel, arch, {"BLOCK": 128, "SCAN": 256}, 4)


def described(dtype: str, rows: int, dim: int) -> str:
    """Type of a tensor descriptor of ``[rows, dim]`` tiles."""
    layout = NVMMASharedLayout(128, 32 if dtype == "fp32" else 16, 2)
    return f"tensordesc<{dtype}[{rows}, {dim}],{layout!r}>"


def hopper(dim: int, window: int, num_sink: int) -> None:
    """What runs on Hopper alone."""
    shape = ProblemShape(1, 65536, 65536, 32, 8, dim, num_sink, window)
    config = select_config(shape, torch.bfloat16, 90)
    shared = {
        **MASK, "HEAD_DIM": dim, "HAS_SINK_KEYS": num_sink > 0, "HAS_SINKS": True,
        "STORE_LSE": True, "VARLEN": True, "BLOCK_S": 64,
    }  # fmt: skip
    tile = config.hopper_forward
    if tile is None or config.hopper_backward is None:
        raise RuntimeError(f"no Hopper kernel is selected for {shape}")
    kv = described("bf16", tile.block_n, dim)
    sink = described("bf16", 64, dim) if num_sink else kv
    tiles = {
        "q_desc": described("bf16", 64, dim), "k_desc": kv, "v_desc": kv,
        "sink_k_desc": sink, "sink_v_desc": sink,
    }  # fmt: skip
    forward = {**shared, **forward_rules(tile)}
    report(sink_window_hopper_fwd_kernel, 90, forward, tile.num_warps, tiles=tiles)
    tile = config.hopper_backward
    rows, keys = described("bf16", tile.block_m, dim), described("bf16", tile.block_n, dim)
    tiles = {
        "q_desc": rows, "dout_desc": rows, "k_desc": keys, "v_desc": keys,
        "dq_desc": described("fp32", tile.block_m, dim),
    }  # fmt: skip
    backward = {
        **shared, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "Q_STAGES": tile.num_stages,
        "G_STAGES": 2, "OVERWRITES": True, "HAS_TERMS": True,
    }  # fmt: skip
    report(sink_window_hopper_bwd_kernel, 90, backward, tile.num_warps, tiles=tiles)


def small(keys: int) -> None:
    """What runs on Hopper for few rows."""
    shape = ProblemShape(1, keys, keys, 8, 2, 64, causal=True)
    tile = select_config(shape, torch.bfloat16, 90).hopper_small
    if tile is None:
        raise RuntimeError(f"no kernel for few rows is selected for {shape}")
    options = {
        **MASK, "HEAD_DIM": 64, "HAS_SINKS": True, "STORE_LSE": True, "BLOCK_N": tile.block_n,
        "CHUNKS": tile.num_stages,
    }  # fmt: skip
    report(sink_window_hopper_small_kernel, 90, options, tile.num_warps)


if __name__ == "__main__":
    target = int(sys.argv[1])
    portable(target, 128)
    if target == 90:
        hopper(128, 4096, 4)
        hopper(128, 1024, 64)
        hopper(128, 512, 0)
        hopper(64, 1024, 4)
        small(512)
