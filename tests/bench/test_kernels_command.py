"""`sparsek bench kernels`: gates, rows, bars, CSV, plots, comparisons."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from sparsek_backend.bench import runner
from sparsek_backend.bench.ceilings import Ceilings
from sparsek_backend.bench.cli import _default_yaml, app
from sparsek_backend.bench.compare import compare_rows
from sparsek_backend.bench.ops import OPS
from sparsek_backend.bench.registry import BenchOp, Case, GateResult, Outputs, Provider, Unavailable
from sparsek_backend.bench.results import Row, read_csv, speedup, write_csv
from sparsek_backend.bench.spec import parse_spec
from sparsek_backend.bench.workload import load_workloads, parse_workloads
from sparsek_backend.csv_file import write_csv_file
from sparsek_backend.machine import Machine

CPU = torch.device("cpu")
MACHINE = Machine("gpu", "1", "2", "3", "4", "abc")
CEILINGS = Ceilings(1.0, 1.0, {"float32": 10.0})
REPOSITORY = Path(__file__).resolve().parents[2]


def toy_op(ours: GateResult, peer: GateResult) -> BenchOp:
    """An op of three providers: ours, a peer, and one that cannot run."""

    def build(case: Case, device: torch.device) -> list[Provider]:
        x = torch.ones(int(case.spec.total_query_tokens), device=device)

        def provider(name: str, verdict: GateResult) -> Provider:
            return Provider(name, lambda: lambda: (x + 1,), lambda _: verdict, 1e6, 1e3)

        def absent() -> object:
            raise Unavailable("not on this machine")

        missing = Provider("absent", absent, lambda _: ours, 1.0, 1.0)  # type: ignore[arg-type]
        return [provider("sparsek", ours), provider("peer", peer), missing]

    return BenchOp("toy", "a toy", {"dtype": "float32", "scale": 1}, build)


def toy_case(**bars: float) -> Case:
    return Case("t", parse_spec("q64"), {"dtype": "float32", "scale": 1}, bars)


GREEN, RED = GateResult(True, "fine"), GateResult(False, "out max error 3, bound 1")


def run_toy(ours: GateResult, peer: GateResult, **bars: float) -> list[Row]:
    return runner.run_case(toy_op(ours, peer), toy_case(**bars), CPU, MACHINE, CEILINGS, 2.0)


def test_green_rows_carry_times_rates_and_machine() -> None:
    rows = {row.provider: row for row in run_toy(GREEN, GREEN)}
    ours = rows["sparsek"]
    assert ours.is_timed
    assert ours.ms is not None
    assert ours.p20_ms is not None
    assert ours.p80_ms is not None
    assert ours.p20_ms <= ours.ms <= ours.p80_ms
    assert ours.tflops == pytest.approx(1e6 / ours.ms / 1e9)
    assert ours.roofline == pytest.approx(max(1e6 / 10 / 1e9, 1e3 / 1e9) / ours.ms)
    assert (ours.gpu, ours.commit) == ("gpu", "abc")
    assert rows["absent"].status == "unavailable"
    assert rows["absent"].detail == "not on this machine"
    assert set(speedup(rows.values(), ours)) == {"peer"}


@pytest.mark.parametrize(("ours", "peer"), [(RED, GREEN), (GREEN, RED)])
def test_no_speedup_where_a_gate_is_red(ours: GateResult, peer: GateResult) -> None:
    rows = run_toy(ours, peer)
    mine = next(row for row in rows if row.provider == "sparsek")
    assert speedup(rows, mine) == {}
    red = next(row for row in rows if row.status == "gate failed")
    assert red.ms is None
    assert "bound 1" in red.detail
    bars = runner.check_bars([(toy_op(ours, peer), toy_case(peer=0.0001))], rows)
    assert [bar.met for bar in bars] == [False]


def test_bars_are_judged_on_green_rows() -> None:
    rows = run_toy(GREEN, GREEN)
    case = toy_case(peer=1e-9, max_ms=1e9, min_tflops=1e12)
    met = {bar.bar: bar.met for bar in runner.check_bars([(toy_op(GREEN, GREEN), case)], rows)}
    assert met == {"peer": True, "max_ms": True, "min_tflops": False}


def test_a_dtype_has_one_name() -> None:
    with pytest.raises(ValueError, match="dtype: expected a torch dtype such as 'bfloat16'"):
        Case("t", parse_spec("q64"), {"dtype": "half"}).dtype()


def test_growth_is_longest_over_shortest() -> None:
    op = toy_op(GREEN, GREEN)
    cases = [
        dataclasses.replace(toy_case(max_growth=4.2), spec=parse_spec(text))
        for text in ("q32", "q128")
    ]
    rows = [
        Row("toy", "t", spec, "sparsek", "ok", ms=ms) for spec, ms in (("q32", 1.0), ("q128", 4.5))
    ]
    (bar,) = runner.check_bars([(op, case) for case in cases], rows)
    assert (bar.spec, bar.got, bar.met) == ("q128", 4.5, False)


def test_providers_that_an_op_lacks_are_named() -> None:
    case = dataclasses.replace(toy_case(), providers=("flash",))
    with pytest.raises(ValueError, match="some of sparsek, peer, absent, got flash"):
        runner.run_case(toy_op(GREEN, GREEN), case, CPU, MACHINE, CEILINGS)


def test_an_exception_becomes_an_error_row() -> None:
    def broken(_: Outputs) -> GateResult:
        raise RuntimeError("no kernel\nimage")

    op = toy_op(GREEN, GREEN)
    bad = Provider("sparsek", lambda: lambda: (), broken, 1.0, 1.0)
    op = dataclasses.replace(op, build=lambda case, device: [bad])
    (row,) = runner.run_case(op, toy_case(), CPU, MACHINE, CEILINGS)
    assert (row.status, row.detail) == ("error", "RuntimeError: no kernel image")


def test_csv_round_trip(tmp_path: Path) -> None:
    rows = run_toy(GREEN, RED)
    write_csv(tmp_path / "r.csv", rows)
    back = read_csv(tmp_path / "r.csv")
    assert [row.key for row in back] == [row.key for row in rows]
    assert [row.status for row in back] == [row.status for row in rows]
    assert back[0].ms == pytest.approx(rows[0].ms, rel=1e-4)
    assert back[1].ms is None
    whole = (tmp_path / "r.csv").read_text()
    (tmp_path / "bad.csv").write_text(whole[: whole.rindex(",")])
    with pytest.raises(ValueError, match=r"line 4 of .*bad\.csv is cut off"):
        read_csv(tmp_path / "bad.csv")
    (tmp_path / "bad.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="lacks the columns"):
        read_csv(tmp_path / "bad.csv")
    done = CliRunner().invoke(app, ["plot", str(tmp_path / "r.csv"), "--out", "/dev/null"])
    assert done.exit_code == 2
    assert "File exists: '/dev/null'" in done.stderr


def test_rows_that_cannot_be_written_leave_the_file_as_it_is(tmp_path: Path) -> None:
    class FullDisk:
        def __str__(self) -> str:
            raise OSError("no space left")

    file = write_csv_file(tmp_path / "r.csv", [{"case": "first"}], digits=5)
    with pytest.raises(OSError, match="no space left"):
        write_csv_file(file, [{"case": "second"}, {"case": FullDisk()}], digits=5)
    assert file.read_text() == "case\nfirst\n"
    assert list(tmp_path.iterdir()) == [file]


def rows_of(*times: tuple[str, float | None]) -> list[Row]:
    return [
        Row("op", case, "q1", "sparsek", "ok" if ms else "gate failed", ms=ms) for case, ms in times
    ]


def test_compare_finds_regressions_and_lost_gates() -> None:
    a = rows_of(("x", 1.0), ("y", 1.0), ("z", 1.0), ("gone", 1.0))
    b = rows_of(("x", 1.04), ("y", 1.2), ("z", None), ("new", 1.0))
    result = compare_rows(a, b, 0.05)
    assert [pair.key[1] for pair in result if pair.regressed] == ["y", "z"]
    assert {pair.key[1]: pair.verdict for pair in result[3:]} == {
        "gone": "only in A",
        "new": "only in B",
    }
    with pytest.raises(ValueError, match="in common"):
        compare_rows(a, rows_of(("new", 1.0)), 0.05)


def test_compare_command_exits_by_tolerance(tmp_path: Path) -> None:
    write_csv(tmp_path / "a.csv", rows_of(("x", 1.0)))
    write_csv(tmp_path / "b.csv", rows_of(("x", 1.1)))
    files = [str(tmp_path / "a.csv"), str(tmp_path / "b.csv")]
    assert CliRunner().invoke(app, ["compare", *files]).exit_code == 1
    assert CliRunner().invoke(app, ["compare", *files, "--tolerance", "0.2"]).exit_code == 0
    assert CliRunner().invoke(app, ["compare", files[0], "/no/such.csv"]).exit_code == 2


TINY = """
defaults: {num_heads: 4, num_kv_heads: 2, head_dim: 16, dtype: float32}
workloads:
  - {op: sink_window_fwd, name: causal, specs: [q64], bars: {max_ms: 1.0e+9}}
  - {op: sink_window_fwd, name: window, specs: [2q40s50], params: {num_sink: 2, window_size: 9}}
  - {op: sink_window_bwd, name: window, specs: [q40], params: {num_sink: 2, window_size: 9}}
  - op: sink_window_bwd
    name: learned
    specs: [3q5-40]
    params: {num_sink: 2, window_size: 9, learned_sinks: true}
