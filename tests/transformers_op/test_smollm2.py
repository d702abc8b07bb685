"""The small real model through Transformers: equality, quality bars, endless text, examples.

Equality in float32, all else in the dtype in which models run on this machine, at lengths that two
cores do in seconds; benchmarks/endless.py does more.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from sparsek_backend.machine import cpu_dtype
from sparsek_backend.models import fetch_model, fetch_texts

pytest.importorskip("transformers", reason="Transformers is not installed (the eval extra)")

from transformers import AutoModelForCausalLM, AutoTokenizer

import sparsek_backend.transformers_op as sparsek
from sparsek_backend.transformers_op import SinkWindowCache, sequences
from tests.transformers_op.tiny import configure

pytestmark = pytest.mark.long
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "drop_ins.md"
LENGTH = 2048


@pytest.fixture(scope="module")
def model() -> Any:
    loaded = AutoModelForCausalLM.from_pretrained(
        fetch_model(), dtype=cpu_dtype(), attn_implementation="sparsek"
    )
    return loaded.eval()


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    tokenizer = AutoTokenizer.from_pretrained(fetch_model())
    longest = max(fetch_texts().glob("*.txt"), key=lambda path: path.stat().st_size)
    found: torch.Tensor = tokenizer(
        longest.read_text(), return_tensors="pt", truncation=True, max_length=LENGTH
    ).input_ids
    return found


def _nll(model: Any, ids: torch.Tensor, **settings: Any) -> float:
    """NLL of the second half, in nats per token."""
    sparsek.configure(model, **settings)
    with torch.no_grad():
        logits = model(ids).logits[0].float()
    half = ids.shape[1] // 2
    return torch.nn.functional.cross_entropy(logits[half - 1 : -1], ids[0, half:]).item()


def test_budget_that_covers_the_context_equals_sdpa(ids: torch.Tensor) -> None:
    model = AutoModelForCausalLM.from_pretrained(fetch_model(), dtype=torch.float32).eval()
    configure(model, mode="block_topk", num_sink=64, window_size=64, top_k=4, dense_below=0)
    found = []
    for implementation in ("sdpa", "sparsek"):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            found.append(model(ids[:, :256]).logits)
    assert found[0].abs().max().item() > 10
    assert (found[1] - found[0]).abs().max().item() < 1e-3


def test_quality_bars(model: Any, ids: torch.Tensor) -> None:
    small = {"window_size": 256, "dense_below": 0}
    dense = _nll(model, ids, mode="dense")
    topk = _nll(model, ids, mode="block_topk", num_sink=64, top_k=8, **small)
    sinks = _nll(model, ids, mode="sink_window", num_sink=4, **small)
    window = _nll(model, ids, mode="sink_window", num_sink=0, **small)
    assert abs(topk - dense) < 0.05
    assert -0.02 < sinks - dense < 0.15
    assert window - dense > 0.3, "the control: without sinks quality is lost"
    assert topk < sinks < window


def test_streaming_with_sinks_holds_and_without_does_not(model: Any, ids: torch.Tensor) -> None:
    nll = {}
    for num_sink in (4, 0):
        sparsek.configure(
            model, mode="sink_window", num_sink=num_sink, window_size=256, dense_below=0
        )
        cache = SinkWindowCache(model)
        parts = []
        with torch.no_grad():
            for part in ids.split(128, dim=1):
                parts.append(model(part, past_key_values=cache).logits[0])
                assert cache.layers[0].keys.shape[2] <= num_sink + 255
        losses = torch.nn.functional.cross_entropy(
            torch.cat(parts)[:-1].float(), ids[0, 1:], reduction="none"
        )
        nll[num_sink] = losses.view(-1)[LENGTH // 2 :].mean().item()
    assert nll[0] - nll[4] > 0.3


def _run_example(
    name: str, monkeypatch: pytest.MonkeyPatch, replacements: dict[str, str]
) -> list[str]:
    """Run the document's example that contains ``name``; the kernels' entry points it reached."""
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), flags=re.DOTALL)
    (code,) = (block for block in blocks if name in block and "transformers" in block)
    for old, new in replacements.items():
        assert old in code or name not in old
        code = code.replace(old, new)
    calls: list[str] = []
    for function in ("sink_flash_attention", "attend_selected"):
        real = getattr(sequences, function)

        def spy(*args: Any, _real: Any = real, _name: str = function, **kwargs: Any) -> Any:
            calls.append(_name)
            return _real(*args, **kwargs)

        monkeypatch.setattr(sequences, function, spy)
    exec(compile(code, f"drop_ins.md: {name}", "exec"), {"__name__": "example"})
    return calls


EXAMPLES = ["LENGTH = 8000", "SinkWindowCache"]


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_runs_on_our_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dtype, told = f'dtype="{cpu_dtype()}"', 'attn_implementation="sparsek"'
    shorter = {"LENGTH = 8000": f"LENGTH = {LENGTH}", "max_new_tokens=16": "max_new_tokens=3"}
    shorter[told] = f"{told}, {dtype}"
    calls = _run_example(name, monkeypatch, shorter)
    wanted = "attend_selected" if name.startswith("LENGTH") else "sink_flash_attention"
    assert calls.count(wanted) >= 30, "every layer"


@pytest.mark.gpu
@pytest.mark.parametrize("name", EXAMPLES)
def test_example_runs_as_it_stands(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _run_example(name, monkeypatch, {})
    wanted = "attend_selected" if name.startswith("LENGTH") else "sink_flash_attention"
    assert calls.count(wanted) >= 30, "every layer"


@pytest.mark.gpu
def test_long_budget_that_covers_the_context_equals_sdpa() -> None:
    tokens = _long_texts(1)[0]
    found = {}
    for dtype, implementation in (
        (torch.float64, "sdpa"),
        (torch.float32, "sdpa"),
        (torch.float32, "sparsek"),
    ):
        model = AutoModelForCausalLM.from_pretrained(
            fetch_model(), dtype=dtype, attn_implementation=implementation
        )
        model = model.cuda().eval()
        if implementation == "sparsek":
            configure(
                model, mode="block_topk", num_sink=64, window_size=64, top_k=64, dense_below=0
            )
        with torch.no_grad():
            found[dtype, implementation] = model(tokens.cuda()).logits.double()
    exact = found.pop((torch.float64, "sdpa"))
    sdpa, ours = ((x - exact).abs().max().item() for x in found.values())
    assert exact.abs().max().item() > 10
    assert ours <= 2 * sdpa + 1e-4
    assert ours < 1e-2


@pytest.mark.gpu
def test_quality_bars_at_4096() -> None:
    model = AutoModelForCausalLM.from_pretrained(
        fetch_model(), dtype=torch.float32, attn_implementation="sparsek"
    )
    model = model.cuda().eval()
    texts = [x.cuda() for x in _long_texts(4)]

    def nll(**settings: Any) -> float:
        return sum(_nll(model, x, **settings) for x in texts) / len(texts)

    small = {"window_size": 512, "dense_below": 0}
    dense = nll(mode="dense")
    change = {
        "top-k": nll(mode="block_topk", num_sink=64, top_k=16, **small) - dense,
        "sinks": nll(mode="sink_window", num_sink=4, **small) - dense,
        "window": nll(mode="sink_window", num_sink=0, **small) - dense,
    }
    print(f"dense {dense:.4f}, changes {change}")
    assert change["top-k"] <= 0.02
    assert change["sinks"] <= 0.10
    assert change["window"] >= 0.3, "the control: without sinks quality is lost"


def _long_texts(count: int) -> list[torch.Tensor]:
    """``[1, 4096]`` token ids of the longest texts."""
    tokenizer = AutoTokenizer.from_pretrained(fetch_model())
    files = sorted(fetch_texts().glob("*.txt"), key=lambda path: -path.stat().st_size)
    return [
        tokenizer(path.read_text(), return_tensors="pt", truncation=True, max_length=4096).input_ids
        for path in files[:count]
    ]
