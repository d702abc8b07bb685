"""The Llama-shaped model: decoding over caches, and the folder that it saves."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

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


def test_labels_give_the_loss_of_the_next_tokens() -> None:
    """As Transformers' models take them: by name, shifted here, -100 without a loss."""
    model = make()
    tokens = torch.randint(64, (2, 50))
    labels = tokens.clone()
    labels[:, :20] = -100
    loss, logits = model(input_ids=tokens, labels=labels)
    assert torch.equal(logits, model(tokens))
    due = torch.nn.functional.cross_entropy(logits[:, 19:-1].mT, tokens[:, 20:])
    torch.testing.assert_close(loss, due)
    with pytest.raises(ValueError, match=r"labels: expected shape \[2, 50\].*, got \[2, 49\]"):
        model(tokens, labels=labels[:, 1:])
    model.mesh = object()  # whose ranks hold parts of each sequence
    with pytest.raises(ValueError, match="labels: expected None with a mesh"):
        model(tokens, labels=labels)


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
    assert values["model_type"] == "nsa_llama"
    assert NSAConfig.from_dict(values["nsa"]) == NSA
    state = load_file(tmp_path / "model.safetensors")
    assert ("lm_head.weight" in state) is not tied
    assert "model.layers.1.self_attn.phi_k.w1" in state
    tokens = torch.randint(64, (1, 40))
    for model_type in ("nsa_llama", "llama"):  # the latter stands in folders of release 0.1.0
        (tmp_path / "config.json").write_text(json.dumps({**values, "model_type": model_type}))
        again = NSALlamaForCausalLM.from_pretrained(tmp_path)
        assert again.config == model.config
        assert torch.equal(again(tokens), model(tokens))
    other = make(tied)
    other.load_state_dict(state, strict=not tied)
    assert torch.equal(other(tokens), model(tokens))
    again.bfloat16().save_pretrained(tmp_path)
    assert NSALlamaForCausalLM.from_pretrained(tmp_path).lm_head.weight.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, r"architectures: expected \['NSALlamaFor"),
        ({"head_dim": 16}, "model.safetensors: expected its config's.*q_proj"),
        ({"num_hidden_layers": 3}, "model.safetensors: expected its config's.*layers.2"),
        ({"num_hidden_layers": 1}, "model.safetensors: expected its config's.*layers.1"),
        ({"nsa": {"top_m": 4}}, "nsa: expected fields of .* got top_m"),
        ({"nsa": None}, "nsa: expected this field"),
        ({"vocab_size": None}, "vocab_size: expected this field"),
        ({"hidden_act": "gelu"}, "hidden_act: expected 'silu', .*, got 'gelu'"),
        ({"mlp_bias": True}, "mlp_bias: expected False, .*, got True"),
    ],
    ids=str,
)
def test_a_folder_that_is_no_such_model(
    changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    make().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: x for name, x in values.items() if x is not None}))
    with pytest.raises(ValueError, match=f"(?s){message}"):
        NSALlamaForCausalLM.from_pretrained(tmp_path)


def test_a_damaged_or_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"folder: expected config.json in it"):
        NSALlamaForCausalLM.from_pretrained(tmp_path)
    make().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ValueError, match=r"model.safetensors: expected that format"):
        NSALlamaForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        ("", ValueError, "config.json: expected JSON, got Expecting value"),
        ("[]", ValueError, "config.json: expected an object, got list"),
        ('"nsa": null', TypeError, "nsa: expected a section of fields, got NoneType"),
        ('"hidden_size": "x"', TypeError, "hidden_size: expected an int, got str"),
        ('"tie_word_embeddings": "no"', TypeError, "tie_word_embeddings: expected bool, got str"),
        ('"rms_norm_eps": "1e-5"', TypeError, "rms_norm_eps: expected float, got str"),
        ('"vocab_size": 0', ValueError, "vocab_size: expected an integer >= 1, got 0"),
    ],
)
def test_a_config_that_is_none(
    content: str, error: type[Exception], message: str, tmp_path: Path
) -> None:
    make().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    if content.startswith('"'):
        content = json.dumps({**json.loads(path.read_text()), **json.loads("{" + content + "}")})
    path.write_text(content)
    with pytest.raises(error, match=message):
        NSALlamaForCausalLM.from_pretrained(tmp_path)


def test_who_reads_the_config_reads_the_weights(tmp_path: Path) -> None:
    make().save_pretrained(tmp_path)
    config, weights = (tmp_path / name for name in ("config.json", "model.safetensors"))
    assert config.stat().st_mode == weights.stat().st_mode


@pytest.mark.parametrize("section", [None, {}], ids=str)
def test_a_section_that_no_checkpoint_could_have_is_refused(section: Any) -> None:
    with pytest.raises(TypeError, match="nsa: expected NSAConfig, got "):
        replace(make().config, nsa=section)


def test_a_model_without_weights_tells_its_shapes() -> None:
    with torch.device("meta"):
        model = NSALlamaForCausalLM(make().config)
        loss, logits = model(torch.zeros(2, 60, dtype=torch.long), labels=torch.zeros(2, 60).long())
    assert logits.shape == (2, 60, model.config.vocab_size)
    loss.backward()
    weight = model.model.layers[0].self_attn.k_proj.weight
    assert weight.grad.shape == weight.shape


def test_an_interrupted_save_leaves_the_weights_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make().save_pretrained(tmp_path)
    whole = (tmp_path / "model.safetensors").read_bytes()

    def stops(tensors: object, path: Path, metadata: object) -> None:
        Path(path).write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr("safetensors.torch.save_file", stops)
    with pytest.raises(KeyboardInterrupt):
        make().save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == whole


def test_an_interrupted_save_leaves_the_config_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make().save_pretrained(tmp_path)
    whole = (tmp_path / "config.json").read_bytes()

    def stops(path: Path, *_: object, **__: object) -> None:
        path.write_bytes(b"{")
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", stops)
    with pytest.raises(KeyboardInterrupt):
        make().save_pretrained(tmp_path)
    assert (tmp_path / "config.json").read_bytes() == whole


def test_recomputed_layers_give_the_same_gradients() -> None:
    model, tokens = make().requires_grad_(True), torch.randint(64, (2, 60))
    counts, grads = [], []
    layer = model.model.layers[0]
    layer.register_forward_pre_hook(lambda *_: counts.append(0))
    for enable in (model.gradient_checkpointing_disable, model.gradient_checkpointing_enable):
        enable()
        model(tokens).square().sum().backward()
        grads.append([x.grad for x in model.parameters()])
        model.zero_grad(set_to_none=True)
    assert len(counts) == 3
    assert all(map(torch.equal, *grads))
    with torch.no_grad():
        caches = model.new_caches(2, 60)
        torch.testing.assert_close(model(tokens, caches), model(tokens), rtol=1e-4, atol=1e-5)
