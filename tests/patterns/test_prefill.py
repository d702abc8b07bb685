"""Patterns for prefills: ranked from masses, kept in files, learned from a model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("safetensors", reason="safetensors is not installed (the patterns extra)")

from safetensors import safe_open
from safetensors.torch import save_file

from sparsek_backend.patterns.prefill import PrefillPattern, ranked_entries

ROWS = 40


def planted() -> torch.Tensor:
    """Masses of two heads: a slash over a vertical, and a vertical over a slash."""
    generator = torch.Generator().manual_seed(0)
    mass = 0.01 * torch.rand(2, ROWS, ROWS, generator=generator).tril()
    row = torch.arange(11, ROWS)
    mass[0, row, row - 11] += 2.0
    mass[0, 6:, 5] += 1.0
    mass[1, 8:, 7] += 2.0
    mass[1, row, row - 11] += 1.0
    mass[:, :, 0] = mass[:, range(ROWS), range(ROWS)] = 9.0  # sinks and window
    return mass


def test_what_holds_most_comes_first() -> None:
    found = ranked_entries(planted(), length=64)
    assert found.dtype == torch.int32
    assert found[:, :2].tolist() == [[-11, 5], [7, -11]]
    assert (found != 0).all(), "sinks are attended anyway"
    ranked = found[0].tolist()
    live = [e for e in ranked if e != -1]
    assert len(set(live)) == len(live)


def test_a_head_without_mass_lists_what_is_near() -> None:
    assert ranked_entries(torch.zeros(1, 6, 6), length=3).tolist() == [[-1, -1, -1]]


@pytest.mark.parametrize(
    ("mass", "options", "message"),
    [
        (torch.ones(2, 3, 4), {}, r"mass: expected shape \[P, R, 3\]"),
        (torch.ones(2, 3, 3), {"window": 0}, "window: expected"),
        (torch.ones(2, 3, 3), {"length": 0}, "length: expected"),
    ],
)
def test_refusals(mass: torch.Tensor, options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ranked_entries(mass, **options)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    entries = ranked_entries(planted())
    PrefillPattern({0: entries, 2: entries.flip(0)}, 64, "a/model").save(tmp_path / "f")
    return tmp_path / "f"


def test_files(file: Path) -> None:
    found = PrefillPattern.load(file)
    assert (found.block_size, found.model, found.num_kv_heads) == (64, "a/model", 2)
    assert sorted(found.entries) == [0, 2]
    assert torch.equal(found.entries[2], ranked_entries(planted()).flip(0))


@pytest.mark.parametrize(
    ("header", "tensors", "message"),
    [
        ({"format": "other"}, {}, "format: expected 'sparsek.prefill_pattern', got 'other'"),
        ({"version": "9"}, {}, "version: expected 1, got '9'"),
        ({"note": "mine"}, {}, "note: expected no field"),
        ({}, {"2": torch.zeros(2, 128, dtype=torch.int32)}, "sha256: expected"),
    ],
)
def test_a_changed_file_is_refused(
    header: dict[str, str], tensors: dict[str, torch.Tensor], message: str, file: Path
) -> None:
    with safe_open(file, framework="pt") as opened:
        changed = {**opened.metadata(), **header}
        whole = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    save_file({**whole, **tensors}, file, changed)
    with pytest.raises(ValueError, match=message):
        PrefillPattern.load(file)


def test_the_command_learns_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    from sparsek_backend.patterns.tools import cli
    from tests.transformers_op import tiny

    model, ids = tiny.make_model(), tiny.tokens(2, 96)
    monkeypatch.setattr(cli, "_load", lambda *_: (model, [ids[:1], ids[1:]]))
    out = tmp_path / "f.safetensors"
    command = ["learn", "a/model", "--out", str(out), "--prefill", "--block-size", "16"]
    done = CliRunner().invoke(cli.app, command)
    assert done.exit_code == 0, done.output
    assert "for prefills, learned from 2 texts" in done.output
    unread = CliRunner().invoke(cli.app, ["stats", str(out)])
    assert unread.exit_code == 2
    assert "which `learn --prefill` made for vLLM" in unread.output
    found = PrefillPattern.load(out)
    assert found.model == "a/model"
    assert len(found.entries) == model.config.num_hidden_layers
    assert found.num_kv_heads == model.config.num_key_value_heads
    refused = CliRunner().invoke(cli.app, [*command, "--sparsity", "0.5"])
    assert refused.exit_code == 2
    assert "--prefill: expected neither" in refused.output