"""


def test_workloads_by_default_fit_the_device() -> None:
    names = {device: {file.name for file in _default_yaml(device)} for device in ("cpu", "cuda")}
    assert names["cpu"] == {"paged_cpu.yaml"}
    assert {"paged.yaml", "sink_window.yaml"} <= names["cuda"]
    assert not names["cuda"] & names["cpu"]


def test_a_file_in_place_of_the_folder_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    sizes = "{num_heads: 1, num_kv_heads: 1, head_dim: 8, dtype: float32}"
    workload = tmp_path / "w.yaml"
    workload.write_text(
        f"workloads: [{{op: sink_window_fwd, name: a, specs: [q16], params: {sizes}}}]"
    )
    options = ["--yaml", str(workload), "--device", "cpu", "--budget-ms", "1"]
    done = CliRunner().invoke(app, ["kernels", *options, "--out", str(tmp_path / "out")])
    assert done.exit_code == 2
    assert "File exists" in done.stderr


def test_sink_window_runs_on_the_cpu_and_writes_csv_and_plots(tmp_path: Path) -> None:
    (tmp_path / "w.yaml").write_text(TINY)
    arguments = ["kernels", "--yaml", str(tmp_path / "w.yaml"), "--out", str(tmp_path / "out")]
    arguments += ["--device", "cpu", "--budget-ms", "5", "--check", "--commit", "abc"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    rows = read_csv(tmp_path / "out" / "kernels.csv")
    timed = {(row.op, row.case, row.provider) for row in rows if row.is_timed}
    assert ("sink_window_fwd", "causal", "sparsek") in timed
    assert ("sink_window_fwd", "causal", "sdpa_flash") in timed
    assert ("sink_window_fwd", "window", "sdpa_mask") in timed
    assert ("sink_window_bwd", "window", "sdpa_mask") in timed
    assert ("sink_window_bwd", "learned", "sparsek") in timed
    assert not [row for row in rows if row.status in ("error", "gate failed")]
    assert {row.commit for row in rows} == {"abc"}
    assert "case 1 of " in result.output
    assert "On a CPU" in result.output
    for op in ("sink_window_fwd", "sink_window_bwd"):
        image = tmp_path / "out" / f"kernels_{op}.png"
        assert image.read_bytes().startswith(b"\x89PNG")


BLOCKS = """
defaults: {num_heads: 4, num_kv_heads: 2, head_dim: 16, dtype: float32, block_size: 16}
workloads:
  - {op: block_sparse_fwd, name: causal, specs: [q100], params: {patterns: 2, density: 0.4}}
  - {op: block_sparse_bwd, name: causal, specs: [2q100], params: {patterns: 1, density: 0.4}}
  - {op: block_sparse_bwd, name: full, specs: [q64], params: {patterns: 2, causal: false}}
