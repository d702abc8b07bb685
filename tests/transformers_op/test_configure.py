"""configure() refuses settings without effect; models that would ignore SparseK do not load."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from tests.transformers_op.architectures import architectures, make
from tests.transformers_op.tiny import logits, make_model, tokens

import sparsek_backend.transformers_op as sparsek  # isort: skip
from sparsek_backend.patterns.models import learn_model_patterns  # isort: skip

WINDOW: dict[str, Any] = {
    "mode": "sink_window", "num_sink": 1, "window_size": 3, "dense_below": 0,
}  # fmt: skip


@pytest.mark.parametrize("settings", [WINDOW, {"mode": "dense"}])
def test_another_implementation_is_refused(settings: dict[str, Any]) -> None:
    model = make_model()
    with pytest.raises(ValueError, match=r"expected attn_implementation 'sparsek', got 'sdpa'"):
        sparsek.configure(model, **settings)
    assert not hasattr(model.config, "sparsek")
    sparsek.configure(model)  # to clear settings takes no effect


@pytest.mark.parametrize("name", ["bloom", "mpt", "falcon", "gpt_neo", "git"])
def test_models_that_call_no_attention_function_do_not_load(name: str) -> None:
    with pytest.raises(NotImplementedError, match="call no attention function of Transformers"):
        make(name, "sparsek")


def test_a_model_that_is_set_to_sparsek_in_vain_is_refused() -> None:
    """Transformers warns, and leaves the implementation as it was."""
    model = make("bloom", "eager")
    model.set_attn_implementation("sparsek")
    with pytest.raises(NotImplementedError, match=r"no layer with a BloomConfig that calls"):
        sparsek.configure(model, **WINDOW)


REASONS = {
    "bert": r"they have no causality \(2\)",
    "doge": r"a mask of their own \(2\)",
    "gemma2": r"a logit soft cap \(2\)",
    "mistral": r"a sliding window \(2\)",
    "deepseek_v32": r"indices of their own \(2\)",
}


@pytest.mark.parametrize("name", sorted(REASONS.keys() & architectures()))
def test_models_whose_layers_all_ignore_settings_are_refused(name: str) -> None:
    model = make(name, "sparsek")
    with pytest.raises(NotImplementedError, match=REASONS[name]):
        sparsek.configure(model, **WINDOW)
    sparsek.configure(model, mode="dense")


def test_layers_that_ignore_settings_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    model = make("gpt_oss", "sparsek")
    with caplog.at_level(logging.WARNING, logger="sparsek_backend"):
        sparsek.configure(model, **WINDOW)
    (message,) = (x for x in caplog.messages if x.startswith("SPARSEK"))
    assert "1 of 2 attention layers of GptOssForCausalLM" in message
    assert "a sliding window (1)" in message


def test_settings_that_others_leave_idle_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    model = make_model(attn_implementation="sparsek")
    sparsek.configure(model, top_k=8)
    assert not caplog.messages
    sparsek.configure(model, top_k=8, dense_last=9, sparse_phase="decode")
    for name, line in zip(("top_k", "dense_last"), caplog.messages, strict=True):
        assert line.startswith(f"SPARSEK setting {name} (from configure()) has no effect with ")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"dense_layers": [0, 2]},
            r"dense_layers .* which has 2, .* got \[0, 2\]",
        ),
        (
            {"time_selection": True},
            r"time_selection \(from configure.*served in vLLM",
        ),
    ],
    ids=str,
)
def test_settings_that_nothing_can_heed_are_refused(settings: dict[str, Any], said: str) -> None:
    model = make_model(attn_implementation="sparsek")
    with pytest.raises(sparsek.policy.ConfigError, match=said):
        sparsek.configure(model, **settings)
    assert not hasattr(model.config, "sparsek")


@pytest.mark.parametrize("name", ["m2m_100", "zamba2"])
def test_settings_reach_the_layers(name: str) -> None:
    """Of an encoder and decoder in one configuration, and of layers that share their attention."""
    model, ids = make(name, "sparsek"), tokens(1, 24)
    inputs = {"decoder_input_ids": ids} if name == "m2m_100" else {}
    before = logits(model, "sparsek", ids, **inputs)
    sparsek.configure(model, **WINDOW)
    assert (logits(model, "sparsek", ids, **inputs) - before).abs().max() > 0.1


def test_the_text_part_of_a_larger_model_may_be_set_alone() -> None:
    model = make("got_ocr2", {"text_config": "sparsek"})
    before = logits(model, "sparsek", tokens(1, 24))
    assert sparsek.configure(model, **WINDOW).window_size == 3
    assert (logits(model, "sparsek", tokens(1, 24)) - before).abs().max() > 0.1


@pytest.mark.skipif("deepseek_v32" not in architectures(), reason="an older Transformers")
def test_patterns_are_not_learned_from_a_model_that_chooses_its_keys() -> None:
    with pytest.raises(NotImplementedError, match=r"^indices: a model that chooses its own keys"):
        learn_model_patterns(
            make("deepseek_v32", "eager"), [tokens(1, 32)], block_size=16, sparsity=0.5
        )


def test_masks_are_eagers_for_models_that_read_them() -> None:
    """MPT turns its mask into booleans."""
    ids, mask = tokens(2, 24), torch.ones(2, 24, dtype=torch.long)
    mask[0, :7] = 0
    found = []
    for implementation in ("eager", "sparsek"):
        model = make("mpt", "eager")
        model.config._attn_implementation_internal = implementation
        with torch.no_grad():
            found.append(model(ids, attention_mask=mask).logits[mask.bool()])
    assert (found[1] - found[0]).abs().max() < 1e-5


def test_variables_that_change_count_from_the_next_configure_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, ids = make_model(attn_implementation="sparsek"), tokens(1, 40)
    monkeypatch.setenv("SPARSEK_MODE", "sink_window")
    monkeypatch.setenv("SPARSEK_DENSE_BELOW", "0")
    monkeypatch.setenv("SPARSEK_NUM_SINK", "1")
    found = []
    for window in (4, 16):
        monkeypatch.setenv("SPARSEK_WINDOW_SIZE", str(window))
        assert sparsek.configure(model).window_size == window
        found.append(logits(model, "sparsek", ids))
    sparsek.configure(model, **{**WINDOW, "window_size": 16})
    assert torch.equal(found[1], logits(model, "sparsek", ids))
    assert not torch.equal(*found)
