"""benchmarks/parallel_serving.py: its rows, its models, and how it judges answers."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.distributed.scripts import names_of


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    """Names of the benchmark."""
    return names_of("parallel_serving.py")


def test_rows_are_those_that_fit(script: dict[str, Any]) -> None:
    two, four = script["rows_of"](2), script["rows_of"](4)
    ways = {"tp2", "pp2", "dp2", "ep2", "dcp2"}
    both = {f"{way}-{how}" for way in ways for how in ("eager", "graphs")}
    assert set(two) == both | {"tp2-drafts", "dp2-drafts"}
    assert {name for name in four if name not in two} == {
        *(f"{way}-{how}" for way in ("tp4", "tp4-dcp2") for how in ("eager", "graphs")),
        "tp4-drafts",
    }
    given = argparse.Namespace(longest=2000, prompts=3, output_tokens=4, dtype="float32")
    job = script["job_of"](four["tp4-dcp2-graphs"], Path("model"), given)
    assert job["lengths"] == [50, 316, 2000]
    assert job["engine"]["cp_kv_cache_interleave_size"] == job["engine"]["block_size"]
    assert "speculative_config" not in job["engine"]
    job = script["job_of"](four["tp4-drafts"], Path("model"), given)
    assert job["engine"]["speculative_config"]["model"] == "model"


def answers(*differ: float) -> dict[str, Any]:
    """Three answers of two tokens; the first ones end with a token less likely by so much."""
    known = {"5": -1.0, **{str(6 + i): -1.0 - gap for i, gap in enumerate(differ)}}
    whole = [
        {"tokens": [4, 6 + i if i < len(differ) else 5], "logprobs": [-0.5, -1.0]} for i in range(3)
    ]
    return {"answers": [{**one, "known": [{"4": -0.5}, known]} for one in whole], "seconds": 1.0}


@pytest.mark.parametrize(
    ("control", "row", "parted", "equal"),
    [((), (), 0, True), ((), (0.005,), 0, True), ((), (0.5,), 1, False), ((0.5,), (0.5,), 1, True)],
    ids=["same", "a tie", "beyond", "as the control"],
)
def test_what_rounding_explains_is_equal(
    script: dict[str, Any], control: Any, row: Any, parted: int, equal: bool
) -> None:
    rows = script["rows_of"](2)
    one = answers()
    for answer in one["answers"]:  # knows what the others may say
        answer["known"][1] |= {"6": -1.0 - (row or control or (0,))[0]}
    found = {"one, 4 KV heads": one, "tp2-eager": answers(*row)}
    assert "equal" not in script["table_of"](rows, found, 0.01)["tp2-eager"]  # no control yet
    found |= {
        "control, 4 KV heads": answers(*control),
        "pp2-eager": {"refused": "no", "seconds": 2},
    }
    table = script["table_of"](rows, found, 0.01)
    assert table["pp2-eager"] == {"model": "4 KV heads", "seconds": 2, "refused": "no"}
    assert table["tp2-eager"]["equal"] is equal
    assert table["tp2-eager"]["parted_beyond_ties"] == parted
    assert table["tp2-eager"]["answers_equal"] == 3 - len(row)


@pytest.mark.parametrize(("after", "equal"), [(0, False), (1, False), (2, True), (6, True)])
def test_answers_that_part_much_sooner_are_not_equal(
    script: dict[str, Any], after: int, equal: bool
) -> None:
    """As many part as of the control, which part after six tokens."""

    def parted(place: int) -> dict[str, Any]:
        said = [5] * place + [6] * (8 - place)
        known = {"5": -1.0, "6": -2.0}
        answer = {"tokens": said, "logprobs": [-1.0] * 8, "known": [known] * 8}
        return {"answers": [answer] * 3, "seconds": 1.0}

    found = {"one, 4 KV heads": parted(8), "control, 4 KV heads": parted(6)}
    found["tp2-eager"] = parted(after)
    row = script["table_of"](script["rows_of"](2), found, 0.01)["tp2-eager"]
    assert (row["equal"], row["tokens_until_parted"]) == (equal, after)


@pytest.mark.parametrize("kind", ["1 KV head", "experts"])
def test_the_control_differs_by_rounding_alone(
    script: dict[str, Any], kind: str, tmp_path: Path
) -> None:
    small = {"num_hidden_layers": 1, "hidden_size": 64, "vocab_size": 128, "intermediate_size": 96}
    model = script["write_llama"](tmp_path / "model", **{**script["KINDS"][kind], **small})
    other = script["reorder_neurons"](model, tmp_path / "other")
    loaded = [AutoModelForCausalLM.from_pretrained(x, dtype=torch.float32) for x in (model, other)]
    config = json.loads((model / "config.json").read_text())
    assert type(loaded[0]).__name__ == config["architectures"][0]
    with torch.no_grad():
        first, second = (one(torch.arange(40)[None]).logits for one in loaded)
    assert float(first.std()) > 0.5
    torch.testing.assert_close(second, first, atol=1e-4, rtol=1e-4)
    assert not torch.equal(second, first)
