"""NSA kernels without a GPU: interpreted against the oracle, and compiled ahead of time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import processes
from tests.kernels import scripts

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
KERNELS = {
    *("nsa_mean_pool_fwd_kernel", "nsa_mean_pool_bwd_kernel", "nsa_compressed_fwd_kernel"),
    *("nsa_compressed_bwd_dq_kernel", "nsa_compressed_bwd_dkdv_kernel"),
    *("nsa_block_scores_kernel", "nsa_top_blocks_kernel", "nsa_selected_part_kernel"),
    *("nsa_selected_combine_kernel", "nsa_selected_tokens_kernel", "nsa_selected_bwd_part_kernel"),
    *("nsa_index_keys_kernel", "nsa_index_order_kernel", "nsa_index_merge_kernel"),
    *("nsa_selected_bwd_dq_kernel", "nsa_selected_bwd_dkdv_kernel"),
    *("nsa_gate_fwd_kernel", "nsa_gate_bwd_kernel", "nsa_gate_rows_kernel", "nsa_rotary_kernel"),
}
HOPPER_KERNELS = {
    *("nsa_selected_hopper_part_kernel", "nsa_selected_hopper_combine_kernel"),
    *("nsa_selected_hopper_bwd_part_kernel", "nsa_block_scores_hopper_kernel"),
    *("nsa_arrange_kernel", "nsa_compressed_hopper_fwd_kernel", "nsa_top_summed_blocks_kernel"),
}
BOX_KERNELS = {"nsa_selected_hopper_tma_part_kernel"}
SHARING_KERNELS = {"nsa_share_blocks_kernel"}  # of groups whose tiles have few tokens


def run_on_gpu(name: str, *args: str) -> subprocess.CompletedProcess[str]:
    """Run a script beside this file in a process that nothing was imported in before."""
    path = processes.import_path(ROOT, ROOT / "kernels")
    return processes.run(
        *(sys.executable, HERE / name, "--device", "cuda", *args),
        env={**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "0"},
    )


def test_interpreted_kernels_agree_with_the_oracle() -> None:
    done = scripts.run(HERE / "kernel_cases.py", interpret=True)
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAIL")]
    assert done.returncode == 0, "\n".join(failed) + done.stderr[-2000:]
    assert sum(line.startswith("ok") for line in done.stdout.splitlines()) > 200


WAYS = pytest.mark.parametrize(
    "way",
    [
        # Each case meets both orders and both timings, neighbours together all four ways.
        # Portable kernels know neither: once is enough for them.
        ["--order", "first first", "--part", "0/2"],
        ["--order", "last first", "--early", "--only-hopper", "--part", "0/2"],
        ["--order", "first first", "--early", "--only-hopper", "--part", "1/2"],
        ["--order", "last first", "--only-hopper", "--part", "1/2"],
    ],
    ids=["first-late", "last-early", "first-early", "last-late"],
)


@WAYS
def test_hopper_kernels_agree_with_the_oracle(way: list[str]) -> None:
    done = scripts.run(HERE / "kernel_cases.py", "--size", "hopper", *way)
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAIL")]
    assert done.returncode == 0, "\n".join(failed) + done.stderr[-2000:]
    assert sum("hopper" in line or "boxes" in line for line in done.stdout.splitlines()) > 50


@WAYS
def test_block_scores_agree_with_the_oracle(way: list[str]) -> None:
    done = scripts.run(HERE / "score_cases.py", *way)
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAIL")]
    assert done.returncode == 0, "\n".join(failed) + done.stderr[-2000:]
    assert sum(line.startswith("ok") for line in done.stdout.splitlines()) > 18


def test_every_pass_is_replayed() -> None:
    done = scripts.run(HERE / "replay_cases.py")
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]


@pytest.mark.parametrize(
    ("arch", "group", "dim"),
    [(80, 4, 128), (86, 4, 128), (90, 16, 128), (90, 4, 128), (90, 1, 64), (100, 16, 128)],
)
def test_kernels_compile_without_spilling(arch: int, group: int, dim: int) -> None:
    done = scripts.run(HERE / "aot.py", "--arch", arch, "--group", group, "--dim", dim)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    hopper = HOPPER_KERNELS | (BOX_KERNELS if group >= 8 else set())
    hopper |= SHARING_KERNELS if group >= 8 else set()
    assert {row["kernel"] for row in rows} == KERNELS | (hopper if arch == 90 else set())
    limit = {80: 163, 86: 99}.get(arch, 227)
    wgmma = ("nsa_compressed_fwd_kernel", "nsa_selected_part_kernel", "nsa_block_scores_kernel")
    for row in rows:
        name = row["kernel"]
        assert row["stack"] <= 64, f"{name} spills {row['stack']} bytes"
        assert row["shared"] <= limit * 1024, f"{name} needs {row['shared']} bytes of shared memory"
        if (name in hopper and "_hopper_" in name) or (arch == 90 and group > 1 and name in wgmma):
            assert row["wgmma"], f"{name} misses the Hopper matrix unit"


def test_backward_of_compressed_attention_compiles_for_hopper() -> None:
    done = scripts.run(HERE / "aot_hopper.py")
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 3
    for row in rows:
        assert row["stack"] <= 64, f"{row['kernel']} spills {row['stack']} bytes"
        assert row["shared"] <= 227 * 1024
        assert row["hgmma"], f"{row['kernel']} misses the Hopper matrix unit"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("part", range(8))
def test_block_scores_on_the_gpu(part: int) -> None:
    done = run_on_gpu("score_cases.py", "--tokens", "5000", "--part", f"{part}/8")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("part", range(12))
def test_kernels_on_the_gpu(part: int) -> None:
    done = run_on_gpu("kernel_cases.py", "--size", "gpu", "--part", f"{part}/12")
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAIL")]
    assert done.returncode == 0, "\n".join(failed) + done.stderr[-2000:]
