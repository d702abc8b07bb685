"""Every NSA kernel against the oracle, stage by stage; a script, because the interpreter and the
compiler cannot serve one process.

    TRITON_INTERPRET=1 python kernel_cases.py --device cpu       tiny shapes, no GPU
    python kernel_cases.py --size hopper --order "last first"    Hopper kernels too, no GPU
    python kernel_cases.py --device cuda --size gpu              the same cases at real sizes
    python kernel_cases.py --device cuda --size hopper           small ones on a GPU

Prints one line per check and exits 1 if any failed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any
from unittest import mock

import torch

from sparsek_kernels import nsa_attention
from sparsek_kernels.nsa.compress import launch as launch_compress
from sparsek_kernels.nsa.compressed import launch as launch_compressed
from sparsek_kernels.nsa.compressed.problem import CompressedProblem
from sparsek_kernels.nsa.config import BOX_GROUPS, TileConfig
from sparsek_kernels.nsa.gate import launch as launch_gate
from sparsek_kernels.nsa.gate.branches import PerBranch
from sparsek_kernels.nsa.select import launch as launch_select
from sparsek_kernels.nsa.select import launch_fused as launch_compressed_select
from sparsek_kernels.nsa.selected import launch_bwd as launch_selected_bwd
from sparsek_kernels.nsa.selected import launch_fwd as launch_selected
from sparsek_kernels.nsa.selected.problem import SelectedProblem
from sparsek_kernels.nsa.selected.share import share_blocks
from sparsek_kernels.nsa.sequences import compressed_rows
from sparsek_kernels.nsa.spec import NSASpec
from tests.kernels.gluon_interpreter import interpret
from tests.kernels.interpreter import hasten_interpreter
from tests.kernels.nsa import reference as ref
from tests.kernels.nsa.choice_cases import run_best, run_index, run_share, run_summed
from tests.kernels.nsa.judge import Judge
from tests.kernels.nsa.rotary_cases import run_rotary

PORTABLE: dict[str, Any] = dict.fromkeys(
    ("selected_hopper", "selected_boxes", "combine_hopper", "selected_bwd_hopper")
)
SMALL = NSASpec(8, 4, 16, 5)
FULL = NSASpec()


@dataclass(frozen=True)
class Case:
    """One shape: tokens (a list packs sequences), query and KV heads, head size, rules."""

    name: str
    lengths: int | tuple[int, ...]
    heads: tuple[int, int]
    dim: int
    spec: NSASpec = SMALL
    dtype: torch.dtype = torch.float32
    batch: int = 1
    num_q: int | None = None
    strided: bool = False


TINY = [
    Case("group4", 61, (4, 1), 16),
    Case("group1-packed", (1, 40, 5, 0, 33), (2, 2), 16),
    Case("group7-dim24-strided", 50, (7, 1), 24, strided=True),
    Case("batch2-last-queries", 70, (4, 2), 16, batch=2, num_q=9),
    Case("no-overlap-fp16", 80, (2, 1), 32, NSASpec(16, 16, 16, 4), torch.float16),
    Case("three-cells", 70, (3, 1), 16, NSASpec(8, 8, 24, 3, 1, 1)),
    Case("three-strides", 75, (2, 1), 16, NSASpec(12, 4, 16, 5)),
    Case("shorter-than-a-block", 7, (4, 1), 16),
    Case("free-selection", 66, (4, 1), 16, NSASpec(8, 4, 8, 4, 0, 0)),
]
BF16 = torch.bfloat16
GPU = [
    Case("g16", 2560, (32, 2), 128, FULL, BF16),
    Case("g8", 2048, (16, 2), 128, FULL, BF16),
    Case("g4", 2560, (16, 4), 128, FULL, BF16),
    Case("g7-dim64", 1531, (14, 2), 64, FULL, BF16),
    Case("g2-fp16", 2048, (4, 2), 64, FULL, torch.float16),
    Case("g1", 3000, (2, 2), 128, FULL, BF16),
    Case("g12-dim96", 1100, (12, 1), 96, FULL, BF16),
    Case("packed", (1, 1000, 31, 0, 64, 65, 2200), (16, 2), 128, FULL, BF16),
    Case("packed-g16", (700, 1, 0, 1500, 63), (32, 2), 128, FULL, BF16),
    Case("g32-dim64-fp16", 1700, (32, 1), 64, FULL, torch.float16, batch=2),
    Case("batch2-strided", 1111, (8, 2), 64, FULL, BF16, batch=2, strided=True),
    Case("g16-strided", 900, (32, 2), 128, FULL, BF16, batch=2, strided=True),
    Case("fp32", 700, (8, 2), 64, FULL, torch.float32),
    Case("last-queries", 3000, (16, 2), 128, FULL, BF16, num_q=77),
    Case("dim256", 700, (4, 1), 256, FULL, BF16),
]
FEW = NSASpec(top_n=5)  # fewer blocks than 330 tokens have
HOPPER = [
    Case("g4", 330, (8, 2), 64, FEW, BF16),
    Case("g16-fp16", 200, (16, 1), 64, FEW, torch.float16),
    Case("g7-dim128", 200, (7, 1), 128, FEW, BF16),
    Case("g8-dim128", 230, (8, 1), 128, FULL, BF16),
    Case("g1-batch2-strided", 193, (2, 2), 64, FEW, BF16, batch=2, strided=True),
    Case("packed", (1, 150, 0, 64, 65, 70), (4, 1), 64, FEW, BF16),
    Case("g16-shares", 470, (16, 1), 64, FEW, BF16),
]


def fits_hopper(case: Case, device: str, size: str) -> bool:
    """Whether the warp-specialised kernels could serve a case, however small."""
    here = torch.cuda.get_device_capability() == (9, 0) if device == "cuda" else size == "hopper"
    return here and case.dtype != torch.float32 and case.dim in (64, 128) and case.num_q is None


def gradients(
    function: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    inputs: tuple[torch.Tensor, ...],
    dout: torch.Tensor,
    dlse: torch.Tensor,
    dtype: torch.dtype,
) -> list[torch.Tensor]:
    """Outputs and input gradients of ``function`` in ``dtype``."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
    out, lse = function(*leaves)
    total = (out * dout.to(dtype)).sum()
    total = total + (torch.where(lse.isfinite(), lse, 0.0) * dlse.to(dtype)).sum()
    grads: tuple[torch.Tensor | None, ...] = (None,) * len(leaves)
    if total.requires_grad:
        grads = torch.autograd.grad(total, leaves, allow_unused=True)
    found = [torch.zeros_like(x) if g is None else g for g, x in zip(grads, leaves, strict=True)]
    return [out.detach(), lse.detach(), *found]


