"""Decoded tokens that choose by records against FlashAttention-3.

    python benchmarks/decode_by_records.py --commit COMMIT --csv RESULT.csv

Every call is checked first: what one KV head of one request chooses and attends, against float64.
All providers of a case are timed in turn, each replayed from a CUDA graph with cold caches; those
named ``choosing`` only choose.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from sparsek_backend.bench.ops.paged_inputs import DEFAULTS, PagedInputs, make_inputs
from sparsek_backend.bench.ops.peers import fa3_paged
from sparsek_backend.bench.registry import Case, Unavailable
from sparsek_backend.bench.spec import parse_spec
from sparsek_backend.bench.timing import make_timed, time_interleaved
from sparsek_kernels.paged import PageRecords, SelectionPolicy, StepPolicy, paged_attention
from sparsek_kernels.paged.attend.reference import attend_reference, list_logs
from sparsek_kernels.paged.batch import PagedBatch
from sparsek_kernels.paged.index.base import Indexers
from sparsek_kernels.paged.index.page_records.reference import choose_reference, list_error
from sparsek_kernels.paged.operands import PagedOperands
from sparsek_kernels.paged.plan import Segment

CASES = {
    "32x64k": "32q1s64k",
    "32x16k": "32q1s16k",
    "32x8k": "32q1s8k",
    "4x128k": "4q1s128k",
    "4x32k": "4q1s32k",
    "1x128k": "1q1s128k",
    "1x1m": "1q1s1m",
    "4 tokens, 4x128k": "4q4s128k",
    "4x2k of 128k": "4q1s2k",
    "4x8k of 128k": "4q1s8k",
    "32x2k of 128k": "32q1s2k",
}
"""Those *of 128k* are a server's: their launches are for contexts up to 128k, as a graph has them,
and what is below 8k attends everything."""


@dataclass(frozen=True)
class Call:
    """A way to attend.

    Args:
        name: what the table calls it.
        run: one call, which returns the output.
        policy: of decoded tokens by records; ``None`` for the others.
    """

    name: str
    run: Callable[[], torch.Tensor]
    policy: SelectionPolicy | None = None


def by_records(inputs: PagedInputs, batch: PagedBatch, tokens: int) -> Call:
    """Attention that chooses ``tokens`` keys by records."""
    dense_below = 8192 if inputs.max_len else 0
    tiles = SelectionPolicy(num_sink=64, window_size=512, top_k=96, dense_below=dense_below)
    policy = tiles.by_records(tokens)
    index, out = PageRecords(), torch.empty_like(inputs.q)
    step, indexers = StepPolicy(SelectionPolicy(), policy), Indexers(decode=index)

    def run() -> torch.Tensor:
        return paged_attention(
            inputs.q, inputs.k_cache, inputs.v_cache, batch, step, k_summary=inputs.k_summary,
            indexers=indexers, out=out,
        )  # fmt: skip

    return Call(f"records {tokens}", run, policy)


def choosing(inputs: PagedInputs, batch: PagedBatch, call: Call) -> Call:
    """The choice of a call by records, without attention."""
    assert call.policy is not None
    operands = PagedOperands(
        inputs.q, inputs.k_cache, inputs.v_cache, inputs.q, inputs.softmax_scale, inputs.k_summary
    )
    segment, index = Segment(batch, call.policy), PageRecords()
    return Call(
        f"choosing{call.name.removeprefix('records')}",
        lambda: index.select(operands, segment).indices,
    )


TOLERANCES = (0.01, 0.02, 0.04, 0.07, 0.1)
"""Relative errors of scores that are tried: the kernels' weights have 8 bits."""


