"""The kernels compile for GPUs that are not there, with next to no spilled registers.

Prefill attention on sm_90 is held to 128 registers on purpose: two programs then share a
multiprocessor, which is worth more than the few dozen scalars that spill.  So is the choice of
cells in one launch, which spills more with more than four query heads for each KV head.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.processes import ended, import_path

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


CHOICE = {"score_records_kernel", "total_kernel", "rank_cells_kernel", "list_cells_kernel"}
ON_MATRIX_UNITS = {"weigh_cells_kernel", "cut_cells_kernel"}
PORTABLE = {
    "write_kv_kernel",
    "write_records_kernel",
    *ON_MATRIX_UNITS,
    "top_blocks_kernel",
    "pool_means_kernel",
    "part_scores_kernel",
    "add_parts_kernel",
    "attend_kernel",
}
CHOICE_STACK = {"score_records_kernel": 6 << 10}
"""Bytes where they are more than 160.  The scores of every processor, which serve what two launches
do not, do spill."""
LEARNED = {
    "infllm": {"write_means_kernel", "average_logits_kernel", "block_scores_kernel"},
    "seer": {"write_gate_keys_kernel", "gate_queries_kernel", "gate_logits_kernel"},
}
SCORES = {"gather_samples_kernel", "tile_scores_sm90_kernel"}
HOPPER = {"attend_hopper_kernel", *SCORES}
SHARED = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}


Compiled = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compiled]:
    """What ``aot.py`` reports of each kernel: ``compiled(arch, *options)``, all by one process."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = import_path(ROOT, ROOT / "kernels", HERE)
    log = tmp_path_factory.mktemp("aot") / "log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, HERE / "aot.py", "--each"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )

    def compiled(arch: int, *options: str) -> list[dict[str, Any]]:
        assert process.stdin is not None
        assert process.stdout is not None
        print("--arch", arch, *options, file=process.stdin, flush=True)
        rows: list[dict[str, Any]] = []
        for line in process.stdout:
            if line == "\n":
                assert all("error" not in row for row in rows), rows[-1]["error"]
                return rows
            rows.append(json.loads(line))
        raise AssertionError(log.read_text())

    with ended(process):
        yield compiled


@pytest.mark.parametrize(
    ("arch", "options", "most_stack", "kernels"),
    [
        (80, ("--head-dim", "64", "--group", "8"), 160, PORTABLE),
        (90, (), 160, PORTABLE | HOPPER),
        (90, ("--head-dim", "64", "--group", "8", "--hopper"), 160, HOPPER),
        (100, (), 160, PORTABLE),
        (90, ("--fp8-cache",), 224, PORTABLE | SCORES),  # K and V widen in registers
    ],
    ids=["sm80-d64", "sm90", "sm90-d64", "sm100", "sm90-fp8"],
)
def test_compiles_with_few_spills(
    arch: int, options: tuple[str, ...], most_stack: int, kernels: set[str], compiled: Compiled
) -> None:
    rows = compiled(arch, *options)
    assert {row["kernel"] for row in rows} == kernels
    assert all(row["wgmma"] for row in rows if row["kernel"] in HOPPER - {"gather_samples_kernel"})
    for row in rows:
        assert row["stack"] <= most_stack, row
        assert row["shared"] <= SHARED[arch], row


def test_decodes_over_the_pages_of_one_rank_compile(compiled: Compiled) -> None:
    rows = compiled(90, "--sharded")
    assert [row["kernel"] for row in rows].count("attend_kernel") == 3
    assert {row["kernel"] for row in rows} >= CHOICE
    for row in rows:
        assert row["stack"] <= CHOICE_STACK.get(row["kernel"], 160), row


@pytest.mark.parametrize(
    ("arch", "options"),
    [
        (80, ()),
        (86, ("--head-dim", "256")),
        (90, ()),
        (90, ("--fp8-cache",)),
        (100, ("--dtype", "float16", "--head-dim", "80", "--group", "7")),
    ],
    ids=["sm80", "sm86-d256", "sm90", "sm90-fp8", "sm100-fp16-d80"],
)
def test_attention_over_cells_compiles(
    arch: int, options: tuple[str, ...], compiled: Compiled
) -> None:
    rows = compiled(arch, "--cells", *options)
    assert [row["kernel"] for row in rows] == ["attend_kernel"] * 2
    for row in rows:
        assert row["stack"] <= 160, row
        assert row["shared"] <= SHARED[arch], row


