"""benchmarks/soak.py: what it says of two backends' answers, and of what a run was seen to do."""

from __future__ import annotations

import argparse
import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def script() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        return import_module("soak")


def answers(path: Path, *tokens: int, lengths: tuple[int, ...] = (9,)) -> Path:
    """The answers of a run whose second token is as good as the first by 0.2, the third by 3."""
    known = {"5": -0.1, "6": -0.3, "7": -3.1}
    one = {
        "tokens": list(tokens),
        "logprobs": [known[str(token)] for token in tokens],
        "known": [known for _ in tokens],
    }
    found = {"dtype": "bfloat16", "prompts": lengths, "answers": [one]}
    path.write_text(json.dumps(found), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("theirs", "equal", "status"),
    [((5, 5), 1, 0), ((5, 6), 0, 0), ((5, 7), 0, 1)],
    ids=["equal", "a tie", "another answer"],
)
def test_answers_of_two_backends_part_at_ties_alone(
    theirs: tuple[int, ...],
    equal: int,
    status: int,
    script: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ours = answers(tmp_path / "ours", *theirs)
    assert script.compare_backends(ours, answers(tmp_path / "theirs", 5, 5)) == status
    assert json.loads(capsys.readouterr().out)["equal"] == equal


def test_answers_to_other_prompts_are_refused(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = answers(tmp_path / "ours", 5)
    assert script.compare_backends(ours, answers(tmp_path / "theirs", 5, lengths=(8,))) == 1
    assert "other prompts" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("compiled", "drafted", "said"),
    [
        ([], 7.0, []),
        (["vllm.sample._kernel"], 7.0, []),
        (["sparsek_kernels.paged.x"], 7.0, ["compiled for a request: sparsek_kernels.paged.x"]),
        ([], 0.0, ["speculation drafted no token"]),
    ],
)
def test_late_kernels_and_idle_speculation_fail_a_run(
    compiled: list[str], drafted: float, said: list[str], script: Any
) -> None:
    arguments = argparse.Namespace(dtype="bfloat16", batch_invariant=True, speculate=3)
    totals = script.Totals(finished=2, aborted=1, equal=2, identical=2)
    assert script.verdict(totals, arguments, {}, {"drafted": drafted}, compiled) == said
