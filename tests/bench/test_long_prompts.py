"""benchmarks/long_prompts.py: the verdict on a study's answers, and what it asks of engines."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "long_prompts.py"


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    """Names of the script."""
    return runpy.run_path(str(SCRIPT))


def answer(tokens: list[int], logprobs: list[float] | None = None) -> dict[str, Any]:
    """Tokens and their log-probabilities, -1 each if none are given."""
    return {"tokens": tokens, "logprobs": logprobs or [-1.0] * len(tokens)}


def offloaded(
    seconds: float, loaded: list[int], cached: int = 64, logprobs: list[float] | None = None
) -> dict[str, Any]:
    """An engine's part of the study ``offload``."""
    return {
        "computed": answer([9, 9]) | {"ttft_s": 4 * seconds, "cached_tokens": 0},
        "cached": answer([1, 2]) | {"ttft_s": seconds / 2, "cached_tokens": 64},
        "loaded": answer(loaded, logprobs) | {"ttft_s": seconds, "cached_tokens": cached},
    }


def test_offload(script: dict[str, Any]) -> None:
    good, slow = offloaded(0.5, [1, 2]), offloaded(1.0, [1, 2])
    ratios, wrong = script["judge"]("offload", {"SPARSEK": good, "baseline": slow})
    assert ratios["baseline_over_ours"] == {"computed": 2.0, "cached": 2.0, "loaded": 2.0}
    assert ratios["equal_tokens"] == {"SPARSEK": 2, "baseline": 2}
    assert not wrong
    tie = {"SPARSEK": offloaded(1, [1, 3], logprobs=[-1.0, -1.05]), "baseline": slow}
    ratios, wrong = script["judge"]("offload", tie)
    assert ratios["equal_tokens"]["SPARSEK"] == 1
    assert not wrong
    other = {"SPARSEK": offloaded(1, [1, 3], logprobs=[-1.0, -2.0]), "baseline": slow}
    _, wrong = script["judge"]("offload", other)
    assert len(wrong) == 1
    assert "SPARSEK" in wrong[0]
    assert "1 nats apart" in wrong[0]
    _, wrong = script["judge"]("offload", {"SPARSEK": good, "baseline": offloaded(1, [1, 2], 0)})
    assert wrong == ["baseline: no page of the loaded prompt was found"]


def test_ngrams(script: dict[str, Any]) -> None:
    runs = {
        "without speculation": {"tpot_s": [0.006, 0.004], **answer([5, 6, 7])},
        "SPARSEK": {"tpot_s": [0.002], **answer([5, 6, 7])},
        "baseline": {"tpot_s": [0.003], **answer([9, 9, 9])},
    }
    ratios, wrong = script["judge"]("ngrams", runs)
    assert ratios == {"gain_of_speculation": 2.0, "baseline_over_ours": 1.5, "equal_tokens": 3}
    assert not wrong
    runs["SPARSEK"] |= answer([5, 8, 7], [-1.0, -0.5, -1.0])
    ratios, wrong = script["judge"]("ngrams", runs)
    assert ratios["equal_tokens"] == 1
    assert not wrong  # tokens of a draft select together


@pytest.mark.parametrize(
    ("logprobs", "tokens", "fine"),
    [
        ([-1.0, -2.05], [3, 4], True),
        ([-1.0, -2.5], [3, 4], False),
        ([-1.0, float("nan")], [3, 4], False),
        ([-1.0, -9.0], [5, 4], True),  # other texts from the first token on
        ([-1.0, float("nan")], [5, 4], False),
    ],
)
def test_hybrid(
    logprobs: list[float], tokens: list[int], fine: bool, script: dict[str, Any]
) -> None:
    times = {"ttft_s": [1.0], "tpot_s": [0.01]}
    theirs = times | {"logprobs": [-1.0, -2.0], "tokens": [3, 4]}
    runs = {"SPARSEK": times | {"logprobs": logprobs, "tokens": tokens}, "baseline": theirs}
    assert bool(script["judge"]("hybrid", runs)[1]) is not fine


def test_random_weights() -> None:
    """Kinds of parameters by their names; a matrix keeps the size of what it multiplies."""
    pytest.importorskip("vllm")
    from benchmarks.random_weights import draw

    torch.manual_seed(0)
    shapes = {
        "mlp.down_proj.weight": (64, 4096),
        "mamba.conv1d.weight": (4096, 1, 4),
        "embed_tokens.weight": (512, 64),
        "norm.weight": (64,),
        "mamba.in_proj.bias": (64,),
        "mamba.A": (64,),
        "mamba.D": (64,),
        "mamba.dt_bias": (64,),
    }
    found = {name: torch.full(shape, torch.nan) for name, shape in shapes.items()}
    for name, weight in found.items():
        draw(f"model.{name}", weight)
        assert weight.isfinite().all(), name
    x = torch.randn(4096, 32)
    assert (found["mlp.down_proj.weight"] @ x).std().item() == pytest.approx(1, abs=0.1)
    assert found["mamba.conv1d.weight"].std().item() == pytest.approx(0.5, abs=0.02)
    assert found["embed_tokens.weight"].std().item() == pytest.approx(1, abs=0.02)
    assert found["norm.weight"].unique().tolist() == [1.0]
    assert not found["mamba.in_proj.bias"].any()
    assert (found["mamba.A"] < 0).all()


@pytest.mark.parametrize("name", ["granite-4.0-h-micro", "lfm2-1.2b"])
def test_hybrid_shapes(name: str, script: dict[str, Any], tmp_path: Path) -> None:
    from transformers import AutoConfig

    folder = script["write_model"](name, tmp_path)
    config = AutoConfig.from_pretrained(folder)
    kinds = set(config.layer_types)
    assert len(config.layer_types) == config.num_hidden_layers
    assert len(kinds) == 2
    assert json.loads((tmp_path / "config.json").read_text())["hidden_size"] == config.hidden_size


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["offload", "--toy"], "needs a GPU"),
        (["ngrams", "--model", "huge"], "--model: expected one of"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str, tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), *arguments, "--json", str(tmp_path / "x.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode
    assert message in done.stderr
