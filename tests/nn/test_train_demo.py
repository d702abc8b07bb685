"""The training demo on the CPU: data, learning, resuming, the command and its files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from sparsek_backend.nn.demo.cli import TINY, app
from sparsek_backend.nn.demo.data import IGNORED, RecallTask, make_batch
from sparsek_backend.nn.demo.train import DemoConfig, Trainer

CPU = torch.device("cpu")


def test_every_question_has_its_answer() -> None:
    task = RecallTask(num_pairs=5, num_keys=9, num_values=7, num_noise=6)
    batch = make_batch(task, 8, 64, seed=1, step=3)
    again = make_batch(task, 8, 64, seed=1, step=3)
    assert torch.equal(batch.tokens, again.tokens)
    assert not torch.equal(batch.tokens, make_batch(task, 8, 64, seed=1, step=4).tokens)
    assert int(batch.tokens.max()) < task.vocab_size
    for row in range(8):
        asked = (batch.targets[row] != IGNORED).nonzero().flatten().tolist()
        assert len(asked) == 5
        assert len({int(batch.tokens[row, at]) for at in asked}) == 5
        for at in asked:
            pair = at - int(batch.distance[row, at])
            assert batch.tokens[row, pair] == batch.tokens[row, at]
            assert (
                batch.tokens[row, pair + 1] == batch.targets[row, at] == batch.tokens[row, at + 1]
            )
            is_passkey = int(batch.tokens[row, at]) == task.num_noise
            assert bool(batch.passkey[row, at]) == is_passkey
        assert int(batch.passkey[row].sum()) == 1


@pytest.mark.parametrize("kind", ["nsa", "dense"])
def test_a_tiny_model_learns(kind: str, tmp_path: Path) -> None:
    config = replace(
        TINY,
        task=RecallTask(num_pairs=1, num_keys=1, num_values=2, num_noise=2),
        steps=60,
        min_length=16,
        max_length=16,
        learning_rate=1e-2,
    )
    trainer = Trainer(config, kind, tmp_path, CPU)
    trainer.run()
    start, end = sum(trainer.losses[:5]) / 5, sum(trainer.losses[-5:]) / 5
    assert end < 0.75 * start


def test_a_killed_run_ends_like_an_unbroken_one(tmp_path: Path) -> None:
    config = replace(TINY, steps=11, save_every=4)
    whole = Trainer(config, "nsa", tmp_path / "whole", CPU)
    whole.run()
    first = Trainer(config, "nsa", tmp_path / "broken", CPU)
    for _ in range(6):
        first.step()
    second = Trainer(config, "nsa", tmp_path / "broken", CPU)
    assert second.resumed_at == 4
    second.run()
    assert second.losses == whole.losses
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, second.model.state_dict()[name]), name
    with pytest.raises(ValueError, match="expected a checkpoint of the same run, but seed differ"):
        Trainer(replace(config, seed=1), "nsa", tmp_path / "broken", CPU)


def test_lengths_grow_and_batches_shrink() -> None:
    config = DemoConfig()
    lengths = [config.length_at(step) for step in range(config.steps)]
    assert lengths == sorted(lengths)
    assert set(lengths) == {512, 1024, 2048, 4096, 8192}
    assert {config.batch_at(s) * config.length_at(s) for s in range(0, 2000, 99)} == {65536}
    assert config.rate_at(0) < config.rate_at(99) == pytest.approx(1e-3)
    assert config.rate_at(1999) == pytest.approx(1e-4, rel=0.05)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"min_length": 3}, "min_length: expected at least 16, got 3"),
        ({"max_length": 32}, "max_length: expected at least min_length=64, got 32"),
        ({"steps": 0}, "steps: expected an integer >= 1"),
    ],
)
def test_bad_config(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(TINY, **changes)


def test_command_writes_results_and_plots(tmp_path: Path) -> None:
    options = ["--size", "tiny", "--steps", "4", "--device", "cpu", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, [*options, "--time-lengths", "64,128"])
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "results.json").read_text())
    assert [run["kind"] for run in found["runs"]] == ["nsa", "dense"]
    assert [len(run["losses"]) for run in found["runs"]] == [4, 4]
    assert set(found["runs"][0]["recall"]) == {"64", "128"}
    assert {"all", "passkey"} <= set(found["runs"][0]["recall"]["128"])
    assert set(found["step_ms"]["nsa"]) == {"64", "128"}
    for name in ("loss.png", "recall.png", "step_time.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    again = CliRunner().invoke(app, options)
    assert again.exit_code == 0
    assert json.loads((tmp_path / "results.json").read_text())["runs"][0]["resumed_at"] == 4
    wrong = CliRunner().invoke(app, [*options, "--seed", "5"])
    assert wrong.exit_code == 1
    assert "seed differ" in " ".join(wrong.output.split())
