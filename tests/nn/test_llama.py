"""The Llama-shaped model: decoding over caches, and the folder that it saves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from sparsek_backend.nn import NSAConfig, NSALlamaConfig, NSALlamaForCausalLM

NSA = NSAConfig(8, 4, 16, 5, window_size=20, gate_hidden_size=16)


def make(tied: bool = False) -> NSALlamaForCausalLM:
    torch.manual_seed(0)
    config = NSALlamaConfig(64, 32, 48, 2, 4, 2, 8, tie_word_embeddings=tied, nsa=NSA)
    return NSALlamaForCausalLM(config).requires_grad_(False)


def test_decoding_equals_the_whole() -> None:
    model = make()
    tokens = torch.randint(64, (2, 120))
    expected = model(tokens)
    caches = model.new_caches(2, 120)
    found = [model(part, caches) for part in tokens.split([90, 1, 1, 28], dim=1)]
    torch.testing.assert_close(torch.cat(found, dim=1), expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="caches: expected one for each of 2 layers, got 1"):
        model(tokens, caches[:1])


def test_a_failed_step_leaves_all_caches_as_they_were() -> None:
    model = make()
    tokens = torch.randint(64, (1, 40))
    caches = [*model.new_caches(1, 40)[:1], *model.new_caches(1, 30)[1:]]
    model(tokens[:, :25], caches)
    with pytest.raises(ValueError, match="cache: expected at most 30 tokens, got 25 \\+ 15"):
        model(tokens[:, 25:], caches)
    found = model(tokens[:, 25:30], caches)
    torch.testing.assert_close(found, model(tokens[:, :30])[:, 25:], rtol=1e-4, atol=1e-5)


def test_compressed_only_reaches_every_layer() -> None:
    model = make()
    tokens = torch.randint(64, (2, 60))
    found = model(tokens, compressed_only=torch.tensor([True, False]))
    torch.testing.assert_close(found[1], model(tokens)[1])
    for layer in model.model.layers:
        layer.self_attn.v_proj.weight[2 * 8 :] += 1.0  # values of the other two branches
    torch.testing.assert_close(model(tokens, compressed_only=torch.tensor([True] * 2))[0], found[0])


@pytest.mark.parametrize("tied", [False, True])
def test_saved_folder(tied: bool, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = make(tied)
    model.save_pretrained(str(tmp_path))
    values = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert values["architectures"] == ["NSALlamaForCausalLM"]
    assert NSAConfig.from_dict(values["nsa"]) == NSA
    state = load_file(tmp_path / "model.safetensors")
    assert ("lm_head.weight" in state) is not tied
    assert "model.layers.1.self_attn.phi_k.w1" in state
    again = make(tied)
    for weight in again.parameters():
        weight.zero_()
    again.load_state_dict(state, strict=not tied)
    tokens = torch.randint(64, (1, 40))
    assert torch.equal(again(tokens), model(tokens))
