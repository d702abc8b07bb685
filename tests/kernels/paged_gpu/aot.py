"""Ahead-of-time compilation of what the launchers would launch, with no GPU.

Run as a script it prints one JSON line per kernel: registers, spilled bytes, shared memory; with
``--each`` so for each line of options that it reads, and an empty line after them.  It is a process
of its own because kernels decorated under ``TRITON_INTERPRET=1`` cannot be compiled.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import gc
import json
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import problems
import torch
import triton
from hardware import simulated
from problems import Problem, attend_phases, make_problem
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from sparsek_kernels.paged.attend import launch as attend_launch
from sparsek_kernels.paged.attend import launch_sm90
from sparsek_kernels.paged.chosen import Chosen
from sparsek_kernels.paged.config import TileConfig
from sparsek_kernels.paged.index import launch as index_launch
from sparsek_kernels.paged.index.base import Indexers
from sparsek_kernels.paged.index.cell_means import launch_scores
from sparsek_kernels.paged.index.infllm import InfLLM
from sparsek_kernels.paged.index.infllm import launch as infllm_launch
from sparsek_kernels.paged.index.page_records import launch as choose_launch
from sparsek_kernels.paged.index.page_records import launch_sm80
from sparsek_kernels.paged.index.page_records import launch_write as records_launch
from sparsek_kernels.paged.index.seer import Seer
from sparsek_kernels.paged.index.seer import launch as seer_launch
from sparsek_kernels.paged.plan import Segment
from sparsek_kernels.paged.policy import SelectionPolicy, StepPolicy
from sparsek_kernels.paged.record import page_bytes
from sparsek_kernels.paged.write import launch as write_launch
from tests.kernels.barriers import require_lasting_barriers
from tests.kernels.launched import run_launched, write_launched
from tests.kernels.paged.gate_cases import make_gates

KERNELS = {
    "write_kv_kernel": write_launch,
    "write_records_kernel": records_launch,
    "score_records_kernel": choose_launch,
    "total_kernel": choose_launch,
    "rank_cells_kernel": choose_launch,
    "list_cells_kernel": choose_launch,
    "weigh_cells_kernel": launch_sm80,
    "cut_cells_kernel": launch_sm80,
    "attend_kernel": attend_launch,
    "top_blocks_kernel": index_launch,
    "pool_means_kernel": launch_scores,
    "gather_samples_kernel": launch_scores,
    "part_scores_kernel": launch_scores,
    "add_parts_kernel": launch_scores,
    "write_means_kernel": infllm_launch,
    "average_logits_kernel": infllm_launch,
    "block_scores_kernel": infllm_launch,
    "write_gate_keys_kernel": seer_launch,
    "gate_queries_kernel": seer_launch,
    "gate_logits_kernel": seer_launch,
    "attend_hopper_kernel": launch_sm90,
    "tile_scores_sm90_kernel": launch_scores.sm90,
}
"""The module by whose name each is launched."""
HOPPER = {"attend_hopper_kernel", "gather_samples_kernel", "tile_scores_sm90_kernel"}
TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.uint8: "*u8",
    torch.int64: "*i64",
    torch.float8_e4m3fn: "*fp8e4nv",
}


@dataclasses.dataclass
class Recorded:
    """One launch: the kernel, its arguments and its compile options."""

    name: str
    kernel: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def record(action: Callable[[], object], arch: int, num_sms: int) -> list[Recorded]:
    """Run a launcher with its kernels replaced by recorders.

    Kernels of matrix units are recorded for later GPUs too, where they are compiled but do not run.
    """
    seen: list[Recorded] = []
    saved = {name: getattr(module, name) for name, module in KERNELS.items()}

    class Spy:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: object) -> Callable[..., None]:
            def call(*args: Any, **kwargs: Any) -> None:
                seen.append(Recorded(self.name, saved[self.name], args, kwargs))

            return call

    try:
        for name, module in KERNELS.items():
            setattr(module, name, Spy(name))
        units = mock.patch.object(choose_launch, "uses_matrix_units", return_value=True)
        with simulated(arch, num_sms), units:
            action()
    finally:
        for name, kernel in saved.items():
            setattr(KERNELS[name], name, kernel)
    return seen


@contextlib.contextmanager
def hopper_kernels(wanted: bool) -> Iterator[None]:
    """Prefills of whole tiles take the kernels written for Hopper where these fit, or never do."""
    with contextlib.ExitStack() as stack:
        for module, selector in (
            (attend_launch, "prefill_config"),
            (launch_scores, "score_config"),
        ):
            configure = getattr(module, selector)

            def chosen(configure: Any = configure, **shape: Any) -> TileConfig:
                return dataclasses.replace(configure(**shape), hopper=wanted)

            stack.enter_context(mock.patch.object(module, selector, chosen))
        yield


class Specialised:
    """Arguments as the just-in-time path would specialise a kernel for them.

    Each has a path: its number, and those of elements of tuples.
    """

    def __init__(self) -> None:
        self.constants: dict[tuple[int, ...], Any] = {}
        self.attrs: dict[tuple[int, ...], list[list[Any]]] = {}

    def of(self, value: Any, *path: int) -> Any:
        """The type of an argument in the kernel's signature."""
        if isinstance(value, tuple):
            return tuple(self.of(x, *path, index) for index, x in enumerate(value))
        if isinstance(value, TensorDescriptor):
            box = f"{TYPES[value.base.dtype][1:]}{value.block_shape}"
            return f"tensordesc<{box},{value.layout!r}>"
        if isinstance(value, float):
            return "fp32"
        if value is None or (isinstance(value, int) and value == 1):
            return self.fixed(value, *path)
        tensor = isinstance(value, torch.Tensor)
        if tensor or value % 16 == 0:
            self.attrs[path] = [["tt.divisibility", 16]]
        if tensor:
            return TYPES[value.dtype]
        return "i32" if -(2**31) <= value < 2**31 else "i64"

    def fixed(self, value: Any, *path: int) -> str:
        """The type of a compile-time constant."""
        self.constants[path] = value
        return "constexpr"


