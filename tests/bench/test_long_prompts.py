"""benchmarks/long_prompts.py: the verdict on a study's answers, and what it asks of engines."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "long_prompts.py"


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    """Names of the script."""
    return runpy.run_path(str(SCRIPT))


def offloaded(seconds: float, loaded: list[int], cached: int = 64) -> dict[str, Any]:
    """An engine's part of the study ``offload``."""
    return {
        "computed": {"ttft_s": 4 * seconds, "tokens": [1, 2], "cached_tokens": 0},
        "loaded": {"ttft_s": seconds, "tokens": loaded, "cached_tokens": cached},
    }


def test_offload(script: dict[str, Any]) -> None:
    good, slow = offloaded(0.5, [1, 2]), offloaded(1.0, [1, 2])
    ratios, wrong = script["judge"]("offload", {"SPARSEK": good, "baseline": slow})
    assert ratios == {"baseline_over_ours": {"computed": 2.0, "loaded": 2.0}}
    assert not wrong
    _, wrong = script["judge"]("offload", {"SPARSEK": offloaded(1, [1, 3]), "baseline": slow})
    assert len(wrong) == 1
    assert "SPARSEK" in wrong[0]
    assert "other tokens" in wrong[0]
    _, wrong = script["judge"]("offload", {"SPARSEK": good, "baseline": offloaded(1, [1, 2], 0)})
    assert wrong == ["baseline: no page of the prompt was loaded"]


def test_ngrams(script: dict[str, Any]) -> None:
    runs = {
        "without speculation": {"tpot_s": [0.006, 0.004], "tokens": [5, 6, 7]},
        "SPARSEK": {"tpot_s": [0.002], "tokens": [5, 6, 7]},
        "baseline": {"tpot_s": [0.003], "tokens": [9, 9, 9]},
    }
    ratios, wrong = script["judge"]("ngrams", runs)
    assert ratios == {"gain_of_speculation": 2.0, "baseline_over_ours": 1.5}
    assert not wrong
    runs["SPARSEK"] = runs["SPARSEK"] | {"tokens": [5, 8, 7]}
    assert script["judge"]("ngrams", runs)[1] == ["token 1 is another one with speculation"]


@pytest.mark.parametrize(
    ("logprobs", "tokens", "fine"),
    [
        ([-1.0, -2.05], [3, 4], True),
        ([-1.0, -2.5], [3, 4], False),
        ([-1.0, float("nan")], [3, 4], False),
        ([-1.0, -9.0], [5, 4], True),  # other texts from the first token on
    ],
)
def test_hybrid(
    logprobs: list[float], tokens: list[int], fine: bool, script: dict[str, Any]
) -> None:
    times = {"ttft_s": [1.0], "tpot_s": [0.01]}
    theirs = times | {"logprobs": [-1.0, -2.0], "tokens": [3, 4]}
    runs = {"SPARSEK": times | {"logprobs": logprobs, "tokens": tokens}, "baseline": theirs}
    assert bool(script["judge"]("hybrid", runs)[1]) is not fine


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
