"""benchmarks/tensor_pipe.py: the toy run, and what is read from the profiler's output."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "tensor_pipe.py"
ACTIVE = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active"
HMMA = "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active"
TIME = "gpu__time_duration.sum"
REPORT = f'''==PROF== Connected to process 7
a line of the program, with "quotes"
==PROF== Profiling "block_sparse_hopper_fwd_kernel" - 0: 0%....50%....100% - 4 passes
==PROF== Disconnected from process 7
"ID","Process ID","Kernel Name","Context","{TIME}","{ACTIVE}","{HMMA}"
"","","","","ns","%","%"
"0","7","block_sparse_hopper_fwd_kernel","1","1,234,500","71.25","n/a"
'''


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    """Names of the script."""
    return runpy.run_path(str(SCRIPT))


def fake_ncu(tmp_path: Path, body: str) -> str:
    """A program that stands for ncu."""
    path = tmp_path / "ncu"
    path.write_text(f"#!{sys.executable}\nimport sys\n{body}\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def test_the_toy_is_gated_and_timed(
    script: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "toy.json"
    command = [str(SCRIPT), "--toy", "--device", "cpu", "--commit", "abc", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", command)
    assert script["main"]() == 0
    found = json.loads(file.read_text(encoding="utf-8"))
    assert found["machine"]["commit"] == "abc"
    assert 0 < found["visible_tflops"] < found["listed_tflops"], "diagonal blocks are cut"
    assert found["listed_share_of_peak"] == pytest.approx(found["listed_tflops"] / 989)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--toy", "--device", "cpu", "--once"])
    assert script["main"]() == 0


def test_numbers_are_read_from_among_other_lines(script: dict[str, Any]) -> None:
    kernel, metrics = script["parse_ncu"](REPORT)
    assert kernel == "block_sparse_hopper_fwd_kernel"
    assert metrics == {TIME: pytest.approx(1.2345), ACTIVE: 71.25}
    for unit in ("nsecond", "ns"):
        text = REPORT.replace('"ns"', f'"{unit}"')
        assert script["parse_ncu"](text)[1][TIME] == pytest.approx(1.2345)
    assert script["parse_ncu"](REPORT.replace("71.25", "nan"))[1].keys() == {TIME}
    in_us = REPORT.replace('"ns"', '"us"').replace("1,234,500", "1234.5")
    assert script["parse_ncu"](in_us)[1][TIME] == pytest.approx(1.2345)
    assert script["parse_ncu"]("==WARNING== No kernels were profiled.\n") == ("", {})


def test_a_run_that_ncu_refuses_is_tried_with_fewer_metrics(
    script: dict[str, Any], tmp_path: Path
) -> None:
    ncu = fake_ncu(
        tmp_path,
        "arguments = ' '.join(sys.argv)\n"
        "if '--launch-skip 1 --launch-count 1' not in arguments or '--once' not in arguments:\n"
        "    sys.exit('wrong arguments')\n"
        "if 'op_gmma' in arguments:\n"
        "    sys.exit('==ERROR== Failed to find metric')\n"
        f"print({REPORT!r})",
    )
    found = script["counters"](ncu)
    assert found["tensor_busy"] == pytest.approx(0.7125)
    assert found["bar_met"] is True
    assert found["ncu_ms"] == pytest.approx(1.2345)


@pytest.mark.parametrize("metric", [HMMA, "sm__inst_executed_pipe_tensor.avg"])
def test_other_counters_stand_in(script: dict[str, Any], tmp_path: Path, metric: str) -> None:
    text = REPORT.replace(ACTIVE, "other").replace('"n/a"', '"60.5"')
    if metric != HMMA:
        metric += ".pct_of_peak_sustained_active"
        text = text.replace(HMMA, metric)
    found = script["counters"](fake_ncu(tmp_path, f"print({text!r})"))
    assert found["metrics"][metric] == 60.5
    cycles = metric == HMMA
    assert (found["tensor_busy"], found["bar_met"]) == ((0.605, False) if cycles else (None, None))


def test_no_counters_is_an_error_with_what_ncu_said(script: dict[str, Any], tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    ncu = fake_ncu(
        tmp_path, f"open({str(calls)!r}, 'a').write('x')\nsys.exit('==ERROR== ERR_NVGPUCTRPERM')"
    )
    with pytest.raises(RuntimeError, match="ERR_NVGPUCTRPERM"):
        script["counters"](ncu)
    assert calls.read_text(encoding="utf-8") == "x", "no metric is allowed: one run tells"


def test_no_profiler_is_an_error_that_says_what_to_do(
    script: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(script["find_ncu"].__globals__, "Path", lambda _root: tmp_path)
    with pytest.raises(RuntimeError, match="--ncu PATH"):
        script["counters"]("no-such-profiler")
    found = tmp_path / "usr/local/cuda-13.0/bin/ncu"
    found.parent.mkdir(parents=True)
    found.touch()
    assert script["find_ncu"]("no-such-profiler") == str(found)


def test_times_stay_where_ncu_fails(
    script: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main, small = script["main"], script["the_case"](True)
    monkeypatch.setitem(main.__globals__, "the_case", lambda _toy: small)
    monkeypatch.setitem(main.__globals__, "needs_gpu", lambda *_, **__: False)
    file = tmp_path / "result.json"
    ncu = fake_ncu(tmp_path, "sys.exit('nothing')")
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--ncu", ncu, "--json", str(file)])
    assert main() == 1
    found = json.loads(file.read_text(encoding="utf-8"))
    assert found["ms"] > 0
    assert "tensor_busy" not in found