def error_of(inputs: PagedInputs, call: Call, batch: PagedBatch) -> tuple[float, float]:
    """Of one request's last token and KV head: the error of scores, and that of the output.

    The first is the least of :data:`TOLERANCES` by which scores that are a little off explain what
    was drawn, infinity where none does.  The second is over the list's own entries, relative to the
    largest value.
    """
    assert call.policy is not None
    out, new = call.run(), inputs.query_lens[0]
    position, row, group = inputs.seq_lens[0] - new, new - 1, inputs.group
    k, v = (x.cpu()[:, None] for x in inputs.keys_of(0, 1))
    heads, scale = slice(group, 2 * group), inputs.softmax_scale
    q, visible = inputs.q[:new, heads].cpu(), torch.ones(1, 1, len(k), dtype=torch.bool)
    wrong, logs = 0.0, None
    found = choose_reference(q, k, position, call.policy, scale)
    if found is not None:
        operands = PagedOperands(
            inputs.q, inputs.k_cache, inputs.v_cache, out, scale, inputs.k_summary
        )
        chosen = PageRecords().select(operands, Segment(batch, call.policy))
        entries = chosen.indices[0, 1].tolist()
        wrong = next((x for x in TOLERANCES if not list_error(found, 0, entries, x)), math.inf)
        logs = list_logs([entries], len(k), position, call.policy)
    wanted = attend_reference(q[-1:], k, v, visible, scale, logs=logs)[0]
    error = (out[row, heads].double().cpu() - wanted).abs().max()
    return wrong, float(error / wanted.abs().max())


def rows_of(name: str, spec: str, tokens: list[int], commit: str) -> list[dict[str, object]]:
    """Times of all providers of one case."""
    device = torch.device("cuda")
    sizes = {**DEFAULTS, "top_k": 192, "max_len": 131072 if "of 128k" in name else 0}
    inputs = make_inputs(Case(name, parse_spec(spec), sizes), device)
    batch = inputs.batch(inputs.query_lens, inputs.seq_lens, len(inputs.seq_lens))
    calls: list[Call] = []
    try:
        dense = fa3_paged(inputs.q, inputs.k_cache, inputs.v_cache, inputs.whole_step(0))
        calls.append(Call("fa3", lambda: dense()[0]))
    except Unavailable as reason:
        print(f"fa3: {reason}", flush=True)
    calls += [by_records(inputs, batch, count) for count in tokens]
    errors = {}
    for call in calls:
        call.run()
        torch.cuda.synchronize()
        if call.policy is not None:
            errors[call.name] = wrong, error = error_of(inputs, call, batch)
            if not wrong <= TOLERANCES[-1] or not error <= 0.02:
                raise RuntimeError(
                    f"{name} {call.name}: scores wrong by {wrong:.1%}, outputs by {error:.2%}"
                )
    calls += [choosing(inputs, batch, call) for call in calls if call.policy is not None]
    timed = [make_timed(call.run, timing="cold", device=device, graph=True) for call in calls]
    times = time_interleaved(timed, device=device, budget_ms=300.0, max_samples=25)
    found = {call.name: time.median_ms for call, time in zip(calls, times, strict=True)}
    rows = []
    for call, time in zip(calls, times, strict=True):
        ratio = found["fa3"] / time.median_ms if "fa3" in found else math.nan
        rows.append(
            {
                "case": name,
                "provider": call.name,
                "us": round(time.median_ms * 1e3, 2),
                "p20_us": round(time.p20_ms * 1e3, 2),
                "p80_us": round(time.p80_ms * 1e3, 2),
                "fa3_over": round(ratio, 3),
                "error_of_scores": errors[call.name][0] if call.name in errors else "",
                "error": f"{errors[call.name][1]:.2e}" if call.name in errors else "",
                "gpu": torch.cuda.get_device_name(),
                "commit": commit,
            }
        )
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", action="append", choices=sorted(CASES), help="default: all")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 3072, 2048])
    parser.add_argument("--commit", required=True)
    parser.add_argument("--csv", type=Path, required=True)
    options = parser.parse_args()
    rows = []
    for name in options.case or CASES:
        rows += rows_of(name, CASES[name], options.tokens, options.commit)
        torch.cuda.empty_cache()
        with options.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
