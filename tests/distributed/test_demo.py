"""`sparsek train-demo` on several ranks: the losses of one, and runs that others go on with."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from sparsek_backend.train_demo.cli import app
from sparsek_backend.train_demo.train import Trainer
from tests import processes
from tests.distributed import training_cases
from tests.distributed.group import Ranks
from tests.train_demo.unseen import judge_by_few

TOLERANCE = 1e-4
"""Losses are about 3, in fp32; ranks add in another order, and steps build on each other."""


@pytest.mark.parametrize("kind", ["nsa", "dense"])
def test_losses_are_those_of_one_rank_on_two_and_on_four(
    ranks: Ranks, kind: str, tmp_path: Path
) -> None:
    """Two ranks stop after a checkpoint and a step more, four go on, and one ends the run."""
    alone = training_cases.train_demo(None, kind, str(tmp_path / "whole"), 8)
    folder = str(tmp_path / "shared")
    pair = Ranks(2)
    try:
        first = pair.run(2, training_cases.train_demo, kind, folder, 3)
    finally:
        pair.close()
    then = ranks.run(4, training_cases.train_demo, kind, folder, 6)
    last = Trainer(training_cases.DEMO, kind, Path(folder), torch.device("cpu"))
    assert last.resumed_at == 6
    ended = training_cases.train_demo(None, kind, folder, 8)
    for found in (*first, *then, ended):
        assert found == pytest.approx(alone[: len(found)], abs=TOLERANCE)
    assert all(found == first[0] for found in first)


def test_sequences_that_ranks_cannot_share(ranks: Ranks) -> None:
    for done, what in ranks.outcomes(4, training_cases.train_demo_of_another_length, 66):
        assert not done
        assert what[0] == "ValueError"
        assert "expected a multiple of 8" in what[1], what[1]


KILLED = """
import os, signal
if os.environ.get("LOCAL_RANK") == "0":
    from sparsek_backend.train_demo.train import Trainer
    save = Trainer._save
    Trainer._save = lambda self: (save(self), os.kill(os.getpid(), signal.SIGKILL))
"""
"""Every process runs it before its program: the first rank is killed at its first checkpoint."""


def killed_and_resumed(folder: Path, *options: str) -> dict[str, Any]:
    """Runs of one model: ``whole`` in this process, ``broken`` by two ranks, then in this one."""
    site = folder / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(KILLED)
    root = Path(__file__).parents[2]
    path = [str(site), str(root), str(root / "kernels"), os.environ.get("PYTHONPATH", "")]
    command = [sys.executable, "-m", "sparsek_backend", "train-demo", *options]
    command += ["--out", str(folder / "broken"), "--context-parallel", "2"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
    broken = processes.run(*command, env=environment)
    assert broken.returncode == 1, broken.stderr[-3000:]
    assert "SIGKILL" in broken.stderr, broken.stderr[-3000:]
    runs = {}
    for name in ("broken", "whole"):
        done = CliRunner().invoke(app, [*options, "--out", str(folder / name)])
        assert done.exit_code == 0, done.output
        (runs[name],) = json.loads((folder / name / "results.json").read_text())["runs"]
    return runs


def test_a_killed_command_goes_on_with_another_number_of_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge_by_few(monkeypatch)
    options = ("--model", "nsa", "--device", "cpu", "--max-length", "64")
    runs = killed_and_resumed(tmp_path, *options, "--steps", "12", "--save-every", "4")
    assert runs["broken"]["resumed_at"] == 4
    assert runs["broken"]["losses"] == pytest.approx(runs["whole"]["losses"], abs=TOLERANCE)
