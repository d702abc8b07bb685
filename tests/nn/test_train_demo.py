"""The training demo on the CPU: data, learning, resuming, the command and its files."""

from __future__ import annotations

import json
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from sparsek_backend.nn.demo import check
from sparsek_backend.nn.demo.cli import TINY, _measure, app
from sparsek_backend.nn.demo.data import IGNORED, RecallTask, make_batch
from sparsek_backend.nn.demo.train import DemoConfig, Trainer
from sparsek_kernels import nsa_attention
from tests import processes

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
        task=RecallTask(num_pairs=2, num_keys=4, num_values=4, num_noise=2),
        steps=150,
        min_length=32,
        max_length=32,
        learning_rate=1e-2,
    )
    trainer = Trainer(config, kind, tmp_path, CPU)
    trainer.run()
    assert trainer.losses[-1] < 0.1 * trainer.losses[0]
    assert trainer.recall(32, 2)["all"] > 0.95  # a guess is right in a quarter of the cases


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


def test_some_sequences_have_the_compressed_branch_alone(tmp_path: Path) -> None:
    """They see nothing of the other two, and which they are is a function of seed and step."""
    trainer = Trainer(replace(TINY, compressed_only=0.5), "nsa", tmp_path, CPU)
    drawn = [trainer.compressed_only(1000) for _ in range(2)]
    assert torch.equal(drawn[0], drawn[1])
    assert 400 < int(drawn[0].sum()) < 600
    trainer.step()
    assert not torch.equal(trainer.compressed_only(1000), drawn[0])
    tokens = make_batch(TINY.task, 2, 64, seed=0, step=0).tokens
    mixed = trainer.logits(tokens, torch.tensor([True, False]))
    assert torch.equal(mixed[1], trainer.logits(tokens)[1])
    with torch.no_grad():
        for block in trainer.model.blocks:
            block.attention.v_proj.weight[16:] += 1.0  # the values of the other two branches
    changed = trainer.logits(tokens, torch.tensor([True, False]))
    torch.testing.assert_close(changed[0], mixed[0])
    assert not torch.allclose(changed[1], mixed[1])
    dense = Trainer(TINY, "dense", tmp_path, CPU)
    assert dense.compressed_only(1000) is None
    with pytest.raises(TypeError, match="compressed_only"):
        dense.logits(tokens, torch.tensor([True, False]))


@pytest.mark.parametrize("length", [5, 200])
def test_attention_is_checked_before_it_is_timed(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = torch.get_rng_state()
    assert check.check_attention(TINY.model, length, CPU) < 1e-5
    assert torch.equal(torch.get_rng_state(), before)

    def wrong(**inputs: Any) -> Any:
        found = nsa_attention(**inputs)
        if inputs["q"].dtype == torch.float64:
            return found
        hook = inputs["v_swa"] * 0.2  # leaves the output as it is
        return found[0] + (hook - hook.detach()).sum(), found[1]

    monkeypatch.setattr(check, "nsa_attention", wrong)
    with pytest.raises(FloatingPointError, match="nsa: gradient of v_swa: expected fp64's"):
        check.check_attention(TINY.model, length, CPU)


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path: Path) -> None:
    trainer = Trainer(replace(TINY, save_every=1), "nsa", tmp_path, CPU)
    trainer.step()
    torch.nn.init.constant_(trainer.model.norm.weight, float("nan"))
    with pytest.raises(FloatingPointError, match="nsa: step 1 has a loss of nan"):
        trainer.step()
    assert Trainer(replace(TINY, save_every=1), "nsa", tmp_path, CPU).resumed_at == 1


