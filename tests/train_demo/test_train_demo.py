"""The training demo on the CPU: data, learning, resuming, the command and its files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from sparsek_backend.train_demo import cli
from sparsek_backend.train_demo.cli import app
from sparsek_backend.train_demo.task import KEYS, NONE, VALUES, make_batch
from sparsek_backend.train_demo.train import DemoConfig, Trainer
from tests import processes
from tests.train_demo.unseen import judge_by_few

CPU = torch.device("cpu")
SHORT = ("--device", "cpu", "--steps", "6", "--max-length", "64", "--save-every", "2")


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Tiny tensors: threads only wait for each other, and add up in any order."""
    threads = torch.get_num_threads()
    torch._C.set_num_threads(1)
    yield
    torch._C.set_num_threads(threads)


def trained(config: DemoConfig, folder: Path, steps: int | None = None) -> Trainer:
    trainer = Trainer(config, "nsa", folder, CPU)
    while len(trainer.losses) < (config.steps if steps is None else steps):
        trainer.step()
    return trainer


@pytest.mark.parametrize("length", [32, 75])
def test_every_question_has_its_answer(length: int) -> None:
    batch = make_batch(8, length, seed=1, step=3)
    assert all(map(torch.equal, batch, make_batch(8, length, seed=1, step=3)))
    assert not torch.equal(batch.tokens, make_batch(8, length, seed=1, step=4).tokens)
    assert batch.tokens.shape == (8, length)
    for tokens, answers, told in zip(*batch, strict=True):
        asked = (answers != NONE).nonzero().flatten().tolist()
        assert asked == list(range(length // 2, length))
        keys, values = tokens // (VALUES + 1), tokens % (VALUES + 1)
        assert sorted(keys[: length // 2].tolist())[:KEYS] == list(range(KEYS))
        for at in asked:
            assert keys[told[at]] == keys[at] < KEYS
            assert values[told[at]] == answers[at] < VALUES == values[at]


def test_lengths_double_up_to_the_longest() -> None:
    config = DemoConfig(steps=100, max_length=300)
    assert config.lengths == [32, 64, 128, 256, 300]
    assert [config.length_at(step) for step in (0, 19, 20, 79, 80, 99)] == [
        32,
        32,
        64,
        256,
        300,
        300,
    ]
    assert DemoConfig(max_length=32).lengths == [32]
    rates = [config.rate_at(step) for step in range(100)]
    assert rates.index(max(rates)) == 4
    assert rates[-1] == pytest.approx(1e-3, rel=0.05)


def test_the_command_learns_to_select(tmp_path: Path) -> None:
    """From chance to almost all answers, in sequences that are thrice what a token attends."""
    options = ["--device", "cpu", "--steps", "100", "--max-length", "128", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, options)
    assert done.exit_code == 0, done.output
    assert "a guess has 6.2%" in " ".join(done.output.split())
    sparse, dense = json.loads((tmp_path / "results.json").read_text())["runs"]
    assert [run["kind"] for run in (sparse, dense)] == ["nsa", "dense"]
    for run in (sparse, dense):
        assert run["recalls"][0] < 0.12
        assert set(run["recall"]) == {"32", "64", "128"}
        assert min(run["recall"].values()) > 0.9
    assert sparse["compressed_only"]["128"] < 0.5  # the selected branch is what answers
    assert sparse["found"] > 0.7 > 0.3 > sparse["by_chance"]
    assert (tmp_path / "train-demo.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_that_stopped_ends_like_an_unbroken_one(tmp_path: Path) -> None:
    config = DemoConfig(steps=7, max_length=64, save_every=4)
    whole = trained(config, tmp_path / "whole")
    trained(config, tmp_path / "broken", steps=6)
    second = Trainer(config, "nsa", tmp_path / "broken", CPU)
    assert second.resumed_at == 4
    second = trained(config, tmp_path / "broken")
    assert (second.losses, second.recalls) == (whole.losses, whole.recalls)
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, second.model.state_dict()[name]), name


def test_sequences_with_the_compressed_branch_alone_see_nothing_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge_by_few(monkeypatch)
    trainer = trained(DemoConfig(steps=2), tmp_path)
    before = [trainer.recall(32, compressed_only=shut) for shut in (True, False)]
    with torch.no_grad():
        for layer in trainer.model.model.layers:
            layer.self_attn.v_proj.weight[32:].normal_(std=10.0)  # values of the other branches
    after = [trainer.recall(32, compressed_only=shut) for shut in (True, False)]
    assert before[0] == after[0]
    assert before[1] != after[1]


def test_a_gradient_that_is_not_finite_stops_the_run(tmp_path: Path) -> None:
    trainer = trained(DemoConfig(save_every=1), tmp_path, steps=1)
    torch.nn.init.constant_(trainer.model.model.norm.weight, float("nan"))
    with pytest.raises(RuntimeError, match="non-finite"):
        trainer.step()
    assert Trainer(DemoConfig(save_every=1), "nsa", tmp_path, CPU).resumed_at == 1


@pytest.mark.parametrize("content", [b"", b"text", None], ids=["empty", "text", "another"])
def test_a_file_that_is_no_checkpoint_is_named(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "nsa.pt"
    torch.save({"a": 1}, path)
    if content is not None:
        path.write_bytes(content)
    done = CliRunner().invoke(app, ["--device", "cpu", "--out", str(tmp_path)])
    assert done.exit_code == 2
    assert "nsa.pt: expected a checkpoint of this command" in " ".join(done.output.split())


def test_a_cpu_trains_on_one_thread(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        options = [*SHORT, "--model", "dense", "--out", str(tmp_path)]
        assert CliRunner().invoke(app, options).exit_code == 0
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_bad_options_are_refused_before_anything_is_trained(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    options = [*SHORT, "--model", "dense", "--out", str(folder)]
    assert CliRunner().invoke(app, options).exit_code == 0
    (tmp_path / "file").write_text("")
    for changed, words in (
        (("--seed", "5"), "expected a checkpoint of {'steps': 6"),
        (("--compressed-only", "1"), "--compressed-only"),
        (("--max-length", "31"), "--max-length"),
        (("--model", "sparse"), "--model: expected nsa or dense, got dense, sparse"),
        (("--device", "tpu"), "device: expected auto, cuda or cpu, got 'tpu'"),
        (("--out", str(tmp_path / "file")), "File exists"),
        (("--context-parallel", "3"), "--context-parallel: expected 1, 2, 4, 8 or 16, got 3"),
        (("--context-parallel", "0"), "--context-parallel: expected 1, 2, 4, 8 or 16, got 0"),
        (
            ("--context-parallel", "4", "--max-length", "66"),
            "--max-length: expected a multiple of 8",
        ),
        (("--seed", str(10**11)), "--seed"),
    ):
        wrong = CliRunner().invoke(app, [*options, *changed])
        assert wrong.exit_code == 2, wrong.output
        assert words in " ".join(wrong.output.replace("│", " ").split())
        assert "right answers" not in wrong.output


@pytest.mark.parametrize("models", [["nsa", "dense"], ("nsa", "dense")], ids=["list", "tuple"])
def test_ranks_get_every_option_that_was_given(
    models: list[str] | tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Typer keeps the values of a repeatable option as a list, 0.20 as a tuple."""
    ran: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        ran.append(command)
        return subprocess.CompletedProcess(command, 3)

    def launch(context: typer.Context) -> int:
        context.params["model"] = models
        return real(2, context)

    real = cli._launch
    monkeypatch.setattr(cli.subprocess, "run", run)
    monkeypatch.setattr(cli, "_launch", lambda _, context: launch(context))
    options = ["--model", "nsa", "--model", "dense", "--context-parallel", "2", "--steps", "6"]
    assert CliRunner().invoke(app, options).exit_code == 3
    given = " ".join(ran[0]).partition("train-demo ")[2]
    assert given == "--steps 6 --model nsa --model dense --context-parallel 2"


KILLED = """
import os, signal
from sparsek_backend.train_demo.cli import app
from sparsek_backend.train_demo.train import Trainer
save = Trainer._save
Trainer._save = lambda self: (save(self), os.kill(os.getpid(), signal.SIGKILL))
app()
"""
"""The command, killed as soon as it has written a checkpoint."""


def test_a_process_that_was_killed_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judge_by_few(monkeypatch)
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root), str(root / "kernels"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    options = [*SHORT, "--model", "nsa", "--out"]
    done = processes.run(sys.executable, "-c", KILLED, *options, tmp_path / "a", env=environment)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert [x.name for x in (tmp_path / "a").iterdir()] == ["nsa.pt"]
    runs = []
    for name in "ab":
        assert CliRunner().invoke(app, [*options, str(tmp_path / name)]).exit_code == 0
        (run,) = json.loads((tmp_path / name / "results.json").read_text())["runs"]
        runs.append(run)
    assert [run.pop("resumed_at") for run in runs] == [2, 0]
    assert runs[0] == runs[1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_learns_on_a_gpu(tmp_path: Path) -> None:
    trainer = Trainer(DemoConfig(), "nsa", tmp_path, torch.device("cuda"))
    while len(trainer.losses) < trainer.config.steps:
        trainer.step()
    assert trainer.recall(512) > 0.9
