"""The table of what was tested together: a row comes from reports of tests that all passed."""

from __future__ import annotations

import csv
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from sparsek_backend.machine import Machine

FOLDER = Path(__file__).parents[2] / "benchmarks"
HEAD = "gpu,driver,torch,triton,vllm,python,date,tests\n"
MACHINE = Machine("NVIDIA H200", "580.1", "2.14.0+cu130", "3.8.0", "0.33.0", "abc")


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        return import_module("tested_together")


def report(path: Path, *cases: str) -> Path:
    """A report of pytest: each case is ``name`` or ``name:what became of it``."""
    lines = "".join(
        f'<testcase classname="tests.a" name="{name}">{f"<{end}/>" if end else ""}</testcase>'
        for name, _, end in (case.partition(":") for case in cases)
    )
    path.write_text(f"<testsuites><testsuite>{lines}</testsuite></testsuites>", encoding="utf-8")
    return path


def test_passed_tests_are_counted_once(tool: ModuleType, tmp_path: Path) -> None:
    first = report(tmp_path / "1.xml", "a[x]", "b", "c:skipped")
    assert tool.passed([first, report(tmp_path / "2.xml", "b", "d")]) == 3


def test_a_test_that_ran_again_counts_by_its_last_report(tool: ModuleType, tmp_path: Path) -> None:
    failed = report(tmp_path / "1.xml", "a", "b:failure")
    again = report(tmp_path / "2.xml", "b")
    assert tool.passed([failed, again]) == 2
    with pytest.raises(ValueError, match=r"got tests\.a::b"):
        tool.passed([again, failed])


@pytest.mark.parametrize(
    ("cases", "said"),
    [
        (("a", "b:failure"), "got tests.a::b"),
        (("a", "b:error"), "got tests.a::b"),
        (("a:skipped",), "got none"),
    ],
)
def test_what_did_not_pass_makes_no_row(
    cases: tuple[str, ...], said: str, tool: ModuleType, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=said):
        tool.passed([report(tmp_path / "1.xml", *cases)])


def test_a_row_takes_the_place_of_its_stack(tool: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "table.csv"
    file.write_text(HEAD + "H100,580.1,2.11.0,3.6.0,,3.12,,\n", encoding="utf-8")
    tool.add_row(file, MACHINE, 7)
    added = tool.add_row(file, MACHINE, 9)
    rows = list(csv.DictReader(file.read_text(encoding="utf-8").splitlines()))
    assert [row["gpu"] for row in rows] == ["H100", "NVIDIA H200"]
    assert rows[1] == added
    assert (added["triton"], added["vllm"], added["tests"]) == ("3.8.0", "0.33.0", "9")
    assert added["date"]


def test_the_committed_table_has_the_columns_that_are_written(
    tool: ModuleType, tmp_path: Path
) -> None:
    file = tmp_path / "table.csv"
    file.write_text(tool.FILE.read_text(encoding="utf-8"), encoding="utf-8")
    tool.add_row(file, MACHINE, 1)
    assert file.read_text(encoding="utf-8").startswith(HEAD)