def compile_launch(launched: Recorded, arch: int) -> dict[str, Any]:
    """Compile one recorded launch as the just-in-time path would specialise it."""
    names = launched.kernel.arg_names
    options = {k: v for k, v in launched.kwargs.items() if k not in names}
    bound = dict(zip(names, launched.args, strict=False))
    bound |= {k: v for k, v in launched.kwargs.items() if k in names}
    constexpr_names = {p.name for p in launched.kernel.params if p.is_constexpr}
    found = Specialised()
    signature = {
        name: (found.fixed if name in constexpr_names else found.of)(bound[name], index)
        for index, name in enumerate(names)
    }
    kind = GluonASTSource if launched.kernel.is_gluon() else ASTSource
    source = kind(launched.kernel, signature, found.constants, found.attrs)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    if launched.kernel.is_gluon():
        require_lasting_barriers(launched.name, compiled.asm["ttgir"])
    usage = resource_usage(compiled.asm["cubin"])
    return {
        "kernel": launched.name,
        "arch": arch,
        "shared": compiled.metadata.shared,
        "warps": compiled.metadata.num_warps,
        "wgmma": "wgmma" in compiled.asm["ptx"],
        **usage,
    }


def resource_usage(cubin: bytes) -> dict[str, int]:
    """Registers and local-memory bytes per thread, as the disassembler reports them."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [str(tool), "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if found is None:
        raise ValueError(f"cuobjdump output: expected REG and STACK, got {text!r}")
    return {"registers": int(found[1]), "stack": int(found[2])}


def launches(
    arch: int,
    dtype: torch.dtype,
    head_dim: int,
    group: int,
    fp8_cache: bool = False,
) -> list[Recorded]:
    """Everything that a step with decodes and prefills launches, for each kind of policy.

    Dense decodes are of short contexts: they merge few parts, which compiles in a fraction of the
    time.  Those that choose merge as many as there may be.
    """
    topk = SelectionPolicy(num_sink=64, window_size=512, top_k=32)
    policies = [topk, SelectionPolicy(), SelectionPolicy(num_sink=4, window_size=1024)]
    sms = {80: 108, 86: 84, 89: 128, 90: 132, 100: 148}[arch]
    problem = make_problem(
        [(1, 65), (2304, 2400)],
        num_decodes=1,
        heads=8,
        group=group,
        dim=head_dim,
        page_size=64,
        dtype=dtype,
        max_seq_len=131072,
        cache_dtype=torch.float8_e4m3fn if fp8_cache else None,
    )
    seen: list[Recorded] = []
    operands = problem.operands(torch.empty_like(problem.q))
    invariant = functools.partial(run_launched, operands, problem.batch, topk, batch_invariant=True)
    seen += record(invariant, arch, sms)[:1]
    short = dataclasses.replace(problem.batch, max_seq_len=512, _derived={})
    for policy in policies:
        batch = problem.batch if policy is topk else short
        step = functools.partial(attend_phases, operands, batch, policy)
        with hopper_kernels(False):
            seen += record(step, arch, sms)
        if policy is topk:
            with hopper_kernels(True):
                seen += [r for r in record(step, arch, sms) if r.name in HOPPER]
    for request in (0, 1):  # few tokens, and many
        written = (problem.keys[request], problem.values[request], problem.k_cache, problem.v_cache)
        write = functools.partial(
            write_launched, *written, problem.k_summary, problem.slots[request]
        )
        seen += record(write, arch, sms)
    return seen


def learned_launches(
    indexer: str, arch: int, dtype: torch.dtype, head_dim: int, group: int
) -> list[Recorded]:
    """What a step launches for a learned indexer, by keys with and without positions."""
    policy = SelectionPolicy(num_sink=64, window_size=2048, top_k=63, query_tile=1)
    gates = make_gates(2, group, head_dim)
    indexers = Indexers(*[InfLLM() if indexer == "infllm" else Seer(gates)] * 2)
    problem = make_problem(
        [(1, 9000), (16, 9000)],
        num_decodes=1,
        group=group,
        dim=head_dim,
        page_size=64,
        dtype=dtype,
        max_seq_len=131072,
    )
    pages, heads, page_size, _ = problem.k_cache.shape
    each = indexers.page_bytes(page_size, head_dim)  # as the views of a server's pages
    problem.k_summary = torch.empty(pages, heads, each, dtype=torch.uint8)
    seen: list[Recorded] = []
    for rotation in (None, torch.zeros(131072, head_dim)):
        batch = dataclasses.replace(problem.batch, rotation=rotation, _derived={})

        def step(batch: Any = batch) -> None:
            if indexer == "infllm":
                infllm_launch.write_means(problem.k_cache, problem.k_summary, batch)
            else:
                seer_launch.write_gate_keys(problem.k_cache, problem.k_summary, batch, 64, gates)
            operands = problem.operands(torch.empty_like(problem.q))
            attend_phases(operands, batch, StepPolicy(policy, policy), indexers)

        seen += record(step, arch, 132)
    return seen


class OneRank:
    """Ranks of which there is one."""

    def largest(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return x[None]


def sharded_launches(arch: int) -> list[Recorded]:
    """What decodes over the pages of one rank launch, for each kind of policy."""
    problem = make_problem(
        [(1, 2400)],
        num_decodes=1,
        heads=1,
        group=16,
        dim=128,
        page_size=64,
        dtype=torch.bfloat16,
        max_seq_len=131072,
    )
    seen: list[Recorded] = []
    for policy in (
        SelectionPolicy(num_sink=64, window_size=512, top_k=32),
        SelectionPolicy(),
        SelectionPolicy(num_sink=4, window_size=1024),
    ):
        lse = torch.empty(problem.q.shape[:2])
        operands = problem.operands(torch.empty(problem.q.shape), lse=lse, ranks=OneRank())
        step = functools.partial(attend_phases, operands, problem.batch, policy)
        seen += record(step, arch, 132)
    return seen


def cell_launches(
    arch: int, dtype: torch.dtype, head_dim: int, group: int, fp8_cache: bool
) -> list[Recorded]:
    """What attends cells of two keys and weights: many requests, and drafts.

    Of few requests it is among :func:`launches`, over pages of one rank among
    :func:`sharded_launches`.
    """
    policy = SelectionPolicy(num_sink=64, window_size=512, top_k=32).by_records(4096)
    seen: list[Recorded] = []
    for requests, tokens in ((32, 1), (4, 4)):
        problem = make_problem(
            [(tokens, 2400)] * requests,
            num_decodes=requests,
            heads=8,
            group=group,
            dim=head_dim,
            page_size=64,
            dtype=dtype,
            max_seq_len=131072,
            cache_dtype=torch.float8_e4m3fn if fp8_cache else None,
        )
        shape = (requests, 8, policy.scored_blocks)
        chosen = Chosen(torch.empty(shape, dtype=torch.int32))
        call = functools.partial(
            attend_launch.attend_segment,
            problem.operands(torch.empty_like(problem.q)),
            Segment(problem.batch, policy),
            chosen,
        )
        seen += record(call, arch, 132)
    return seen


def choice_launches(
    arch: int, dtype: torch.dtype, head_dim: int, group: int, fp8_cache: bool, queries: list[int]
) -> list[Recorded]:
    """What chooses cells by records, in steps and at once, for so many tokens a request."""
    policy = SelectionPolicy(num_sink=64, window_size=512, top_k=32).by_records(4096)
    seen: list[Recorded] = []
    for tokens in queries:
        problem = make_problem(
            [(tokens, 2400)],
            num_decodes=1,
            heads=8,
            group=group,
            dim=head_dim,
            page_size=64,
            dtype=dtype,
            max_seq_len=131072,
            cache_dtype=torch.float8_e4m3fn if fp8_cache else None,
        )
        pages, heads, page_size, _ = problem.k_cache.shape
        records = torch.empty(pages, heads, page_bytes(page_size, head_dim), dtype=torch.uint8)
        problem = dataclasses.replace(problem, k_summary=records)
        operands = problem.operands(torch.empty_like(problem.q))
        call = functools.partial(choose_launch.select, operands, Segment(problem.batch, policy))
        with mock.patch.object(choose_launch, "_fits", return_value=False):
            seen += record(call, arch, 132)
        shared = dataclasses.replace(operands, ranks=OneRank())
        call_shared = functools.partial(choose_launch.select, shared, call.args[1])
        seen += [one for one in record(call_shared, arch, 132) if "SHARDED" in one.kwargs]
        at_once = record(call, arch, 132)
        seen += [
            launched
            for launched in at_once
            if launched.name in ("weigh_cells_kernel", "cut_cells_kernel")
        ]
    return seen


def parsed(words: list[str]) -> argparse.Namespace:
    """What to compile."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--arch", type=int, default=90)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--group", type=int, default=4)
    parser.add_argument("--only", default="", help="kernels with this in their names")
    parser.add_argument("--skip", help="the name of a kernel")
    parser.add_argument("--hopper", action="store_true", help="kernels for Hopper alone")
    parser.add_argument("--fp8-cache", action="store_true")
    parser.add_argument("--sharded", action="store_true")
    parser.add_argument("--cells", action="store_true")
    parser.add_argument("--choice", type=int, nargs="+", help="tokens of requests that choose")
    parser.add_argument("--wide", action="store_true", help="index tensors of 64 bits")
    parser.add_argument("--indexer", choices=["infllm", "seer"])
    parser.add_argument("--each", action="store_true", help="compile by each line of the input")
    return parser.parse_args(words)


