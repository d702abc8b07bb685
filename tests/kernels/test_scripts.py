"""scripts.py: each script starts as if it were the first, and ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import processes
from tests.kernels import scripts


def test_a_script_has_its_arguments_folder_and_status(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("import os\nvalue = os.environ['GIVEN']\n")
    script = tmp_path / "script.py"
    script.write_text("import sys, beside\nprint(sys.argv[1], beside.value)\nsys.exit(3)\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GIVEN", "here")
        done = scripts.run(script, 7)
    assert (done.returncode, done.stdout) == (3, "7 here\n")


def test_a_script_leaves_nothing_to_the_next(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import torch\nassert not hasattr(torch, 'left')\ntorch.left = 1\n")
    assert [scripts.run(script).returncode for _ in range(2)] == [0, 0]


@pytest.mark.parametrize("interpret", [False, True])
def test_kernels_are_what_was_asked_for(interpret: bool, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from sparsek_kernels.common.kernels.row_dots import row_dots_kernel\n"
        "print(type(row_dots_kernel).__name__)\n"
    )
    done = scripts.run(script, interpret=interpret)
    assert done.stdout.strip() == ("InterpretedFunction" if interpret else "JITFunction")


def test_a_script_that_hangs_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "script.py"
    script.write_text("import time\nprint('began', flush=True)\ntime.sleep(900)\n")
    scripts.run("-m", "json.tool", "/dev/null")  # the packages are imported
    monkeypatch.setattr(processes, "SECONDS", 3.0)
    with pytest.raises(AssertionError, match=r"(?s)not ended: .*began.*script\.py"):
        scripts.run(script)
    monkeypatch.undo()
    script.write_text("print('again')\n")
    assert scripts.run(script).stdout == "again\n"