def test_lengths_grow_and_batches_shrink() -> None:
    config = DemoConfig()
    lengths = [config.length_at(step) for step in range(config.steps)]
    assert lengths == sorted(lengths)
    assert set(lengths) == {128, 256, 512, 1024, 2048, 4096, 8192}
    assert config.length_at(config.steps // 5 - 1) == 128
    assert config.length_at(config.steps // 5) == 256
    assert config.length_at(config.steps * 7 // 10 - 1) == 4096
    assert config.length_at(config.steps * 7 // 10) == 8192
    assert {config.batch_at(s) * config.length_at(s) for s in range(0, 1500, 99)} == {32768}
    assert config.rate_at(0) < config.rate_at(74) == pytest.approx(1.5e-3)
    assert config.rate_at(1499) == pytest.approx(1.5e-4, rel=0.05)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"min_length": 3}, "min_length: expected at least 16, got 3"),
        ({"max_length": 32}, "max_length: expected at least min_length=64, got 32"),
        ({"steps": 0}, "steps: expected an integer >= 1"),
        ({"compressed_only": 1.0}, "compressed_only: expected a share from 0 to below 1, got 1.0"),
    ],
)
def test_bad_config(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(TINY, **changes)


def test_results_are_json_where_no_token_has_all_its_blocks(tmp_path: Path) -> None:
    config = replace(TINY, steps=1)
    config = replace(config, model=replace(config.model, nsa=replace(config.model.nsa, top_n=20)))
    trainer = Trainer(config, "nsa", tmp_path, CPU)
    trainer.run()
    result = _measure(trainer, [], Console(quiet=True))
    assert result.overlap == {}
    json.dumps(asdict(result), allow_nan=False)


@pytest.mark.parametrize("content", [b"", b"text", None], ids=["empty", "text", "another"])
def test_a_file_that_is_no_checkpoint_is_named(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "nsa.pt"
    torch.save({"a": 1}, path)
    if content is not None:
        path.write_bytes(content)
    options = ["--size", "tiny", "--device", "cpu", "--models", "nsa", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, options)
    assert done.exit_code == 1
    assert "nsa.pt: expected a checkpoint of this command" in " ".join(done.output.split())


def test_a_file_in_place_of_the_folder_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    options = ["--size", "tiny", "--device", "cpu", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, options)
    assert isinstance(done.exception, SystemExit)
    assert "error: " in done.output
    assert "0/20" not in done.output  # before anything is trained


def test_command_writes_results_and_plots(tmp_path: Path) -> None:
    options = ["--size", "tiny", "--steps", "4", "--device", "cpu", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, [*options, "--time-lengths", "64,128"])
    assert done.exit_code == 0, done.output
    assert "nsa: attention over 128 tokens is within" in done.output
    found = json.loads((tmp_path / "results.json").read_text())
    assert [run["kind"] for run in found["runs"]] == ["nsa", "dense"]
    assert [len(run["losses"]) for run in found["runs"]] == [4, 4]
    assert set(found["runs"][0]["recall"]) == {"64", "128"}
    assert {"all", "passkey"} <= set(found["runs"][0]["recall"]["128"])
    assert set(found["runs"][1]["step_ms"]) == {"64", "128"}
    assert 0 < found["runs"][0]["overlap"]["shared"] <= 1 <= found["runs"][0]["overlap"]["union"]
    for name in ("loss.png", "recall.png", "step_time.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    again = CliRunner().invoke(app, options)
    assert again.exit_code == 0
    assert json.loads((tmp_path / "results.json").read_text())["runs"][0]["resumed_at"] == 4
    for changed, words in (
        (("--seed", "5"), "seed differ"),
        (("--compressed-only", "0"), "compressed_only differ"),
        (("--compressed-only", "1"), "compressed_only: expected a share from 0 to below 1"),
        (("--time-lengths", "64,8"), "--time-lengths: expected numbers of at least 16 tokens"),
        (("--time-lengths", "64k"), "--time-lengths: expected numbers of at least 16 tokens"),
        (("--device", "tpu"), "device: expected auto, cuda or cpu, got 'tpu'"),
    ):
        wrong = CliRunner().invoke(app, [*options, *changed])
        assert wrong.exit_code == 1
        assert words in " ".join(wrong.output.split())


RUN = "from sparsek_backend.nn.demo.cli import app; app()"
KILLED = f"""
import os, signal
from sparsek_backend.nn.demo.train import Trainer
save = Trainer._save
Trainer._save = lambda self: (save(self), os.kill(os.getpid(), signal.SIGKILL))
{RUN}
"""
"""The command, killed as soon as it has written a checkpoint."""


def demo_process(folder: Path, options: tuple[str, ...], code: str = RUN) -> int:
    """The exit status of the command in a process of its own."""
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root), str(root / "kernels"), os.environ.get("PYTHONPATH", "")])
    done = processes.run(
        *(sys.executable, "-c", code, "--out", folder, *options),
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )
    print(done.stderr)
    return done.returncode


SHORT = ("--device", "cuda", "--steps", "15", "--max-length", "2048", "--save-every", "5")


ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param("nsa", ("--device", "cpu", "--size", "tiny"), id="cpu-nsa"),
        pytest.param("nsa", SHORT, marks=ON_GPU, id="gpu-nsa"),
        pytest.param("dense", SHORT, marks=ON_GPU, id="gpu-dense"),
    ],
)
def test_a_process_that_was_killed(kind: str, options: tuple[str, ...], tmp_path: Path) -> None:
    """Killed after a checkpoint and started again, it ends like two unbroken runs of the seed."""
    options = ("--models", kind, *options)
    with ThreadPoolExecutor(3) as pool:
        broken = pool.submit(demo_process, tmp_path / "broken", options, KILLED)
        whole = [
            pool.submit(demo_process, tmp_path / name, options) for name in ("first", "second")
        ]
        assert broken.result() == -signal.SIGKILL
        assert (tmp_path / "broken" / f"{kind}.pt").exists()
        assert not (tmp_path / "broken" / "results.json").exists()
        assert demo_process(tmp_path / "broken", options) == 0
        assert [status.result() for status in whole] == [0, 0]
    runs = [
        json.loads((tmp_path / name / "results.json").read_text())["runs"][0]
        for name in ("broken", "first", "second")
    ]
    assert [run["resumed_at"] > 0 for run in runs] == [True, False, False]
    assert runs[0]["losses"] == runs[1]["losses"] == runs[2]["losses"]
    assert runs[0]["recall"] == runs[1]["recall"] == runs[2]["recall"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_full_size_learns_to_select(tmp_path: Path) -> None:
    """At 2048 tokens half the blocks are selected: a model that does not choose recalls half."""
    config = replace(DemoConfig(), steps=900, max_length=2048)
    trainer = Trainer(config, "nsa", tmp_path, torch.device("cuda"))
    trainer.run()
    assert trainer.recall(2048, 2)["all"] > 0.95