@pytest.mark.parametrize(
    ("arch", "tokens", "options", "kernels"),
    [
        (80, (1,), ("--head-dim", "64", "--group", "8"), CHOICE | ON_MATRIX_UNITS),
        (89, (4,), (), CHOICE | ON_MATRIX_UNITS),
        (86, (4,), ("--head-dim", "256", "--dtype", "float32"), CHOICE),
        (90, (1, 4), (), CHOICE | ON_MATRIX_UNITS),
        (90, (1,), ("--fp8-cache", "--group", "7"), CHOICE | ON_MATRIX_UNITS),
        (100, (1,), ("--head-dim", "64"), CHOICE | ON_MATRIX_UNITS),
        (100, (4,), (), CHOICE | ON_MATRIX_UNITS),
    ],
    ids=["sm80-d64-g8", "sm89", "sm86-fp32-d256", "sm90", "sm90-fp8-g7", "sm100-d64", "sm100"],
)
def test_choosing_by_records_compiles(
    arch: int,
    tokens: tuple[int, ...],
    options: tuple[str, ...],
    kernels: set[str],
    compiled: Compiled,
) -> None:
    rows = compiled(arch, *options, "--choice", *map(str, tokens))
    assert {row["kernel"] for row in rows} == kernels
    for row in rows:
        assert row["stack"] <= CHOICE_STACK.get(row["kernel"], 160), row
        assert row["shared"] <= SHARED[arch], row


@pytest.mark.parametrize("options", [("--hopper",), ("--choice", "1")], ids=["prefill", "choice"])
def test_index_tensors_of_64_bits_compile(options: tuple[str, ...], compiled: Compiled) -> None:
    """``torch.tensor([1, 2])`` makes such; on a CPU they serve as others do."""
    rows = compiled(90, "--wide", *options)
    assert {row["kernel"] for row in rows} == (
        HOPPER if options == ("--hopper",) else CHOICE | ON_MATRIX_UNITS
    )


@pytest.mark.parametrize(
    ("arch", "options"),
    [
        (80, ("--group", "16")),
        (86, ("--group", "16", "--dtype", "float32", "--head-dim", "256")),
        (90, ("--group", "16")),
        (90, ("--group", "2", "--dtype", "float16", "--head-dim", "80")),
        (100, ("--group", "16")),
    ],
    ids=["sm80", "sm86-fp32-d256", "sm90", "sm90-fp16-d80", "sm100"],
)
@pytest.mark.parametrize("indexer", LEARNED)
def test_learned_indexers_compile(
    indexer: str, arch: int, options: tuple[str, ...], compiled: Compiled
) -> None:
    # Which indexer chose is nothing to attention: its compilation, the longest, once is enough.
    attends = {"attend_kernel"} if arch == 90 else set()
    skipped = () if attends else ("--skip", "attend_kernel")
    rows = compiled(arch, "--indexer", indexer, *options, *skipped)
    names = [row["kernel"] for row in rows]
    assert set(names) == LEARNED[indexer] | {"top_blocks_kernel"} | attends
    assert sum(name.startswith("write_") for name in names) == 4
    for row in rows:
        if row["kernel"] in LEARNED[indexer]:
            assert row["stack"] <= 160, row
            assert row["shared"] <= SHARED[arch], row


@pytest.mark.parametrize(
    ("arch", "dtype", "head_dim"),
    [
        (86, "float32", 128),
        (86, "bfloat16", 128),
        (86, "float32", 256),
        (86, "float16", 256),
        (90, "float32", 64),
    ],
)
def test_scores_fit_any_gpu(arch: int, dtype: str, head_dim: int, compiled: Compiled) -> None:
    options = ("--dtype", dtype, "--head-dim", str(head_dim), "--only", "part_scores_kernel")
    rows = compiled(arch, *options)
    assert rows
    for row in rows:
        assert row["stack"] <= 160, row
        assert row["shared"] <= SHARED[arch], row
