"""sanitize.py: which reports of compute-sanitizer are of our kernels, and its verdict."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import psutil
import pytest

from tests import processes
from tests.kernels.sanitize import (
    FAMILIES,
    ROOT,
    check,
    count_passed,
    find_sanitizer,
    our_kernels,
    read_log,
)

LOG = """\
========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 4 bytes
=========     at attend_kernel+0x1f0 in api.py:120
=========     by thread (3,0,0) in block (1,0,0)
=========     Address 0x7f0012 is out of bounds
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: launch+0x2d0 in launch.cpp:7
=========
========= Error: Race reported between Write access at attend_kernel+0x9f0 in /k/fwd.py:12
=========     and Read access at attend_kernel+0x1250 in /k/fwd.py:40 [1024 hazards]
=========     and Read access at attend_kernel+0xa50 in /k/fwd.py:31 [512 hazards]
=========     and Write access at attend_kernel+0x9f0 in /k/fwd.py:12 [4 hazards]
=========
========= Error: Race reported between Read access at attend_kernel+0x10
=========     and Write access at attend_kernel+0x20 [8 hazards]
=========
========= Error: Race reported between Read access at attend_kernel+0x10
=========     and Write access at attend_kernel+0x20 [96 hazards]
=========
========= Uninitialized __global__ memory read of size 8 bytes
=========     at void at::native::reduce_kernel<512, float>(T1)+0x80
=========     by thread (0,0,0) in block (0,0,0)
=========
========= ERROR SUMMARY: 5 errors
"""


def test_findings_are_sorted_by_whose_kernel_they_are_in() -> None:
    ours, others, summary = read_log(LOG, {"attend_kernel"})
    assert dict(ours) == {
        "attend_kernel: Invalid __global__ read of size N bytes at 0x1f0 (api.py:120)": 1,
        "attend_kernel: Error: Race: Write at 0x9f0 (fwd.py:12) and Read at 0xa50 (fwd.py:31), "
        "0x1250 (fwd.py:40) and Write at 0x9f0 (fwd.py:12)": 1,
        "attend_kernel: Error: Race: Read at 0x10 and Write at 0x20": 2,
    }
    assert sum(others.values()) == 1
    assert summary == ["ERROR SUMMARY: 5 errors"]


def test_a_call_that_failed_is_of_others_and_what_is_not_understood_of_ours() -> None:
    failed = 'Program hit cudaErrorX (error 1) due to "x" on CUDA API call to cudaCall.'
    frames = "=========     Host Frame: main+0x12 in program\n========= \n"
    text = f"========= {failed}\n{frames}========= A new kind of report\n{frames}"
    ours, others, _ = read_log(f"{text}========= ERROR SUMMARY: 2 errors\n", our_kernels())
    assert dict(ours) == {"reports that were not understood": 1}
    assert dict(others) == {failed.replace("error 1", "error N"): 1}


def test_a_log_without_findings_has_none() -> None:
    text = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"
    ours, others, summary = read_log(text, our_kernels())
    assert (dict(ours), dict(others), len(summary)) == ({}, {}, 1)


def test_kernels_of_every_family_are_ours() -> None:
    wanted = {"attend_kernel", "nsa_gate_fwd_kernel", "block_sparse_hopper_fwd_kernel"}
    assert wanted <= our_kernels()
    assert "reduce_kernel" not in our_kernels()


def test_cases_are_files_that_exist() -> None:
    files = [w for cases in FAMILIES.values() for one in cases for w in one if w.endswith(".py")]
    assert len(files) > 5
    assert all((ROOT / file).is_file() for file in files)


@pytest.mark.parametrize(("log", "status"), [(LOG, 1), ("========= ERROR SUMMARY: 0 errors\n", 0)])
def test_the_command_writes_what_the_program_says(log: str, status: int, tmp_path: Path) -> None:
    """By a program in its place that writes this log."""
    (tmp_path / "said").write_text(log, encoding="utf-8")
    program = tmp_path / "compute-sanitizer"
    program.write_text(
        f'#!/bin/sh\nwhile [ "$1" != --log-file ]; do shift; done\ncp {tmp_path}/said "$2"\n'
        "echo ran one\necho ran two\n",
        encoding="utf-8",
    )
    program.chmod(0o755)
    assert find_sanitizer({"PATH": str(tmp_path)}) == str(program)
    written = tmp_path / "out.json"
    options = ("--tool", "memcheck", "--family", "sink_window", "--json", written)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = processes.run(
        sys.executable, "-m", "tests.kernels.sanitize", *options, cwd=ROOT, env=environment
    )
    assert done.returncode == status, done.stderr
    (checked,) = json.loads(written.read_text(encoding="utf-8"))["checked"]
    assert checked["ended"] == "passed"
    assert checked["passed"] == 2
    assert bool(checked["ours"]) == bool(status)
    assert done.stdout.startswith("no tool, sink_window: ")


@pytest.mark.parametrize(
    ("said", "passed"),
    [
        (".s..F.x  [ 50%]\n...\n\n3.5 s\n1 failed, 7 passed in 1.0s\n", 7),
        ("ran Case(1.0)\nran Case(2.0)\n", 2),
        ("ok   g4   mean pool  rms 1.0\nFAIL g4   lse\nok   g4   dq\n1 failed\n", 2),
        ("", 0),
    ],
    ids=["tests", "cases", "checks", "nothing"],
)
def test_what_passed_is_counted_by_what_was_printed(said: str, passed: int) -> None:
    assert count_passed(said) == passed


def test_cases_that_are_cut_off_leave_nothing(tmp_path: Path) -> None:
    """Not even what the program started, which would hold the GPU; what passed is known."""
    program = tmp_path / "compute-sanitizer"
    program.write_text(
        f"#!/bin/sh\nprintf '..s.'\nsleep 3600 &\necho $! > {tmp_path}/pid\nwait\n",
        encoding="utf-8",
    )
    program.chmod(0o755)
    checked = check(str(program), "memcheck", "sink_window", ("-m", "any"), 1.0)
    assert (checked.ended, checked.passed) == ("cut off after 1 s", 3)
    left = int((tmp_path / "pid").read_text())
    processes.wait_until(lambda: not psutil.pid_exists(left))


def test_where_there_is_no_program_the_command_says_where_it_comes_from() -> None:
    if find_sanitizer() is not None:
        pytest.skip("this machine has it")
    done = processes.run(sys.executable, "-m", "tests.kernels.sanitize", cwd=ROOT)
    assert done.returncode == 2
    assert "CUDA toolkit" in done.stderr
