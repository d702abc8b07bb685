"""benchmarks/distributed.py on two ranks with gloo, and the arithmetic of its figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sparsek_backend.bench.results import Row, read_csv
from tests import processes
from tests.distributed.scripts import FOLDER, names_of


def torchrun(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The benchmark on two ranks."""
    command = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    script = str(FOLDER / "distributed.py")
    return processes.run(*command, "--nproc-per-node", "2", script, *arguments, "--samples", "1")


def params(row: Row) -> dict[str, float]:
    """A row's parameters."""
    return {name: float(value) for name, value in (x.split("=") for x in row.params.split())}


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    """Names of the benchmark."""
    return names_of("distributed.py")


def test_block_patterns_are_checked_timed_and_profiled(tmp_path: Path) -> None:
    csv, file = tmp_path / "rows.csv", tmp_path / "profile.json"
    cases = ("--case", "block_sparse", "--case", "ring")
    done = torchrun(*cases, "--tokens", "256", "--csv", csv, "--profile", file)
    assert done.returncode == 0, done.stderr[-3000:]
    ours, share, *_ = read_csv(csv)
    assert ours.op == share.op == "context_parallel_block_sparse"
    assert 0 < float(ours.detail.split("error ")[1].split(",")[0]) < 1e-5
    assert ours.ms is not None
    assert share.ms is not None
    found = params(ours)
    assert found["us_per_token"] == pytest.approx(ours.ms * 1e3 / 256, rel=1e-3)
    assert found["efficiency"] == pytest.approx(share.ms / ours.ms, rel=1e-2)
    assert (found["block_size"], found["listed"]) == (64, 16)  # 4 / 9 of 36 blocks
    rows = json.loads(file.read_text())
    assert [row["op"] for row in rows] == ["context_parallel_block_sparse", "context_parallel_ring"]
    for row in rows:
        assert len(row["ranks"]) == 2
        for rank in row["ranks"]:
            parts = rank["compute"] + rank["exposed"] + rank["gap"]
            assert parts == pytest.approx(rank["span"])
            assert min(rank.values()) >= -1e-9
        assert row["compute_ms"] == pytest.approx(sum(x["compute"] for x in row["ranks"]) / 2)
        assert row["compute_ms"] > 0
        assert row["exposed_ms"] > 0
        assert any(name.startswith("gloo:") for name in row["by_name_ms"]), row["by_name_ms"]


def test_long_sequences_stand_beside_a_prediction(tmp_path: Path) -> None:
    csv, lengths = tmp_path / "rows.csv", [128, 256, 512]
    done = torchrun("--case", "block_sparse", "--csv", csv, "--long", *map(str, lengths))
    assert done.returncode == 0, done.stderr[-3000:]
    rows = read_csv(csv)
    assert [row.spec for row in rows] == [f"q{n} over 2 ranks" for n in lengths]
    times, found = [row.ms or 0.0 for row in rows], [params(row) for row in rows]
    for one in found[:2]:
        assert one["ms_over_predicted"] == pytest.approx(1, abs=1e-4)
    # a N + b N^2 through the first two lengths, twice as far
    assert found[2]["predicted_ms"] == pytest.approx(6 * times[1] - 8 * times[0], rel=1e-3)


@pytest.mark.parametrize("options", [["--long", "64", "128"], ["--long", "--tokens", "64"]])
def test_long_needs_lengths_of_its_own(
    script: dict[str, Any],
    options: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["distributed.py", "--csv", "x.csv", *options])
    with pytest.raises(SystemExit):
        script["main"]()
    assert "--long: expected" in capsys.readouterr().err


@pytest.mark.parametrize("powers", [(0, 1), (1, 2)])
def test_what_grows_as_supposed_is_predicted(
    script: dict[str, Any], powers: tuple[int, int]
) -> None:
    lengths = script["LONG"]
    values = [3.0 * (n / 1024) ** powers[0] + 0.25 * (n / 1024) ** powers[1] for n in lengths]
    assert script["predicted"](lengths, values, powers) == pytest.approx(values)


def test_a_peak_is_predicted_to_grow_linearly(
    script: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    measure_long = script["measure_long"]
    results = iter([([1.0], 110.0), ([4.0], 210.0), ([16.0], 615.0)])  # 10 + 100 N foretells 410
    given = measure_long.__globals__
    monkeypatch.setitem(given, "shared_step", lambda *_: None)
    monkeypatch.setitem(given, "timed_with_peak", lambda *_: next(results))
    mesh = SimpleNamespace(size=lambda: 4)
    rows = measure_long("nsa", mesh, torch.empty(0), [1024, 2048, 4096], 1, "")
    assert [row.peak_mib for row in rows] == [110, 210, 615]
    assert params(rows[2])["predicted_peak_mib"] == pytest.approx(410)
    assert params(rows[2])["peak_mib_over_predicted"] == pytest.approx(1.5)
    assert params(rows[2])["predicted_ms"] == pytest.approx(16)  # N^2 alone
    assert params(rows[2])["us_per_token"] == pytest.approx(16e3 / 1024)  # a token of the rank


def test_lengths_and_densities_are_those_named(script: dict[str, Any]) -> None:
    tokens = {name: case.tokens // 1024 for name, case in script["CASES"].items()}
    assert tokens.items() >= {"sink_window": 128, "ring": 32, "nsa": 64, "block_sparse": 64}.items()
    pattern = script["pattern_of"](16 * 1024, torch.device("cpu"))
    rows = 16 * 1024 // pattern.block_size
    assert pattern.block_size == 128
    assert pattern.num_blocks == pytest.approx(0.1 * rows * (rows + 1) / 2, abs=1)


def test_shares_add_up_and_hidden_messages_count_once(script: dict[str, Any]) -> None:
    shares, by_name = (script["profile_row"].__globals__[name] for name in ("shares", "by_name"))
    events = [
        ("gemm", 0.0, 4.0),
        ("ncclDevKernel_SendRecv", 3.0, 6.0),  # one of three hidden
        ("gemm", 5.5, 6.0),
        ("Memcpy DtoD", 8.0, 9.0),
        ("ncclDevKernel_SendRecv", 3.5, 5.0),  # beside the other
    ]
    assert shares(events) == {"span": 9, "compute": 5.5, "hidden": 1.5, "exposed": 1.5, "gap": 2}
    assert by_name(events) == {"gemm": 4.5, "ncclDevKernel_SendRecv": 3, "Memcpy DtoD": 1}
    with pytest.raises(ValueError, match="events: expected kernels"):
        shares([])
