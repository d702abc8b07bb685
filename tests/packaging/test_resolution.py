"""What a user's ``pip`` picks is a pair of torch and Triton on which the GPU tests ran."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from sparsek_backend import doctor
from tests.processes import run

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(sys.platform != "linux", reason="Triton has wheels for Linux alone")
@pytest.mark.parametrize("extra", ["", "[vllm]"])
def test_pip_picks_a_pair_that_ran_on_a_gpu(extra: str, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    options = ("--quiet", "--dry-run", "--ignore-installed", "--no-build-isolation")
    env = {name: value for name, value in os.environ.items() if name != "PIP_CONSTRAINT"}
    command = (sys.executable, "-m", "pip", "install", *options, "--report", report)
    done = run(*command, f".{extra}", cwd=ROOT, env=env)
    assert done.returncode == 0, done.stderr
    picked = [one["metadata"] for one in json.loads(report.read_text("utf-8"))["install"]]
    versions = {one["name"].lower(): doctor.parse_version(one["version"])[:2] for one in picked}
    assert (versions["torch"], versions["triton"]) in doctor.tested_pairs()
