"""Time tile sizes of the NSA kernels on one GPU; winners go to ``sparsek_kernels/nsa/config.py``.

python benchmarks/tune_nsa.py --heads 64 --kv-heads 4 --tokens 32768
python benchmarks/tune_nsa.py --tokens 2048 --part 0/8     compile every eighth variant only

Prints a JSON line for each variant: the stage, what differs from the table, milliseconds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from triton.testing import do_bench

from sparsek_kernels.nsa import config as launch_common
from sparsek_kernels.nsa.compressed import launch as launch_compressed
from sparsek_kernels.nsa.compressed.problem import CompressedProblem
from sparsek_kernels.nsa.config import LaunchConfig, TileConfig, select_config
from sparsek_kernels.nsa.select import launch as launch_select
from sparsek_kernels.nsa.selected import launch_bwd as launch_selected_bwd
from sparsek_kernels.nsa.selected import launch_fwd as launch_selected
from sparsek_kernels.nsa.selected.problem import SelectedProblem
from sparsek_kernels.nsa.spec import NSASpec

DIM = 128
PORTABLE = {"compressed_hopper": None, "compressed_bwd_hopper": None}
PORTABLE_BWD = {"selected_bwd_hopper": None, "item_entries_bwd": 0.25}
PORTABLE_PARTS = {"selected_hopper": None, "selected_boxes": None}
PORTABLE_MERGE = {"combine_hopper": None}
Changes = dict[str, Any]
VARIANTS: dict[str, list[Changes]] = {
    "select": [
        {},
        {"select_hopper": None},
        {"select_hopper": (128, 64, 4, 3)},
    ],
    "selected": [
        {},
        {"selected_boxes": None},
        {"selected_boxes": None, "selected_hopper": (64, 64, 4, 3)},
        {"combine_hopper": (64, 64, 4, 4, 128)},
        *({"index_rows": x} for x in (0.5, 2.0)),
        *({"item_entries": x} for x in (0.5, 2.0)),
        {**PORTABLE_PARTS, "selected": (64, 64, 4, 1)},
        {**PORTABLE_MERGE, "combine": (64, 64, 4, 4)},
    ],
    "selected_bwd": [
        {},
        PORTABLE_BWD,
        *({"item_entries_bwd": x} for x in (0.5, 2.0, 4.0)),
        *({"chunk_rows_bwd": x} for x in (0.5, 2.0)),
    ],
    "compressed": [
        {},
        {"compressed_hopper": (128, 64, 4, 3)},
        *({**PORTABLE, "compressed": x} for x in ((128, 64, 8, 3), (128, 128, 8, 3))),
    ],
    "compressed_bwd": [
        {},
        *({**PORTABLE, "compressed_dq": x} for x in ((128, 64, 8, 2), (128, 64, 8, 3))),
        *({**PORTABLE, "compressed_dkdv": x} for x in ((64, 128, 8, 2), (64, 128, 8, 3))),
    ],
}


def changed(base: LaunchConfig, changes: Changes) -> LaunchConfig:
    """``base`` with tiles and ``None`` put in place, and numbers multiplied."""
    fields: Changes = {}
    for name, value in changes.items():
        if isinstance(value, tuple):
            value = TileConfig(*value)
        elif value is not None:
            value = int(getattr(base, name) * value)
        fields[name] = value
    return replace(base, token_major=False, **fields)


def stages(heads: int, kv_heads: int, tokens: int) -> dict[str, Callable[[], object]]:
    """One call of each stage's launcher."""
    spec, scale = NSASpec(), DIM**-0.5

    def draw(rows: int, count: int) -> torch.Tensor:
        return torch.randn(1, rows, count, DIM, device="cuda", dtype=torch.bfloat16)

    q, k, v, dout = (draw(tokens, n) for n in (heads, kv_heads, kv_heads, heads))
    k_cmp, v_cmp = (draw(spec.num_compressed(tokens), kv_heads) for _ in range(2))
    out, out_slc = torch.empty_like(q), torch.empty_like(q)
    lse = torch.empty(1, heads, tokens, device="cuda")
    lse_slc = torch.empty_like(lse)
    shape = (1, tokens, kv_heads, spec.top_n)
    indices = torch.empty(shape, dtype=torch.int32, device="cuda")

    # A problem keeps the parameters that it finds: each call has a new one.
    def compressed_problem() -> CompressedProblem:
        return CompressedProblem(q, k_cmp, v_cmp, tokens, None, spec, scale)

    def selected_problem() -> SelectedProblem:
        return SelectedProblem(q, k, v, indices, None, 64, scale)

    def compressed() -> None:
        launch_compressed.forward(compressed_problem(), out, lse)

    def backward() -> object:
        return launch_compressed.backward(compressed_problem(), out, lse, dout, None)

    def select() -> None:
        launch_select.select(compressed_problem(), lse, indices)

    def selected() -> None:
        launch_selected.forward(selected_problem(), out_slc, lse_slc)

    def selected_bwd() -> object:
        return launch_selected_bwd.backward(selected_problem(), out_slc, lse_slc, dout, None)

    for prepare in (compressed, select, selected):
        prepare()
    return {
        "select": select,
        "selected": selected,
        "selected_bwd": selected_bwd,
        "compressed": compressed,
        "compressed_bwd": backward,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=int, default=64)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--stage", action="append", choices=list(VARIANTS))
    parser.add_argument("--part", help="I/N: run each variant I, I + N, ... once, untimed")
    args = parser.parse_args()
    calls = stages(args.heads, args.kv_heads, args.tokens)
    todo = [(x, y) for x in args.stage or VARIANTS for y in VARIANTS[x]]
    if args.part:
        first, step = (int(x) for x in args.part.split("/"))
        todo = todo[first::step]
    for stage, changes in todo:

        def choose(*given: Any, changes: Changes = changes) -> LaunchConfig:
            return changed(select_config(*given), changes)

        launch_common.select_config = choose
        line = {"heads": args.heads, "kv_heads": args.kv_heads, "tokens": args.tokens}
        line |= {"stage": stage, "changes": changes}
        try:
            calls[stage]()
            torch.cuda.synchronize()
            if args.part:
                continue
            ms = do_bench(calls[stage], warmup=10, rep=60, return_mode="median")
            line |= {"ms": round(float(ms), 3)}
        except Exception as problem:  # a variant that does not fit on the chip is a result too
            line |= {"problem": str(problem)[:80]}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
