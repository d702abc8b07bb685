"""Ahead-of-time compilation of what the NSA launchers would launch, with no GPU; a script.

Prints one JSON line per kernel: registers, stack bytes (spills), shared memory.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from sparsek_kernels.common import grids
from sparsek_kernels.nsa import config as launch_common
from sparsek_kernels.nsa.compress import launch as launch_compress
from sparsek_kernels.nsa.compress import launch_rotary
from sparsek_kernels.nsa.compressed import launch as launch_compressed
from sparsek_kernels.nsa.compressed import launch_sm90 as launch_compressed_hopper
from sparsek_kernels.nsa.compressed.problem import CompressedProblem
from sparsek_kernels.nsa.config import ProblemShape, TileConfig
from sparsek_kernels.nsa.gate import launch as launch_gate
from sparsek_kernels.nsa.gate.branches import PerBranch
from sparsek_kernels.nsa.select import launch as launch_select
from sparsek_kernels.nsa.select import launch_fused as launch_compressed_select
from sparsek_kernels.nsa.selected import index as launch_index
from sparsek_kernels.nsa.selected import launch_bwd as launch_selected_bwd
from sparsek_kernels.nsa.selected import launch_fwd as launch_selected
from sparsek_kernels.nsa.selected import share as launch_share
from sparsek_kernels.nsa.selected.problem import SelectedProblem
from sparsek_kernels.nsa.spec import NSASpec
from tests.kernels.barriers import require_lasting_barriers

MODULES = (
    *(launch_compress, launch_rotary, launch_compressed),
    *(launch_compressed_hopper, launch_compressed_select),
    *(launch_gate, launch_select, launch_selected, launch_index, launch_share),
    launch_selected_bwd,
)
TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
Launch = tuple[str, Any, tuple[Any, ...], dict[str, Any]]


class Spy:
    """Takes the place of a kernel and notes its launches."""

    def __init__(self, name: str, kernel: Any, seen: list[Launch]) -> None:
        self.name, self.kernel, self.seen = name, kernel, seen

    def __getitem__(self, grid: object) -> Callable[..., None]:
        def call(*args: Any, **kwargs: Any) -> None:
            self.seen.append((self.name, self.kernel, args, kwargs))

        return call


def launches(arch: int, dtype: torch.dtype, dim: int, group: int) -> list[Launch]:
    """Every kernel of a forward and backward pass, at the tile sizes of ``arch``."""
    seen: list[Launch] = []
    for module in MODULES:
        for name in [n for n in vars(module) if re.fullmatch(r"nsa_\w+_kernel", n)]:
            setattr(module, name, Spy(name, getattr(module, name), seen))
    grids.tile_map_kernel = Spy("tile_map_kernel", grids.tile_map_kernel, [])
    launch_common.device_arch = lambda device: arch
    launch_compressed.row_dots = lambda dout, dlse, out: out.new_empty(1, dtype=torch.float32)
    launch_selected_bwd.row_dots = launch_compressed.row_dots
    for module in (launch_selected, launch_compressed_hopper, launch_compressed_select):
        module.multiprocessors = lambda device: 132
    launch_compressed.describable = lambda *x: False  # those kernels are compiled elsewhere
    spec, scale, tokens = NSASpec(), 0.1, 4096
    q = torch.empty(1, tokens, group, dim, dtype=dtype)
    k = torch.empty(1, tokens, 1, dim, dtype=dtype)
    cmp = torch.empty(1, spec.num_compressed(tokens), 1, dim, dtype=dtype)
    lse = torch.empty(1, group, tokens)
    indices = torch.zeros(1, tokens, 1, spec.top_n, dtype=torch.int32)
    gates = [torch.empty(1, tokens, group) for _ in range(3)]

    def compressed(rows: int = tokens, cu: torch.Tensor | None = None) -> CompressedProblem:
        return CompressedProblem(q[:, :rows], cmp, cmp, tokens, cu, spec, scale)

    def selected(rows: int = tokens) -> SelectedProblem:
        return SelectedProblem(q[:, :rows], k, k, indices[:, :rows], None, 64, scale)

    base = launch_common.select_config
    launch_common.select_config = lambda *args: replace(
        base(*args),
        select_hopper=None,
        selected_hopper=None,
        selected_boxes=None,
        combine_hopper=None,
        selected_bwd_hopper=None,
    )
    launch_compress.mean_pool_forward([k], [cmp], None, spec)
    launch_compress.mean_pool_backward([cmp], [k], None, spec)
    positions, freqs = torch.arange(tokens), torch.rand(dim // 2)
    launch_rotary.rotate_into(q, q, positions, freqs, 1)
    launch_compressed.backward(compressed(), q, lse, q, None)
    for rows in (tokens, 1):
        few, found = q[:, :rows], indices[:, :rows]
        launch_compressed.forward(compressed(rows), few, lse)
        launch_select.select(compressed(rows), lse, found)
        launch_selected.forward(selected(rows), few, lse)
    launch_selected_bwd.backward(selected(), q, lse, q, None)
    if arch == 90:
        table = base(ProblemShape(1, 65536, 65536, group, 1, dim), spec.top_n, dtype, arch)
        hopper = {
            "compressed_hopper": table.compressed_hopper,
            "select_hopper": table.select_hopper,
            "selected_hopper": TileConfig(64, 64, 4, 4),
            "selected_boxes": None,
            "combine_hopper": TileConfig(64, 64, 4, 5, 128),
            "selected_bwd_hopper": TileConfig(128, 64, 8, 2),
        }
        launch_common.select_config = lambda *args: replace(base(*args), **hopper)
        launch_select.select(compressed(), lse, indices)
        for cu in (None, torch.tensor([0, 0, tokens], dtype=torch.int32)):
            launch_compressed_select.attend_and_select(compressed(cu=cu), q, lse, indices)
            launch_selected.forward(replace(selected(), cu_seqlens=cu), q, lse)
        launch_selected_bwd.backward(selected(), q, lse, q, None)
        problem = replace(selected(), cu_seqlens=cu)
        config = replace(problem.config, index_rows=500, chunk_rows_bwd=1000)
        launch_selected_bwd.backward(replace(problem, tuned=config), q, lse, q, None)
        hopper["selected_boxes"] = TileConfig(64, 64, 4, 4, 80)  # for groups of whole boxes
        launch_selected.forward(selected(), q, lse)
    launch_selected.forward_gated(selected(), q, (q, q), gates)
    launch_gate.gate_rows(q, PerBranch(q, q, q), PerBranch(*gates), PerBranch(lse, lse, lse))
    launch_gate.forward(q, [q] * 3, gates)
    launch_gate.backward([q] * 3, gates, q, [q] * 3, gates)
    # Once for many tokens and once for a decoded one, told apart by their first argument.
    keys = ("GATED", "VARLEN", "BOUNDED", "FIRST", "LAST")
    found = {(x[0], x[2][0].shape[:2], *map(x[3].get, keys)): x for x in seen}
    return list(found.values())


def compile_launch(launch: Launch, arch: int) -> dict[str, Any]:
    """Compile one launch as the just-in-time path would specialise it."""
    name, kernel, args, kwargs = launch
    names = kernel.arg_names
    options = {key: value for key, value in kwargs.items() if key not in names}
    bound = dict(zip(names, args, strict=False))
    bound |= {key: value for key, value in kwargs.items() if key in names}
    constexprs = {p.name for p in kernel.params if p.is_constexpr}
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attrs: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, arg in enumerate(names):
        value = bound[arg]
        if arg in constexprs or (isinstance(value, int) and value == 1):
            signature[arg], constants[arg] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[arg] = TYPES[value.dtype]
            attrs[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, TensorDescriptor):
            element = TYPES[value.base.dtype].removeprefix("*")
            signature[arg] = f"tensordesc<{element}{list(value.block_shape)},{value.layout!r}>"
        elif isinstance(value, float):
            signature[arg] = "fp32"
        else:
            signature[arg] = "i32"
            if value % 16 == 0:
                attrs[(index,)] = [["tt.divisibility", 16]]
    kind = GluonASTSource if kernel.is_gluon() else ASTSource
    source = kind(kernel, signature, constants, attrs)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    if kernel.is_gluon():
        require_lasting_barriers(name, compiled.asm["ttgir"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        text = subprocess.run(
            [str(tool), "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    usage = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if usage is None:
        raise ValueError(f"cuobjdump output: expected REG and STACK, got {text!r}")
    return {
        "kernel": name,
        "arch": arch,
        "registers": int(usage[1]),
        "stack": int(usage[2]),
        "shared": compiled.metadata.shared,
        "warps": compiled.metadata.num_warps,
        "wgmma": "wgmma" in compiled.asm["ptx"],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--arch", type=int, default=90)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--group", type=int, default=16)
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    for launch in launches(args.arch, getattr(torch, args.dtype), args.dim, args.group):
        if args.only in launch[0]:
            print(json.dumps(compile_launch(launch, args.arch)), flush=True)


if __name__ == "__main__":
    main()