"""


def test_block_sparse_runs_on_the_cpu(tmp_path: Path) -> None:
    (tmp_path / "w.yaml").write_text(BLOCKS)
    arguments = ["kernels", "--yaml", str(tmp_path / "w.yaml"), "--out", str(tmp_path / "out")]
    arguments += ["--device", "cpu", "--budget-ms", "5", "--check"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    rows = read_csv(tmp_path / "out" / "kernels.csv")
    timed = {(row.op, row.case, row.provider) for row in rows if row.is_timed}
    for op, case in (("_fwd", "causal"), ("_bwd", "causal"), ("_bwd", "full")):
        assert (f"block_sparse{op}", case, "sparsek") in timed
        assert (f"block_sparse{op}", case, "sdpa_flash") in timed
    assert not [row for row in rows if row.status in ("error", "gate failed")]


def test_block_sparse_pairs_are_counted_as_the_mask_has_them() -> None:
    from sparsek_backend.bench.ops.block_sparse import BlockRule

    blocks = torch.rand(2, 4, 4, generator=torch.Generator().manual_seed(0)) < 0.5
    rows = torch.arange(50)
    for causal in (True, False):
        rule = BlockRule(blocks, 16, causal)
        masks = [rule.of_head(head).visible(rows, rows) for head in range(2)]
        assert rule.count_pairs(50, 50) == sum(float(mask.sum()) for mask in masks) / 2


def test_a_wrong_kernel_is_red_and_exits_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sparsek_kernels

    right = sparsek_kernels.sink_flash_attention
    monkeypatch.setattr(
        sparsek_kernels, "sink_flash_attention", lambda *a, **k: right(*a, **k) * 1.01
    )
    (tmp_path / "w.yaml").write_text(TINY)
    arguments = [
        "kernels",
        "--yaml",
        str(tmp_path / "w.yaml"),
        "--out",
        str(tmp_path),
    ]
    arguments += ["--case", "causal", "--device", "cpu", "--budget-ms", "5"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert "gate failed" in result.output
    assert "faster" not in result.output
    assert "slower" not in result.output


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"op": "nope", "name": "x", "specs": ["q1"]}, "expected one of"),
        ({"op": "sink_window_fwd", "name": "x"}, "w.yaml: workloads.0.specs: field required"),
        ({"op": "sink_window_fwd", "name": "x", "specs": ["z"]}, "workload 'x': spec: expected"),
        (
            {"op": "sink_window_fwd", "name": "x", "specs": "q1"},
            "workloads.0.specs: expected a valid list, got 'q1'",
        ),
        (
            {"op": "sink_window_fwd", "name": "x", "specs": ["q1"], "params": {"windw": 1}},
            "unknown parameter 'windw'",
        ),
        (
            {"op": "sink_window_fwd", "name": "x", "specs": ["q1"], "sped": 1},
            "workloads.0.sped: extra inputs",
        ),
        (
            {"op": "sink_window_fwd", "name": "x", "specs": ["q1"], "timing": "hot"},
            "timing: .* 'cold', 'graph' or 'eager'",
        ),
    ],
)
def test_bad_workloads_name_what_is_wrong(entry: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_workloads({"workloads": [entry]}, source="w.yaml")


def test_the_same_workload_twice_is_refused() -> None:
    entry = {"op": "sink_window_fwd", "name": "x", "specs": ["q1"]}
    with pytest.raises(ValueError, match="appears twice"):
        parse_workloads({"workloads": [entry, entry]}, source="w.yaml")


@pytest.mark.parametrize(
    "path", sorted((REPOSITORY / "benchmarks").glob("*.yaml")), ids=lambda path: path.name
)
def test_committed_workloads_parse(path: Path) -> None:
    workloads = load_workloads(path)
    assert workloads
    assert {workload.op.name for workload in workloads} <= OPS.keys()


def test_unknown_device_and_filter_exit_2(tmp_path: Path) -> None:
    base = ["kernels", "--out", str(tmp_path)]
    assert CliRunner().invoke(app, [*base, "--device", "tpu"]).exit_code == 2
    assert CliRunner().invoke(app, [*base, "--case", "no-such-case"]).exit_code == 2
