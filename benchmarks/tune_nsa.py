"""Time tile sizes of the NSA kernels on one GPU; winners go to ``sparsek_kernels/nsa/config.py``.

python benchmarks/tune_nsa.py --heads 64 --kv-heads 4 --tokens 32768
python benchmarks/tune_nsa.py --tokens 2048 --part 0/8     compile every eighth variant only
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from triton.testing import do_bench

from sparsek_kernels.nsa import launch_common, launch_compressed, launch_select, launch_selected
from sparsek_kernels.nsa.config import TileConfig, select_config
from sparsek_kernels.nsa.spec import NSASpec

DIM = 128
TILES: dict[str, list[tuple[int, int, int, int]]] = {
    "hopper": [(128, 128, 4, 2), (128, 64, 4, 3)],
    "compressed": [(128, 64, 8, 3), (128, 128, 8, 2), (128, 64, 4, 3), (128, 128, 8, 3)],
    "compressed_dq": [(128, 64, 8, 2), (128, 64, 8, 3), (64, 64, 4, 2), (128, 128, 8, 2)],
    "compressed_dkdv": [(64, 128, 8, 2), (64, 64, 4, 2), (128, 64, 8, 2), (64, 128, 8, 3)],
    "select": [(128, 16, 4, 3), (128, 16, 4, 2), (128, 16, 4, 4), (64, 16, 4, 3), (128, 32, 8, 2)],
    "selected": [(64, 64, 4, 1), (64, 64, 4, 2), (128, 64, 4, 1), (128, 64, 4, 2), (128, 64, 8, 1)],
    "combine": [(64, 64, 4, 3), (64, 64, 4, 4), (64, 64, 4, 2), (128, 64, 8, 3)],
    "selected_bwd": [
        *((32, 64, 4, 2), (32, 64, 4, 3), (64, 64, 4, 1), (64, 64, 4, 2)),
        *((64, 64, 8, 1), (128, 64, 8, 1), (128, 64, 8, 2)),  # 128 rows: rows first
    ],
}
SCALARS: dict[str, list[tuple[str, float]]] = {
    "selected": [("chunk_rows", 0.5), ("chunk_rows", 2.0), ("item_entries", 0.5)],
    "selected_bwd": [("chunk_rows", 0.5), ("chunk_rows", 2.0), ("item_entries", 2.0)],
}


def variants() -> list[tuple[str, dict[str, Any]]]:
    """(stage, changes of the configuration), the table's own first."""
    found: list[tuple[str, dict[str, Any]]] = []
    for stage, tiles in TILES.items():
        found += [(stage, {stage: TileConfig(*tile)}) for tile in tiles]
        found += [(stage, {name: factor}) for name, factor in SCALARS.get(stage, [])]
    return found


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
    cmp = (q, k_cmp, v_cmp)

    def compressed() -> None:
        launch_compressed.forward(out, lse, *cmp, tokens, None, spec, scale)

    def backward() -> object:
        return launch_compressed.backward(dout, None, *cmp, out, lse, tokens, None, spec, scale)

    def select() -> None:
        launch_select.select(indices, q, k_cmp, lse, tokens, None, spec, scale)

    def selected() -> None:
        launch_selected.forward(out_slc, lse_slc, q, k, v, indices, None, 64, scale)

    def selected_bwd() -> object:
        return launch_selected.backward(
            dout, None, q, k, v, out_slc, lse_slc, indices, None, 64, scale
        )

    for prepare in (compressed, select, selected):
        prepare()
    return {
        "hopper": compressed,
        "compressed": compressed,
        "compressed_dq": backward,
        "compressed_dkdv": backward,
        "select": select,
        "selected": selected,
        "combine": selected,
        "selected_bwd": selected_bwd,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=int, default=64)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--part", help="I/N: run each variant I, I + N, ... once, untimed")
    args = parser.parse_args()
    calls = stages(args.heads, args.kv_heads, args.tokens)
    todo = variants()
    if args.part:
        first, step = (int(x) for x in args.part.split("/"))
        todo = todo[first::step]
    for stage, changes in todo:

        def choose(
            *given: Any, changes: dict[str, Any] = changes, portable: bool = "compressed" in stage
        ) -> Any:
            base = select_config(*given)
            fields = {
                name: value if isinstance(value, TileConfig) else int(getattr(base, name) * value)
                for name, value in changes.items()
            }
            if portable:
                base = replace(base, hopper=None, hopper_bwd=None)
            return replace(base, token_major=False, **fields)

        launch_common.select_config = choose
        label = ", ".join(
            f"{n} {(x.block_m, x.block_n, x.num_warps, x.num_stages)}"
            if isinstance(x, TileConfig)
            else f"{n} x {x}"
            for n, x in changes.items()
        )
        try:
            calls[stage]()
            if not args.part:
                ms = do_bench(calls[stage], warmup=10, rep=60, return_mode="median")
                print(
                    f"{args.heads}x{args.kv_heads} {stage:16} {label:44} {ms:8.3f} ms", flush=True
                )
        except Exception as problem:  # a variant that does not fit on the chip is a result too
            print(f"{args.heads}x{args.kv_heads} {stage:16} {label:44} {str(problem)[:80]}")


if __name__ == "__main__":
    main()