def run(case: Case, device: str, size: str, only_hopper: bool = False) -> int:
    """Check every stage of one case; the number of failures.

    ``only_hopper``: only stages of which the result may depend on order and timing.
    """
    hopper = fits_hopper(case, device, size)
    torch.manual_seed(0)
    judge, spec, dtype = Judge(case.name), case.spec, case.dtype
    packed = not isinstance(case.lengths, int)
    lengths = case.lengths if packed else (case.lengths,)
    total = sum(lengths)
    cu = torch.tensor([0, *lengths]).cumsum(0).int().to(device) if packed else None
    if cu is not None:
        cu = torch.stack((cu, cu + 5), dim=1)[:, 0]  # a column of a table, not side by side
    num_q = case.num_q or total

    def draw(rows: int, heads: int) -> torch.Tensor:
        shape = (case.batch, rows, heads, case.dim)
        if case.strided:
            shape = (case.batch, heads, rows, case.dim)
        x = torch.randn(shape).to(dtype).to(device)
        return x.transpose(1, 2) if case.strided else x

    q, dout = draw(num_q, case.heads[0]), draw(num_q, case.heads[0])
    k, v = draw(total, case.heads[1]), draw(total, case.heads[1])
    dlse = torch.randn(case.batch, case.heads[0], num_q).to(device)
    scale = case.dim**-0.5
    group = case.heads[0] // case.heads[1]
    edges = cu.tolist() if cu is not None else [0, total]
    bounds = list(pairwise(edges)) if packed else [(0, total)] * case.batch

    # compression
    def pooled(x: torch.Tensor) -> torch.Tensor:
        parts = [
            ref.compress_reference(
                x[0 if packed else b, lo:hi], spec.cmp_block_size, spec.cmp_stride
            )
            for b, (lo, hi) in enumerate(bounds)
        ]
        return torch.cat(parts)[None] if packed else torch.stack(parts)

    rows = compressed_rows(cu, total, spec.cmp_block_size, spec.cmp_stride)
    k_cmp = torch.full((case.batch, rows, *k.shape[2:]), float("nan"), dtype=dtype, device=device)
    v_cmp = k_cmp.clone()
    launch_compress.mean_pool_forward((k, v), (k_cmp, v_cmp), cu, spec)
    used = pooled(k.double()).shape[1]
    judge.error("mean pool", k_cmp[:, :used], pooled(k), pooled(k.double()))
    judge.say(bool((k_cmp[:, used:] == 0).all()), "mean pool tail", "zeros")
    dcmp = torch.randn(k_cmp.shape).to(dtype).to(device)
    dx = torch.full_like(k, float("nan"), memory_format=torch.contiguous_format)
    launch_compress.mean_pool_backward([dcmp], [dx], cu, spec)
    leaf = k.double().requires_grad_()
    (exact,) = torch.autograd.grad(pooled(leaf), leaf, dcmp[:, :used].double())
    judge.error("mean pool backward", dx, exact.to(dtype), exact)

    # compressed attention
    def split(x: torch.Tensor, b: int) -> tuple[torch.Tensor, int, slice]:
        lo, hi = bounds[b]
        if packed:
            first = sum(spec.num_compressed(n) for n in lengths[:b])
            return x[0, lo:hi], hi - lo, slice(first, first + spec.num_compressed(hi - lo))
        return x[b], total, slice(0, spec.num_compressed(total))

    def join(
        parts: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if packed:
            return torch.cat([p[0] for p in parts])[None], torch.cat([p[1] for p in parts], 1)[None]
        return torch.stack([p[0] for p in parts]), torch.stack([p[1] for p in parts])

    probs: list[torch.Tensor] = []

    def compressed(q: torch.Tensor, kc: torch.Tensor, vc: torch.Tensor) -> tuple[torch.Tensor, ...]:
        parts = []
        probs.clear()
        for b in range(len(bounds)):
            part, length, at = split(q, b)
            i = 0 if packed else b
            seen = ref.compressed_mask(
                part.shape[0], length, at.stop - at.start, spec.cmp_block_size, spec.cmp_stride
            ).to(device)
            found = ref.masked_attention(part, kc[i, at], vc[i, at], seen, scale)
            probs.append(found[2].detach())
            parts.append(found[:2])
        return join(parts)

    out = torch.full(q.shape, float("nan"), dtype=dtype, device=device)
    lse = torch.full(dlse.shape, float("nan"), dtype=torch.float32, device=device)
    problem = CompressedProblem(q, k_cmp, v_cmp, total, cu, spec, scale)
    base = problem.config
    plain = gradients(compressed, (q, k_cmp, v_cmp), dout, dlse, dtype)
    exact_all = gradients(compressed, (q, k_cmp, v_cmp), dout, dlse, torch.float64)
    kinds = {"portable ": replace(base, compressed_hopper=None, compressed_bwd_hopper=None)}
    if hopper:
        kinds["hopper "] = replace(
            base,
            compressed_hopper=TileConfig(128, 128, 4, 2),
            compressed_bwd_hopper=TileConfig(64, 128, 8, 3),
        )
    if only_hopper:
        del kinds["portable "]
    for kind, config in kinds.items():
        out.fill_(float("nan"))
        lse.fill_(float("nan"))
        tuned = replace(problem, tuned=config)
        launch_compressed.forward(tuned, out, lse)
        judge.error(f"{kind}compressed out", out, plain[0], exact_all[0])
        judge.error(f"{kind}compressed lse", lse, exact_all[1].to(dtype), exact_all[1])
        dead = lse == float("-inf")
        found = launch_compressed.backward(tuned, out, lse, dout, dlse.masked_fill(dead, 0.0))
        for name, ours, low, high in zip(
            ("dq", "dk_cmp", "dv_cmp"), found, plain[2:], exact_all[2:], strict=True
        ):
            judge.error(f"{kind}compressed {name}", ours, low, high)

    # selection
    shape = (case.batch, num_q, case.heads[1], spec.top_n)
    kinds = {"": replace(base, select_hopper=None)}
    if hopper:
        kinds["hopper "] = replace(base, select_hopper=TileConfig(128, 64, 4, 2))
        kinds["fused "] = replace(base, compressed_hopper=TileConfig(128, 128, 4, 2))
    if only_hopper:
        del kinds[""]
    for kind, config in kinds.items():
        tuned = replace(problem, tuned=config)
        indices = torch.full(shape, -7, dtype=torch.int32, device=device)
        if kind == "fused ":
            fused, sums = torch.full_like(out, float("nan")), torch.full_like(lse, float("nan"))
            if device == "cpu":  # a few rows at a time
                launch_compressed_select._SCRATCH_SUMS = 1
                launch_compressed_select._LEAST_ROWS = 48
            launch_compressed_select.attend_and_select(tuned, fused, sums, indices)
            judge.error("fused compressed out", fused, plain[0], exact_all[0])
            judge.error("fused compressed lse", sums, exact_all[1].to(dtype), exact_all[1])
        else:
            launch_select.select(tuned, lse, indices)
        equal, lost = [], 0.0
        for b in range(len(bounds)):
            _, length, _ = split(q, b)
            lo = bounds[b][0] if packed else 0
            scores = ref.block_scores(
                probs[b].cpu(), spec.num_selectable(length), case.heads[1], spec.cmp_block_size,
                spec.cmp_stride, spec.sel_block_size,
            )  # fmt: skip
            want = ref.select_reference(
                scores, length, spec.sel_block_size, spec.top_n, spec.num_init_blocks,
                spec.num_local_blocks,
            )  # fmt: skip
            have = indices[0 if packed else b, lo : lo + want.shape[0]].cpu()
            equal.append((have == want).flatten())
            if want.numel():
                wanted, found_mass = (
                    torch.where(
                        x >= 0, scores.transpose(0, 1).gather(2, x.clamp(min=0).long()), 0.0
                    )
                    for x in (want, have)
                )
                lost = max(lost, float((wanted.sum(-1) - found_mass.sum(-1)).abs().max()))
        share = float(torch.cat(equal).double().mean())
        near = 1e-5 if dtype == torch.float32 else 2e-3
        judge.say(
            share > 0.98 and lost < near,
            f"{kind}selection",
            f"equal {share:.4f}, mass lost {lost:.1e}",
        )

    # selected attention, both designs, on the selection just made
    def selected(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        parts = []
        for b in range(len(bounds)):
            part, length, _ = split(q, b)
            chosen = split(indices, b)[0]
            lo, hi = bounds[b]
            i = 0 if packed else b
            mask = ref.selected_mask(chosen.cpu(), length, spec.sel_block_size, group).to(device)
            parts.append(ref.masked_attention(part, k[i, lo:hi], v[i, lo:hi], mask, scale)[:2])
        return join(parts)

    plain = gradients(selected, (q, k, v), dout, dlse, dtype)
    exact_all = gradients(selected, (q, k, v), dout, dlse, torch.float64)
    rows_all = case.batch * num_q
    chunked = replace(
        base, token_major=False, chunk_rows=-(-rows_all // 3),
        chunk_rows_bwd=-(-rows_all // 3), index_rows=-(-rows_all // 7),
        item_entries=max(rows_all // 9, 5), item_entries_bwd=max(rows_all // 9, 5),
        **PORTABLE,
    )  # fmt: skip
    designs = {
        "token-major": replace(base, token_major=True),
        "block-major": replace(base, token_major=False, **PORTABLE),
        "block-major chunks": chunked,
    }
    if hopper:
        for design in ("block-major", "block-major chunks"):
            designs[f"hopper {design}"] = replace(
                designs[design],
                selected_hopper=TileConfig(64, 64, 4, 4),
                combine_hopper=TileConfig(64, 64, 4, 5, 128),
                selected_bwd_hopper=TileConfig(128, 64, 8, 2),
            )
            if group in BOX_GROUPS:
                designs[f"boxes {design}"] = replace(
                    designs[f"hopper {design}"], selected_boxes=TileConfig(64, 64, 4, 4, 80)
                )
    if only_hopper:
        designs = {name: x for name, x in designs.items() if name.startswith(("hopper", "boxes"))}
    problem = SelectedProblem(q, k, v, indices, cu, spec.sel_block_size, scale)
    kept = {design: problem.new_index().fill_(-1) for design in designs}
    for design, config in designs.items():
        out.fill_(float("nan"))
        lse.fill_(float("nan"))
        launch_selected.forward(replace(problem, tuned=config, index=kept[design]), out, lse)
        judge.error(f"{design} out", out, plain[0], exact_all[0])
        judge.error(f"{design} lse", lse, exact_all[1].to(dtype), exact_all[1])
        if config.combine_hopper and case.batch == 1 and not packed and group >= 4:
            counts = share_blocks(replace(problem, tuned=config), config.combine_hopper, 1)
            told = [] if counts is None else counts.counts.sum((0, 1)).tolist()
            shares = told[0] > 0 if told else group < 8  # small groups: at times not
            judge.say(shares, f"{design} shared blocks", f"{told}")
    # Boxes only make parts: what follows takes them as it takes those of the other kernel.
    designs = {name: x for name, x in designs.items() if not name.startswith("boxes")}
    backwards = {name: x for name, x in designs.items() if name != "token-major"}
    for design, config in backwards.items():
        left = "chunks" in design
        tuned = replace(problem, tuned=config, index=kept[design])
        if not left:  # as of few tokens, whose forward pass sorts nothing
            few = replace(config, token_major=True)
            tuned = replace(problem, tuned=few, index=problem.new_index().fill_(-1))
        with mock.patch.object(
            launch_selected_bwd, "sort_selection", wraps=launch_selected_bwd.sort_selection
        ) as sort:
            found = launch_selected_bwd.backward(tuned, out, lse, dout, dlse)
        judge.say(sort.call_count == (not left), f"{design} sorts", f"{sort.call_count}")
        for name, ours, low, high in zip(
            ("dq", "dk", "dv"), found, plain[2:], exact_all[2:], strict=True
        ):
            judge.error(f"{design} {name}", ours, low, high)
    if not only_hopper:
        acc = torch.randn(case.batch, case.heads[0], num_q, case.dim).to(device)
        delta = (dout.float() * out.float()).sum(-1).transpose(1, 2) - dlse
        tuned = replace(problem, tuned=designs["block-major"])
        summed, _, _ = launch_selected_bwd.backward_rows(tuned, dout, lse, delta.contiguous(), acc)
        others = scale * acc.transpose(1, 2)
        low, high = (x[2] + others.to(x[2].dtype) for x in (plain, exact_all))
        judge.error("dq and that of others", summed, low, high)

    # gates
    cmp, swa = (torch.randn(q.shape).to(dtype).to(device) for _ in range(2))
    weights = [torch.rand(q.shape[:3]).to(device) for _ in range(3)]
    for design, config in designs.items():
        tuned = replace(problem, tuned=config)
        launch_selected.forward_gated(tuned, out.fill_(float("nan")), (cmp, swa), weights)
        low, high = (
            sum(g.to(x[0].dtype)[..., None] * b.to(x[0].dtype) for g, b in
                zip(weights, (cmp, x[0], swa), strict=True))
            for x in (plain, exact_all)
        )  # fmt: skip
        judge.error(f"{design} gated", out, low, high)
    if only_hopper:
        return judge.failed
    branches = [torch.randn(q.shape).to(dtype).to(device) for _ in range(3)]
    gates = [torch.rand(q.shape[:3]).to(device) for _ in range(3)]
    launch_gate.forward(out, branches, gates)
    leaves = [x.double().requires_grad_() for x in (*branches, *gates)]
    exact = sum(b * g[..., None] for b, g in zip(leaves[:3], leaves[3:], strict=True))
    judge.error("gate", out, exact.detach().to(dtype), exact.detach())
    grads = [torch.full_like(x, float("nan")) for x in (*branches, *gates)]
    launch_gate.backward(grads[:3], grads[3:], dout, branches, gates)
    rows_want = []
    for i, want in enumerate(torch.autograd.grad(exact, leaves, dout.double())):
        judge.error(f"gate gradient {i}", grads[i], want.to(grads[i].dtype), want)
        if i >= 3:
            rows_want.append(want)
    gates[1][:, ::3] = 0.0
    found, dots, folded = launch_gate.gate_rows(
        dout, PerBranch(*branches), PerBranch(*gates), PerBranch(lse, lse, lse)
    )
    for i, want in enumerate(rows_want):
        judge.error(f"gate rows {i}", found[i], want.to(found[i].dtype), want)
        judge.error(f"gate dots {i}", dots[i], want.transpose(1, 2).float(), want.transpose(1, 2))
        exact = lse.double() - gates[i].transpose(1, 2).double().log()
        judge.error(f"gate in lse {i}", folded[i], exact.float(), exact)
    if device == "cuda":
        run_attention(judge, (q, k, v, *gates), dout, cu, spec)
    return judge.failed


def run_attention(
    judge: Judge,
    inputs: tuple[torch.Tensor, ...],
    dout: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    spec: NSASpec,
) -> None:
    """Check the whole attention, whose backward pass is one operator."""
    options = {
        **{"cmp_block_size": spec.cmp_block_size, "cmp_stride": spec.cmp_stride},
        **{"sel_block_size": spec.sel_block_size, "top_n": spec.top_n},
        **{"num_init_blocks": spec.num_init_blocks, "num_local_blocks": spec.num_local_blocks},
        "cu_seqlens": cu_seqlens,
    }
    leaves = [x.detach().requires_grad_() for x in inputs]
    out, indices = nsa_attention(*leaves, **options, return_block_indices=True)
    ours = (out, *torch.autograd.grad(out, leaves, dout))
    wanted = []
    for dtype in (inputs[0].dtype, torch.float64):
        leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
        with torch.device(inputs[0].device):
            found = ref.nsa_reference(*leaves, **options, block_indices=indices).out
        wanted.append((found, *torch.autograd.grad(found, leaves, dout.to(dtype))))
    names = ("out", "dq", "dk", "dv", "dg_cmp", "dg_slc", "dg_swa")
    for name, have, plain, exact in zip(names, ours, *wanted, strict=True):
        judge.error(f"attention {name}", have.detach(), plain.detach(), exact.detach())


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", choices=["tiny", "hopper", "gpu"], default="tiny")
    parser.add_argument("--order", default="first first", help="of partitions, at size hopper")
    parser.add_argument(
        "--early", action="store_true", help="products before copies, at size hopper"
    )
    parser.add_argument(
        "--only-hopper", action="store_true", help="nothing that order and timing cannot change"
    )
    parser.add_argument("--only", default="", help="cases with this in their names")
    parser.add_argument("--part", default="0/1", help="I/N: cases I, I + N, ...")
    args = parser.parse_args()
    if args.device == "cpu":
        torch.set_num_threads(1)
    if args.size == "tiny":
        hasten_interpreter()
    first, step = (int(x) for x in args.part.split("/"))
    cases = {"tiny": TINY, "hopper": HOPPER, "gpu": GPU}[args.size]
    cases = [case for case in cases[first::step] if args.only in case.name]
    if args.size == "hopper" and args.device == "cpu":
        with interpret(args.order, not args.early):
            failed = sum(run(case, "cpu", args.size, args.only_hopper) for case in cases)
        print(f"{failed} failed")
        return 1 if failed else 0
    failed = sum(run(case, args.device, args.size) for case in cases)
    if args.only in "best" and first == 0:
        for num_blocks in (40, 300, 1100) if args.device == "cpu" else (40, 300, 1100, 16384):
            for num_init in (0, 1):
                failed += run_best(num_blocks, num_init, args.device)
        failed += run_summed(args.device)
        kinds = product((False, True), (1, 2, 9))
        failed += sum(run_index(*kind, args.device) for kind in kinds)
        failed += sum(run_share(group, args.device) for group in (16, 4, 1))
        failed += run_rotary(args.device)
    print(f"{failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
