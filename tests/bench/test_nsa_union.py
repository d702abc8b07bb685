"""benchmarks/nsa_union.py: counts of blocks against sets, random selections, and whole runs."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("transformers", reason="Transformers is not installed (the eval extra)")

from sparsek_backend.train_demo.train import DemoConfig
from sparsek_kernels import nsa_compress, nsa_select
from sparsek_kernels.nsa.spec import NSASpec
from tests.transformers_op import tiny

SCRIPT = runpy.run_path(str(Path(__file__).resolve().parents[2] / "benchmarks" / "nsa_union.py"))


def counts(rows: list[list[list[int]]], num_blocks: int, neighbours: int) -> list[list[list[int]]]:
    """Unions and halves, by row and group, of the blocks that tokens name."""
    chosen = SCRIPT["chosen_blocks"](torch.tensor(rows, dtype=torch.int32), num_blocks)
    return [x.tolist() for x in SCRIPT["count_blocks"](chosen, neighbours)]


def test_hand_made_selections() -> None:
    tokens = [[0, 1, 2], [0, 2, 3], [0, 4, -1], [0, 4, 5], [0, 1, 5]]
    other = [[0, -1, -1]] * 5
    assert counts([tokens, other], 6, 1) == [[[3, 3, 2, 3, 3], [1] * 5]] * 2
    assert counts([tokens, other], 6, 2) == [[[4, 3], [1, 1]]] * 2
    assert counts([tokens, other], 6, 4) == [[[6], [1]], [[3], [1]]], "half: 0, 2 and 4"
    assert counts([tokens, other], 6, 8) == [[[], []], [[], []]], "no whole group"


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_counts_are_those_of_sets(data: st.DataObject) -> None:
    num_blocks = data.draw(st.integers(1, 20))
    slots, tokens = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 20))
    neighbours = data.draw(st.sampled_from([1, 2, 3, 4, 8]))
    sets = data.draw(
        st.lists(
            st.lists(
                st.sets(st.integers(0, num_blocks - 1), max_size=slots),
                min_size=tokens, max_size=tokens,
            ),
            min_size=1, max_size=2,
        )
    )  # fmt: skip
    rows = [[sorted(x) + [-1] * (slots - len(x)) for x in row] for row in sets]
    starts = range(0, tokens - neighbours + 1, neighbours)
    groups = [[row[i : i + neighbours] for i in starts] for row in sets]
    votes = [[[sum(b in x for x in g) for b in set().union(*g)] for g in row] for row in groups]
    union = [[len(x) for x in row] for row in votes]
    half = [[sum(2 * count >= neighbours for count in x) for x in row] for row in votes]
    assert counts(rows, num_blocks, neighbours) == [union, half]


def test_random_selections_are_as_large_and_as_causal_as_the_kernels() -> None:
    spec, tokens = NSASpec(16, 8, 16, 6, 1, 2), 250
    drawn = SCRIPT["random_blocks"](2, tokens, spec)
    q, k = torch.randn(1, tokens, 4, 16), torch.randn(1, tokens, 2, 16)
    indices = nsa_select(
        q, nsa_compress(k, k, cmp_block_size=16, cmp_stride=8)[0], cmp_block_size=16,
        cmp_stride=8, sel_block_size=16, top_n=6,
    )  # fmt: skip
    chosen = SCRIPT["chosen_blocks"](indices[0].transpose(0, 1), spec.num_selectable(tokens))
    assert drawn.shape == chosen.shape
    assert torch.equal(drawn.sum(-1), chosen.sum(-1))
    own = torch.arange(tokens)[:, None] // 16
    block = torch.arange(drawn.shape[-1])
    assert not (drawn & (block > own)).any()
    forced = (block == 0) | ((block > own - 2) & (block <= own))
    assert drawn[forced.expand_as(drawn)].all()
    many = SCRIPT["random_blocks"](200, tokens, spec)[:, 240:, 1:14]  # 3 of 13 beside the forced
    assert (many.double().mean((0, 1)) - 3 / 13).abs().max() < 0.05, "5 standard deviations"


def test_the_even_union_is_that_of_the_bytes() -> None:
    dim, spec = 128, NSASpec()
    for size in SCRIPT["NEIGHBOURS"]:
        parts = size * (3 * 13 * 16 * dim * 2)  # written, read, and rows of q, of 16 bits
        assert SCRIPT["even_union"](size, spec) * (64 * 2 * dim * 2) == parts
    assert SCRIPT["even_union"](8, spec) == 39


def test_a_summary_is_of_all_groups() -> None:
    union = torch.tensor([[16, 20, 31], [16, 17, 32]])
    row = SCRIPT["summary"](union, torch.tensor([[2, 4, 6], [8, 10, 12]]), 2, 16)
    assert (row["groups"], row["mean"], row["p50"], row["half"]) == (6, 22.0, 18.5, 7.0)
    assert {i: x for i, x in enumerate(row["histogram"]) if x} == {16: 2, 17: 1, 20: 1, 31: 2}


def _run(monkeypatch: pytest.MonkeyPatch, path: Path, *options: str) -> dict[str, Any]:
    monkeypatch.setattr(sys, "argv", ["nsa_union.py", "--json", str(path), *options])
    assert SCRIPT["main"]() == 0
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _folder(path: Path) -> Path:
    """A tiny model with a tokenizer of words, in which each is the unknown one."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(90)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(path)
    tiny.make_model().save_pretrained(path)
    return path


