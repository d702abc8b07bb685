"""benchmarks/simulate: a run on a tiny model, its figures, and the tables of the docs."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.simulate import results
from benchmarks.simulate.__main__ import main
from benchmarks.simulate.decode import DecodeRule
from benchmarks.simulate.model import Model
from benchmarks.simulate.variants import SETS, Variant
from tests.bench.simulated import close, dense_attention

ROOT = Path(__file__).resolve().parents[2]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A folder of a tiny Qwen2 model with random weights."""
    transformers = pytest.importorskip("transformers")
    from safetensors.torch import save_file

    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=50, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.Qwen2ForCausalLM(config)
    folder = tmp_path / "tiny"
    folder.mkdir()
    weights = {
        name: x.clone() for name, x in model.state_dict().items() if name != "lm_head.weight"
    }
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    return folder


def _change(folder: Path, **settings: object) -> dict[str, Any]:
    """A model's config with other settings, which are written."""
    path = folder / "config.json"
    config: dict[str, Any] = json.loads(path.read_text()) | settings
    path.write_text(json.dumps(config))
    return config


@torch.no_grad()
@pytest.mark.parametrize("scaling", [{"rope_type": "default"}, YARN])
def test_the_model_is_transformers(tiny: Path, scaling: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    _change(tiny, rope_parameters={**scaling, "rope_theta": 1e6})
    ids = torch.randint(0, 50, (1, 200), generator=torch.Generator().manual_seed(0))
    expected = transformers.Qwen2ForCausalLM.from_pretrained(tiny)(ids).logits[0, 180:]
    model = Model(tiny, "cpu")
    tokens = ids[0].tolist()

    def attend(_: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return dense_attention(q, k, v)

    found = model.answer(tokens[180:], model.prompt(tokens[:180], attend), attend)
    close(found, expected)


@pytest.mark.parametrize("where", ["rope_parameters", "rope_scaling"])
def test_frequencies_of_yarn_are_those_of_transformers(tiny: Path, where: str) -> None:
    """Whichever field of a config has its settings."""
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {**YARN, "rope_theta": 1e6}
    config = _change(tiny, head_dim=128, rope_parameters=parameters)
    if where == "rope_scaling":
        _change(tiny, rope_parameters=None, rope_scaling=YARN, rope_theta=1e6)
    expected = transformers.Qwen2Config(**config)
    frequencies, rotation = ROPE_INIT_FUNCTIONS["yarn"](expected, "cpu")
    model = Model(tiny, "cpu")
    torch.testing.assert_close(model.frequencies, frequencies, rtol=1e-5, atol=0)
    assert model.rotation == pytest.approx(rotation)
    assert model.rotation > 1.1


def test_a_run_goes_on_where_others_stopped_and_its_figures_are_merged(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    variants = [
        Variant("all", DecodeRule("p2dr", tokens=2048, window=128)),
        Variant("window", DecodeRule("none", tokens=0, window=128, tail=False)),
    ]
    monkeypatch.setitem(SETS, "decode", variants)
    make = torch.Generator().manual_seed(0)

    def ids(count: int) -> list[int]:
        return torch.randint(0, 50, (count,), generator=make).tolist()

    rows = [
        {"task": "t", "variant": "plain", "length": 600, "index": index, "pieces": [0, 1],
         "target": ids(2 + index)}
        for index in range(3)
    ]  # fmt: skip
    rows.append({**rows[0], "index": 3, "target": [1]})  # nothing to score
    document = {"pieces": [ids(500), ids(100), ids(100)], "prompts": rows}
    source, out, merged = (tmp_path / name for name in ("prompts.json", "out", "merged.json"))
    source.write_text(json.dumps(document))

    def run(*words: object) -> str:
        monkeypatch.setattr(sys, "argv", ["simulate", *map(str, words)])
        assert main() == 0
        return capsys.readouterr().out

    command = ("run", tiny, "--name", "m", "--prompts", source, "--set", "decode", "--out", out)
    assert len(run(*command, "--per-task", "2").splitlines()) == 2
    (out / "decode_m_t_plain_600_2.json").touch()  # another process has taken it
    assert run(*command) == ""
    run("merge", out, "--commit", "abc", "--json", merged)
    found = json.loads(merged.read_text())
    (cell,) = found["cells"]
    assert found["commit"] == "abc"
    assert found["settings"]["decode"]["all"]["decode"]["tokens"] == 2048
    assert (cell["model"], cell["length"], cell["prompts"]) == ("m", 600, 2)
    assert cell["of_task"] == {"t, plain": 2}
    dense, everything, window = (cell["variants"][name] for name in ("dense", "all", "window"))
    assert dense["kl"] == dense["added_nll"] == dense["lost"] == 0
    assert everything["kl"] < 1e-4 < window["kl"]
    assert window["attended"] == pytest.approx(64 + 128 + 24, abs=3)
    assert window["of_task"] == {"t, plain": {"kl": window["kl"], "added_nll": window["added_nll"]}}
    assert cell["of_question"] == {"plain": 2}
    assert window["of_question"]["plain"]["kl"] == window["kl"]
    assert (everything["kl_ratio"], everything["kl_ratio_error"]) == (1, 1)
    kls = [json.loads((out / f"decode_m_t_plain_600_{i}.json").read_text()) for i in range(2)]
    over = [(x["results"]["window"]["kl"] + 1e-5) / (x["results"]["all"]["kl"] + 1e-5) for x in kls]
    assert window["kl_ratio"] == pytest.approx(math.sqrt(over[0] * over[1]), rel=1e-3)
    text = run("table", merged, "--set", "decode")
    assert text.startswith("| variant | MiB | m, 0k |")
    assert "| window | " in text


DOCUMENTS = [
    json.loads((ROOT / "benchmarks/results" / name).read_text())
    for name in (
        "simulation_qwen_h200.json",
        "simulation_prompts_qwen_h200.json",
        "simulation_drawn_qwen_h200.json",
    )
]


@pytest.mark.parametrize("chosen", ["decode", "budgets", "drawn"])
def test_the_tables_of_the_docs_are_of_the_committed_files(chosen: str) -> None:
    page = (ROOT / "docs/simulation.md").read_text(encoding="utf-8")
    head = results.table(DOCUMENTS, chosen, ["dense"]).partition("\n")[0] + "\n"
    shown = page[page.index(head) :].partition("\n\n")[0]
    names = [line.split(" | ")[0].removeprefix("| ") for line in shown.splitlines()[2:]]
    assert results.table(DOCUMENTS, chosen, names) == shown
    known = {variant.name for variant in SETS[chosen]} | {"dense"}
    assert set(names) <= known


def test_figures_of_an_answer() -> None:
    dense = torch.tensor([[0.0, math.log(3)], [0.0, 0.0]])
    other = torch.tensor([[0.0, 0.0], [0.0, 0.0]])
    found = results.figures(dense, other, torch.tensor([1, 1]))
    first = 0.25 * math.log(0.5) + 0.75 * math.log(1.5)
    assert found["kl"] == pytest.approx(first / 2, abs=1e-5)
    assert found["kl_max"] == pytest.approx(first, abs=1e-5)
    assert found["nll"] == pytest.approx(math.log(2), abs=1e-5)
    assert found["right"] == 0
    assert found["tokens_right"] == 0
