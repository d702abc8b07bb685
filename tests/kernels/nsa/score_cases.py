"""Block scores of every kernel, place by place, against the oracle; a script, because interpreters
and the compiler cannot serve one process.

    python score_cases.py --order "last first" --early           no GPU
    python score_cases.py --device cuda --tokens 5000            the same cases, longer

Prints one line per check and exits 1 if any failed.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
from dataclasses import dataclass, replace

import torch

from sparsek_kernels.nsa.compressed import launch_sm90 as launch_compressed_hopper
from sparsek_kernels.nsa.compressed.problem import CompressedProblem
from sparsek_kernels.nsa.config import TileConfig, select_config
from sparsek_kernels.nsa.select import launch as launch_select
from sparsek_kernels.nsa.sequences import compressed_rows, spans
from sparsek_kernels.nsa.spec import NSASpec
from tests.kernels.gluon_interpreter import interpret
from tests.kernels.nsa import reference as ref

FULL = NSASpec()
DENSE = NSASpec(8, 4, 16, 5)  # FULL's strides per block, in fewer tokens: more tiles of keys
LONG = 1 << 20  # tokens of a sequence that Hopper's kernels serve


@dataclass(frozen=True)
class Case:
    """Query and KV heads, rules, and the shares of all tokens that packed sequences have.

    Queries are ``sharp`` times as long as drawn, a few of them 30 times if there are ``outliers``:
    their scores have no useful bound.
    """

    heads: tuple[int, int]
    spec: NSASpec = DENSE
    shares: tuple[float, ...] = ()
    batch: int = 1
    sharp: float = 1.0
    outliers: bool = False

    @property
    def name(self) -> str:
        group, spec = self.heads[0] // self.heads[1], self.spec
        rules = f"{spec.strides_per_cmp}/{spec.strides_per_sel}"
        kind = f"{' packed' * bool(self.shares)}{' sharp' * (self.sharp > 1)}"
        return f"group{group} {rules}{kind}{' outliers' * self.outliers}"


CASES = [
    *(Case((group, 1)) for group in (1, 2, 4, 7, 8, 12, 16, 32)),
    *(Case((2 * group, 2), shares=(0.5, 0.0, 0.02, 0.47)) for group in (1, 4, 7, 16)),
    Case((8, 2), batch=2),
    Case((4, 1), sharp=12.0),
    Case((4, 1), outliers=True),
    Case((4, 2), shares=(0.6, 0.4), outliers=True),
    Case((4, 1), FULL),
    Case((4, 1), NSASpec(4, 4, 16, 5)),
    Case((4, 1), NSASpec(16, 4, 16, 5)),
    Case((4, 1), NSASpec(4, 4, 4, 5)),
    Case((16, 1), NSASpec(8, 4, 8, 5)),
    Case((8, 1), NSASpec(12, 4, 32, 5)),
    Case((2, 1), NSASpec(8, 4, 64, 5)),
]


def summed(
    problem: CompressedProblem, tile: TileConfig, lse: torch.Tensor, rows: range
) -> torch.Tensor:
    """Scores ``[B, rows, Hkv, blocks]`` that compressed attention leaves for ``rows``.

    They are made of its own log-sum-exps, which must be ``lse`` there.
    """
    q, (batch, _, num_heads, _) = problem.q, problem.q.shape
    arranged = launch_compressed_hopper.arrange(problem)
    pitch = arranged.k.shape[1] // 128
    size = (batch, len(rows), num_heads, pitch)
    words = torch.full((*size, 16), -1, dtype=torch.int32, device=q.device)
    maxima = torch.full(size, float("nan"), device=q.device)
    sums = launch_compressed_hopper.BlockSums(words, maxima, rows.start, len(rows), pitch)
    own, out = torch.full_like(lse, float("nan")), torch.empty_like(q)
    launch_compressed_hopper.forward(problem, tile, arranged, out, own, sums)
    here = slice(rows.start, rows.stop)
    torch.testing.assert_close(own[..., here], lse[..., here], atol=1e-3, rtol=0)
    bits = torch.stack((words & 0xFFFF, (words >> 16) & 0xFFFF), -1) << 13
    held = (bits + (67 << 23)).view(torch.float32).reshape(*size, 32)
    share = torch.exp2(maxima - own[..., here].transpose(1, 2)[..., None] / math.log(2))
    scores = held * torch.where(own[..., here].isinf().mT[..., None], 0.0, share)[..., None]
    return scores.view(batch, len(rows), problem.shape.num_kv_heads, -1, pitch * 32).sum(3)


def run(case: Case, tokens: int, device: str, launched: list[str] | None, only_hopper: bool) -> int:
    """Check every place that the choice reads; the number of failures.

    ``launched`` lists the kernels that were interpreted; ``only_hopper``: of kernels, only those
    of which the result may depend on order and timing.
    """
    torch.manual_seed(0)
    (num_heads, num_kv_heads), spec, dim = case.heads, case.spec, 64
    lengths = [int(tokens * share) for share in case.shares] or [tokens]
    tokens = sum(lengths)
    cu = torch.tensor([0, *lengths]).cumsum(0).int().to(device) if case.shares else None
    rows = compressed_rows(cu, tokens, spec.cmp_block_size, spec.cmp_stride)
    q = case.sharp * torch.randn(case.batch, tokens, num_heads, dim)
    if case.outliers:
        q[:, 5::211, -1] *= 30
    q = q.bfloat16().to(device)
    k = torch.randn(case.batch, rows, num_kv_heads, dim).bfloat16().to(device)
    lse = torch.full((case.batch, num_heads, tokens), float("nan"), device=device)
    pitch = launch_select.score_pitch(spec.num_selectable(tokens))
    exact = torch.full((case.batch, tokens, num_kv_heads, pitch), float("nan"), device=device)
    read = torch.zeros(exact.shape, dtype=torch.bool, device=device)
    for span in spans(cu, case.batch, tokens, tokens, spec.cmp_block_size, spec.cmp_stride):
        b, length = span.batch, span.rows.stop - span.rows.start
        keys = k[b, span.compressed].double()
        seen = ref.compressed_mask(
            length, length, keys.shape[0], spec.cmp_block_size, spec.cmp_stride
        ).to(device)
        _, sums, probs = ref.masked_attention(q[b, span.rows].double(), keys, keys, seen, dim**-0.5)
        lse[b, :, span.rows] = sums.float()
        blocks = spec.num_selectable(length)
        wanted = ref.block_scores(
            probs, blocks, num_kv_heads, spec.cmp_block_size, spec.cmp_stride, spec.sel_block_size
        )
        exact[b, span.rows, :, :blocks] = wanted.transpose(0, 1).float()
        own = torch.arange(length, device=device) // spec.sel_block_size
        held = torch.arange(pitch, device=device) <= own[:, None] - spec.num_local_blocks
        read[b, span.rows] = held[:, None, :]
    problem = CompressedProblem(q, k, k, tokens, cu, spec, dim**-0.5)
    long = replace(problem.shape, num_q=LONG, num_k=LONG)
    fused = select_config(long, spec.top_n, q.dtype, 90)
    tiles = {
        "nsa_block_scores_kernel": None,
        "nsa_block_scores_hopper_kernel": fused.select_hopper,
    }
    if only_hopper:
        del tiles["nsa_block_scores_kernel"]
    failed = 0
    tile = fused.compressed_hopper
    if (spec.strides_per_cmp, spec.strides_per_sel) == (2, 4) and tile is not None:
        worst, good, kernel = 0.0, True, "nsa_compressed_hopper_fwd_kernel"
        for rows in (range(tokens), range(tokens // 3, tokens // 2)):
            found = summed(problem, tile, lse, rows)
            here = read[:, rows.start : rows.stop]
            want = exact[:, rows.start : rows.stop][here]
            found = torch.nn.functional.pad(found, (0, max(pitch - found.shape[-1], 0)))
            error = (found[..., :pitch][here] - want).abs() / (want + 1e-12)
            worst = max(worst, float(error.max()) if len(error) else 0.0)
        good &= worst < 6e-4 and (launched is None or launched[-1] == kernel)
        failed += not good
        print(f"{'ok  ' if good else 'FAIL'} {case.name:20} {kernel} worst {worst:.1e}", flush=True)
    for kernel, tile in tiles.items():
        tuned = replace(problem, tuned=replace(problem.config, select_hopper=tile))
        worst, good = 0.0, True
        for first, last in ((0, tokens), (tokens // 3, tokens // 2)):
            found = torch.full_like(exact[:, first:last], float("nan"))
            launch_select.score(tuned, lse, found, first)
            here = read[:, first:last]
            error = (found[here] - exact[:, first:last][here]).abs()
            good &= bool((error < 1e-5 * (1 + 2 * num_heads // num_kv_heads)).all())
            worst = max(worst, float(error.max()) if len(error) else 0.0)
            good &= launched is None or launched[-1] == kernel
        failed += not good
        print(f"{'ok  ' if good else 'FAIL'} {case.name:20} {kernel} worst {worst:.1e}", flush=True)
    return failed


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--order", default="first first", help="of partitions, without a GPU")
    parser.add_argument(
        "--early", action="store_true", help="products before copies, without a GPU"
    )
    parser.add_argument(
        "--only-hopper", action="store_true", help="nothing that order and timing cannot change"
    )
    parser.add_argument("--only", default="", help="cases with this in their names")
    parser.add_argument("--part", default="0/1", help="I/N: cases I, I + N, ...")
    args = parser.parse_args()
    if args.device == "cpu":
        torch.set_num_threads(1)
        here = interpret(args.order, not args.early)
    else:
        here = contextlib.nullcontext()
    with here as launched:
        first, step = (int(x) for x in args.part.split("/"))
        cases = [case for case in CASES[first::step] if args.only in case.name]
        failed = sum(
            run(case, args.tokens, args.device, launched, args.only_hopper) for case in cases
        )
    print(f"{failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