def test_a_run_counts_every_layer_of_every_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = []
    for seed in range(2):
        drawn = torch.randint(90, (1200,), generator=torch.Generator().manual_seed(seed))
        texts.append(tmp_path / f"{seed}.txt")
        texts[-1].write_text(" ".join(f"w{i}" for i in drawn.tolist()), encoding="utf-8")
    given = ["--model", str(_folder(tmp_path / "tiny")), "--texts", *map(str, texts)]
    found = _run(monkeypatch, tmp_path / "a.json", *given, "--lengths", "1088", "1168")["model"]
    kv_heads, layers = found["num_kv_heads"], tiny.make_model().config.num_hidden_layers
    for row in found["rows"]:
        texts_or_draws = 2 * kv_heads if row["kind"] == "model" else 8
        per_layer = (row["length"] - 1024) // row["neighbours"] * texts_or_draws
        several = row["kind"] == "model" and row["layer"] == "all"
        assert row["groups"] == per_layer * (layers if several else 1) == sum(row["histogram"])
        assert 16 <= row["p10"] <= row["p50"] <= row["p90"] <= -(-row["length"] // 64)
        assert row["half"] <= row["mean"]
    names = [x["layer"] for x in found["rows"] if x["kind"] == "model"]
    assert names == ["all", *range(layers)] * 8
    assert any(x["mean"] > 16 for x in found["rows"] if x["kind"] == "model")

    with pytest.raises(ValueError, match=r"texts: expected 1216 tokens, .*0\.txt has 1200"):
        _run(monkeypatch, tmp_path / "b.json", *given, "--lengths", "1216")
    with pytest.raises(ValueError, match="lengths: expected more than 1024 tokens, got 1024"):
        _run(monkeypatch, tmp_path / "b.json", *given, "--lengths", "1216", "1024")


def test_the_demos_model_is_counted_where_it_is_asked(tmp_path: Path) -> None:
    found = SCRIPT["measure_demo"](tmp_path, DemoConfig(steps=1, max_length=128))
    assert [x["kind"] for x in found["rows"]] == ["model"] * 4 + ["random"] * 4
    for row in found["rows"]:
        assert row["groups"] == 8 * 64 // row["neighbours"]
        assert 4 <= row["p10"] <= row["p90"] <= 4 * row["neighbours"]