def wide_problem(*args: Any, **options: Any) -> Problem:
    """A problem whose index tensors have 64 bits."""
    problem = problems.make_problem(*args, **options)
    names = ("block_table", "seq_lens", "cu_seqlens_q")
    wide = {name: getattr(problem.batch, name).long() for name in names}
    batch = dataclasses.replace(problem.batch, **wide, _derived={})
    return dataclasses.replace(problem, batch=batch)


def seen_launches(args: argparse.Namespace) -> list[Recorded]:
    """What is launched for these options."""
    shape = (args.arch, getattr(torch, args.dtype), args.head_dim, args.group)
    if args.sharded:
        return sharded_launches(args.arch)
    if args.cells:
        return cell_launches(*shape, args.fp8_cache)
    if args.choice:
        return choice_launches(*shape, args.fp8_cache, args.choice)
    if args.indexer:
        return learned_launches(args.indexer, *shape)
    return launches(*shape, args.fp8_cache)


def compile_all(args: argparse.Namespace) -> None:
    """Print a line for each kernel that is launched."""
    make = wide_problem if args.wide else make_problem
    with mock.patch.dict(globals(), make_problem=make):
        seen = seen_launches(args)
    if args.hopper:
        seen = [launched for launched in seen if launched.name in HOPPER]
    for launched in seen:
        if args.only in launched.name and launched.name != args.skip:
            print(json.dumps(compile_launch(launched, args.arch)), flush=True)


if __name__ == "__main__":
    asked = parsed(sys.argv[1:])
    if not asked.each:
        compile_all(asked)
    else:
        gc.freeze()  # no search for garbage looks at what was imported
        for line in sys.stdin:
            try:
                compile_all(parsed(line.split()))
            except Exception:
                print(json.dumps({"error": traceback.format_exc()}))
            print(flush=True)
