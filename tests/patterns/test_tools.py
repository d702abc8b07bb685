"""`sparsek patterns`, the files of models, statistics and figures."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("safetensors", reason="safetensors is not installed (the patterns extra)")
pytest.importorskip("scipy", reason="scipy is not installed (the patterns extra)")

from safetensors import safe_open
from safetensors.torch import load_file, save_file

from sparsek_backend.patterns import BlockSparsePattern, ModelPatterns
from sparsek_backend.patterns.tools.cli import app
from sparsek_backend.patterns.tools.convert import read_patterns, write_patterns
from sparsek_backend.patterns.tools.statistics import pattern_statistics

runner = CliRunner()


def layers(count: int = 2) -> ModelPatterns:
    """Patterns of two heads with weights."""
    patterns = {}
    for layer in range(count):
        generator = torch.Generator().manual_seed(layer)
        mass = torch.rand(2, 5, 5, generator=generator)
        mask = (mass > 0.5) & torch.ones(5, 5).tril().bool()
        patterns[3 * layer] = BlockSparsePattern.from_mask(mask, 32, mass=mass)
    return ModelPatterns(patterns, "a/model", 0.9)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    layers().save(tmp_path / "p.safetensors")
    return tmp_path / "p.safetensors"


def same(a: BlockSparsePattern, b: BlockSparsePattern) -> bool:
    weights = (a.weights is None) == (b.weights is None)
    return torch.equal(a.mask(), b.mask()) and weights and torch.equal(a.mass(), b.mass())


def test_a_models_file_says_what_it_is(file: Path) -> None:
    found, made = ModelPatterns.load(file), layers()
    assert (found.model, found.sparsity, found.block_size) == ("a/model", 0.9, 32)
    assert sorted(found.patterns) == [0, 3]
    assert all(same(found.patterns[n], made.patterns[n]) for n in (0, 3))
    with safe_open(file, framework="pt") as opened:
        header = opened.metadata()
    assert (header["kind"], header["version"]) == ("block_sparse", "1")
    assert all(len(header[f"sha256.{n}"]) == 64 for n in (0, 3))
    made.patterns[3].save(file)
    assert same(ModelPatterns.load(file).patterns[0], made.patterns[3])


@pytest.mark.parametrize(
    ("header", "tensors", "message"),
    [
        ({"kind": "vertical_slash"}, {}, "kind: expected 'block_sparse', got 'vertical_slash'"),
        ({"version": "2"}, {}, "version: expected 1, got '2'"),
        ({"format": "other"}, {}, "format: expected 'sparsek.model_patterns', got 'other'"),
        ({"sparsity": "much"}, {}, "sparsity: could not convert"),
        ({"sparsity": "nan"}, {}, "sparsity: expected 0 to below 1, got nan"),
        ({"sparsity": "-0.5"}, {}, "sparsity: expected 0 to below 1, got -0.5"),
        ({"sha256.3": "0"}, {}, "sha256: expected .* got 0"),
        ({"sha256.9": "0"}, {}, "sha256.9: expected no field"),
        ({"note": "mine"}, {}, "note: expected no field"),
        ({}, {"3.weights": torch.ones(7)}, "(sha256|weights): expected"),
        ({}, {"x.weights": torch.ones(7)}, "layer: expected a number, got 'x'"),
        ({}, {"4.weights": torch.ones(7)}, "sha256.4: expected a field of this name"),
    ],
)
def test_a_changed_file_is_refused(
    header: dict[str, str], tensors: dict[str, Any], message: str, file: Path
) -> None:
    with safe_open(file, framework="pt") as opened:
        fields = {**opened.metadata(), **header}
    save_file({**load_file(file), **tensors}, file, fields)
    with pytest.raises(ValueError, match=message) as error:
        ModelPatterns.load(file)
    assert str(file) in str(error.value)


def test_layers_have_one_grid() -> None:
    pattern = BlockSparsePattern.local((4, 4), 16, window=1)
    with pytest.raises(ValueError, match="patterns: expected one block size and shape"):
        ModelPatterns({0: pattern, 1: BlockSparsePattern.local((4, 4), 32, window=1)})
    with pytest.raises(ValueError, match="patterns: expected one block size and shape"):
        ModelPatterns({})
    with pytest.raises(ValueError, match="sparsity: expected 0 to below 1"):
        ModelPatterns({0: pattern}, sparsity=1.0)
    with pytest.raises(ValueError, match="layer: expected an integer >= 0, got -1"):
        ModelPatterns({-1: pattern})


def test_statistics_by_hand() -> None:
    mask = torch.tensor([[1, 0, 0], [1, 1, 0], [0, 0, 1]]).bool()
    mass = torch.tensor([[1.0, 0, 0], [0.1, 0.5, 0], [0, 0, 0.54]])
    found = pattern_statistics(
        BlockSparsePattern.from_mask(mask, 16, mass=mass), head_dim=32, heads=2
    )
    assert (found.density, found.sparsity) == (4 / 9, pytest.approx(1 / 3))
    assert (found.row_mean, found.row_max) == (4 / 3, 2)
    assert found.row_std == pytest.approx((2 / 9) ** 0.5)
    assert found.importance == [0, 1, 0, 0, 0, 2, 0, 0, 0, 1]
    assert found.flops == 2 * 4 * 256 * (4 * 32 + 6)
    assert found.tensor_core_share == pytest.approx(128 / 134)
    assert found.dense_mask_bytes == 48 * 48
    assert found.bytes == 4 * (4 + 4 + 4 + 4 + 4)
    assert pattern_statistics(BlockSparsePattern.local((3, 3), 16, window=1)).importance == []


def test_stats_command(file: Path) -> None:
    result = runner.invoke(app, ["stats", str(file), "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["model"], found["block_size"], found["shape"]) == ("a/model", 32, [5, 5])
    wanted = pattern_statistics(layers().patterns[3])
    assert found["layers"]["3"]["density"] == wanted.density
    assert sum(found["layers"]["3"]["importance"]) == layers().patterns[3].num_blocks
    table = runner.invoke(app, ["stats", str(file)])
    assert table.exit_code == 0
    assert "a/model" in table.output


def test_show_command(file: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = runner.invoke(app, ["show", str(file), "--out", str(tmp_path / "page")])
    assert result.exit_code == 0, result.output
    images = sorted(path.name for path in (tmp_path / "page").glob("*.png"))
    assert images == ["layer_000.png", "layer_003.png"]
    page = (tmp_path / "page" / "index.html").read_text()
    assert len(re.findall(r'<img [^>]*src="data:image/png;base64,', page)) == 2
    assert "Patterns of a/model" in page
    assert page.count("█") >= 2, "a histogram for each layer"
    assert page.count("<tr>") == 3
    assert "http" not in page


def test_convert_command(file: Path, tmp_path: Path) -> None:
    made = layers().patterns[3]
    single, matrix, back = (tmp_path / n for n in ("one.safetensors", "m.npz", "b.safetensors"))
    steps = [
        [str(file), str(single), "--layer", "3"],
        [str(single), str(matrix), "--head", "1"],
        [str(matrix), str(back), "--block-size", "32"],
    ]
    for step in steps:
        result = runner.invoke(app, ["convert", *step])
        assert result.exit_code == 0, result.output
    assert same(BlockSparsePattern.load(single), made)
    assert torch.equal(ModelPatterns.load(back).patterns[0].mask()[0], made.mask()[1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["stats", "missing.safetensors"], "error: path: expected a pattern file"),
        (["stats", "p.txt"], "error: path: expected a file named .safetensors or .npz"),
        (["convert", "FILE", "x.npz"], "error: layer: expected one of [0, 3] for a matrix"),
        (["convert", "FILE", "x.npz", "--layer", "1"], "error: layer: expected one of [0, 3]"),
        (["convert", "FILE", "x.npz", "--layer", "0", "--head", "2"], "error: head: expected 0 to"),
        (["convert", "FILE", "none/x.safetensors"], "error: path: expected a folder that exists"),
        (["learn", "m", "--out", "x.npz"], "error: --out: expected a file named .safetensors"),
        (["learn", "m", "--out", "none/x.safetensors"], "error: --out: expected a file named"),
        (["learn", "m", "--out", "x", "--preset", "tiny"], "error: --preset: expected one of"),
        (["learn", "m", "--out", "x", "--measure", "l3"], "error: --measure: expected one of"),
        (
            ["learn", "m", "--out", "x", "--windows", "--pooled"],
            "error: --windows: expected neither",
        ),
        (["learn", "m", "--out", "x.safetensors", "--block-size", "0"], "error: block_size: exp"),
        (["learn", "m", "--out", "x", "--windows", "--window", "2"], "error: --windows: expected"),
        (["learn", "m", "--out", "x", "--windows", "--measure", "l1"], "error: --windows: expec"),
        (
            ["learn", "m", "--out", "x", "--prefill", "--model-budget"],
            "error: --prefill: expected neither",
        ),
        (["learn", "m", "--out", "x", "--prefill", "--preset", "high_accuracy"], "error: --prefi"),
    ],
)
def test_errors_take_one_line(arguments: list[str], message: str, file: Path) -> None:
    result = runner.invoke(app, [str(file) if x == "FILE" else x for x in arguments])
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("content", [b"", b"text", b"PK\x03\x04cut off"])
def test_a_file_that_is_no_matrix_takes_one_line(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    path.write_bytes(content)
    result = runner.invoke(app, ["stats", str(path), "--block-size", "16"])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: path: expected a scipy sparse matrix")


def test_a_damaged_matrix_is_a_value_error(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    write_patterns(ModelPatterns({0: BlockSparsePattern.local((9, 9), 16, window=3)}), path)
    content = path.read_bytes()
    for place in range(len(content)):
        path.write_bytes(content[:place] + bytes([content[place] ^ 3]) + content[place + 1 :])
        with suppress(ValueError):  # some bytes nobody reads
            read_patterns(path, block_size=16)


def test_layers_may_share_a_pattern(tmp_path: Path) -> None:
    one = BlockSparsePattern.local((4, 4), 16, window=2)
    ModelPatterns({0: one, 3: one}).save(tmp_path / "m.safetensors")
    found = ModelPatterns.load(tmp_path / "m.safetensors").patterns
    assert list(found) == [0, 3]
    assert all(torch.equal(x.mask(), one.mask()) for x in found.values())


def test_a_matrix_of_objects_is_not_unpickled(tmp_path: Path) -> None:
    import numpy as np

    path = tmp_path / "evil.npz"
    np.savez(path, format=np.array("csr"), data=np.array([print], dtype=object))
    result = runner.invoke(app, ["stats", str(path), "--block-size", "16"])
    assert result.exit_code == 2
    assert "error: path: expected a scipy sparse matrix" in result.stderr


def test_learn_command(tmp_path: Path) -> None:
    tiny = pytest.importorskip("tests.transformers_op.tiny")
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from sparsek_backend.patterns import attend_patterns

    model = tiny.make_model()
    model.save_pretrained(tmp_path / "model")
    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(90)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / "model")
    texts = [tmp_path / f"{n}.txt" for n in range(2)]
    for n, path in enumerate(texts):
        path.write_text(" ".join(f"w{i * (n + 3) % 89 + 1}" for i in range(100)))
    texts[0].write_bytes(texts[0].read_bytes() + b" caf\xe9")  # not all texts are UTF-8
    out = tmp_path / "learned.safetensors"
    options = ["--block-size", "16", "--sparsity", "0.3", "--tokens", "90", "--samples", "16"]
    named = [part for path in texts for part in ("--text", str(path))]
    result = runner.invoke(
        app, ["learn", str(tmp_path / "model"), "--out", str(out), *options, *named]
    )
    assert result.exit_code == 0, result.output
    assert "learning from 2 texts of 90 tokens on " in result.stderr
    found = ModelPatterns.load(out)
    assert (found.model, found.sparsity) == (str(tmp_path / "model"), 0.3)
    assert found.shape == (6, 6)
    assert [p.mask().sum((1, 2)).tolist() for p in found.patterns.values()] == [[15, 15]] * 2
    with attend_patterns(model, found.patterns), torch.no_grad():
        assert model(tiny.tokens(1, 90), use_cache=False).logits.isfinite().all()
    whole = ["--model-budget", "--heads", "query"]
    shared = runner.invoke(
        app, ["learn", str(tmp_path / "model"), "--out", str(out), *whole, *options, *named]
    )
    assert shared.exit_code == 0, shared.output
    kept = [p.mask().sum((1, 2)) for p in ModelPatterns.load(out).patterns.values()]
    assert sum(int(x.sum()) for x in kept) == sum(len(x) for x in kept) * 15
    assert len({int(x.sum()) for x in kept}) > 1
    windows = runner.invoke(
        app, ["learn", str(tmp_path / "model"), "--out", str(out), "--windows", *options, *named]
    )
    assert windows.exit_code == 0, windows.output
    for pattern in ModelPatterns.load(out).patterns.values():
        local = [
            BlockSparsePattern.local((6, 6), 16, window=n, sinks=1).mask()[0] for n in range(1, 7)
        ]
        masks = pattern.mask()
        assert len(masks) == tiny.make_model().config.num_attention_heads
        assert all(any(torch.equal(mask, window) for window in local) for mask in masks)
    short = runner.invoke(
        app, ["learn", str(tmp_path / "model"), "--out", str(out), "--tokens", "500", *named]
    )
    assert short.exit_code == 2
    assert "error: --tokens: expected texts of at least 500 tokens, got none" in short.stderr
