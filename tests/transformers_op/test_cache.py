"""SinkWindowCache: the same tokens as a full cache, in constant memory."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from tests.transformers_op.tiny import configure, make_model, tokens

import transformers  # isort: skip
from sparsek_backend.transformers_op import SinkWindowCache  # isort: skip
from sparsek_backend.transformers_op.cache import rotate  # isort: skip

WINDOW: dict[str, Any] = {
    "mode": "sink_window",
    "num_sink": 4,
    "window_size": 16,
    "dense_below": 0,
}


def _model() -> Any:
    model = make_model()
    configure(model, **WINDOW)
    return model


def test_generation_equals_a_full_cache() -> None:
    model, ids = _model(), tokens(2, 50)
    full = model.generate(ids, max_new_tokens=30, do_sample=False)
    cache = SinkWindowCache(model, move_sinks=False)
    bounded = model.generate(ids, max_new_tokens=30, do_sample=False, past_key_values=cache)
    assert torch.equal(bounded, full)
    assert cache.layers[0].keys.shape == (2, 2, 4 + 16 - 1, 16)
    assert cache.get_seq_length() == 79


@pytest.mark.parametrize("chunk", [1, 7, 16, 40])
def test_chunks_of_any_size_equal_one_pass(chunk: int) -> None:
    model, ids = _model(), tokens(2, 120)
    with torch.no_grad():
        wanted = model(ids).logits
        cache = SinkWindowCache(model, move_sinks=False)
        found = torch.cat(
            [model(part, past_key_values=cache).logits for part in ids.split(chunk, dim=1)], dim=1
        )
    assert (found - wanted).abs().max().item() < 1e-5


def test_moved_sinks_keep_their_distance() -> None:
    model, ids = _model(), tokens(1, 60)
    cache = SinkWindowCache(model)
    with torch.no_grad():
        for token in ids.split(1, dim=1):
            model(token, past_key_values=cache)
    layer = cache.layers[0]
    assert layer._sink_keys is not None
    # each sink's key equals the one that the same token would have right before the window
    dropped = 60 - 4 - 15
    attention = model.model.layers[0]
    with torch.no_grad():
        hidden = attention.input_layernorm(model.model.embed_tokens(ids[:, :4]))
        keys = attention.self_attn.k_proj(hidden).view(1, 4, 2, 16).transpose(1, 2)
        position = torch.arange(4)[None] + dropped
        cos, sin = model.model.rotary_emb(hidden, position)
    low, high = keys.chunk(2, dim=-1)
    wanted = keys * cos[:, None] + torch.cat([-high, low], dim=-1) * sin[:, None]
    assert (layer.keys[..., :4, :] - wanted).abs().max().item() < 1e-4


ROTARY: dict[str, tuple[str, dict[str, Any], list[tuple[int | None, bool]]]] = {
    # name: model, its settings, each layer's rotary frequencies and whether they are interleaved
    "half-split": ("Llama", {}, [(8, False)] * 2),
    "part of the head, interleaved": ("Glm", {"head_dim": 16}, [(4, True)] * 2),
    "part of the head, interleaved, GLM-4": ("Glm4", {"head_dim": 16}, [(4, True)] * 2),
    "interleaved": ("Cohere", {}, [(8, True)] * 2),
    "interleaved, Helium": ("Helium", {"head_dim": 16}, [(8, True)] * 2),
    "interleaved, ERNIE": ("Ernie4_5", {"head_dim": 16}, [(8, True)] * 2),
    "a layer without": ("SmolLM3", {"no_rope_layers": [1, 0]}, [(8, False), (None, False)]),
}


@pytest.mark.parametrize("kind", ROTARY)
def test_sinks_move_as_the_layer_turns_its_keys(kind: str) -> None:
    name, fields, wanted = ROTARY[kind]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(
        vocab_size=97, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, **fields,
    )  # fmt: skip
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    configure(model, **WINDOW)
    cache = SinkWindowCache(model)
    rotary = [(x.rotary.inv_freq, x.rotary.interleaved) for x in cache.layers]
    assert [(x if x is None else len(x), y) for x, y in rotary] == wanted
    # Keys of the first layer depend on token and position alone.
    ids, dropped = tokens(1, 60), 60 - 4 - 15
    later = transformers.DynamicCache(config=config)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        model(ids[:, :4], position_ids=dropped + torch.arange(4)[None], past_key_values=later)
    assert (cache.layers[0].keys[..., :4, :] - later.layers[0].keys).abs().max().item() < 1e-4


LONGER_THAN_TRAINED: dict[str, dict[str, Any]] = {
    "dynamic": {"factor": 2.0},
    "longrope": {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "factor": 4.0},
}


@pytest.mark.parametrize("kind", LONGER_THAN_TRAINED)
@pytest.mark.parametrize("copied", [False, True])
def test_sinks_move_by_the_frequencies_of_the_text_so_far(kind: str, copied: bool) -> None:
    rope = {"rope_type": kind, "rope_theta": 1e4, "original_max_position_embeddings": 48}
    model = make_model(rope_parameters=rope | LONGER_THAN_TRAINED[kind])
    rotary = model.model.rotary_emb
    model.config.max_position_embeddings = 48
    rotary.original_max_seq_len = rotary.max_seq_len_cached = 48
    configure(model, **WINDOW)
    cache, ids, trained = SinkWindowCache(model), tokens(1, 60), rotary.inv_freq.clone()
    cache = copy.deepcopy(cache) if copied else cache
    with torch.no_grad():
        for part in ids.split(5, dim=1):
            model(part, past_key_values=cache)
    assert not torch.equal(rotary.inv_freq, trained)
    dropped = 60 - 4 - 15
    _, sin = rotary(ids.float(), torch.tensor([[dropped, 59]]))  # what it turns by at this length
    applied = sin[0, 0, :8] / rotary.attention_scaling
    assert (applied - (dropped * rotary.inv_freq).sin()).abs().max().item() < 1e-6
    layer = cache.layers[0]
    assert layer._sink_keys is not None
    wanted = rotate(layer._sink_keys, dropped, rotary.inv_freq, False)
    assert torch.equal(layer.keys[..., :4, :], wanted)


@pytest.mark.parametrize("recomputed", [False, True])
def test_a_cache_can_be_made_while_the_model_trains(recomputed: bool) -> None:
    model = make_model(attention_dropout=0.5).train()
    configure(model, mode="sink_window", num_sink=2, window_size=8, dense_below=0)
    if recomputed:
        model.gradient_checkpointing_enable()
    model.model.layers[0].mlp.eval()
    cache = SinkWindowCache(model)
    assert [layer.rotary.inv_freq is not None for layer in cache.layers] == [True, True]
    modules = model, model.model.layers[1].mlp, model.model.layers[0].mlp
    assert [x.training for x in modules] == [True, True, False]


def test_keys_that_turn_otherwise_are_refused() -> None:
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=2)
    model = transformers.GPT2LMHeadModel(config).eval()
    configure(model, **WINDOW)
    with pytest.raises(ValueError, match="in layer 0; pass move_sinks=False"):
        SinkWindowCache(model)
    assert len(SinkWindowCache(model, move_sinks=False).layers) == 2


def test_rotary_parts_beside_the_keys_are_refused() -> None:
    """DeepSeek caches a latent vector as keys and what is turned as values."""
    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(
        vocab_size=97, hidden_size=32, intermediate_size=32, moe_intermediate_size=16,
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, q_lora_rank=16,
        kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8,
        max_position_embeddings=256,
    )  # fmt: skip
    model = transformers.DeepseekV3ForCausalLM(config).eval()
    configure(model, **WINDOW)
    with pytest.raises(ValueError, match="in layer 0; pass move_sinks=False"):
        SinkWindowCache(model)


def test_beams_and_batches_follow() -> None:
    model, ids = _model(), tokens(2, 40)
    full = model.generate(ids, max_new_tokens=10, do_sample=False, num_beams=3)
    cache = SinkWindowCache(model, move_sinks=False)
    bounded = model.generate(
        ids, max_new_tokens=10, do_sample=False, num_beams=3, past_key_values=cache
    )
    assert torch.equal(bounded, full)


def test_padding_is_refused_once_keys_are_dropped() -> None:
    model, ids = _model(), tokens(2, 50)
    mask = torch.ones(2, 50, dtype=torch.long)
    mask[0, :9] = 0
    with pytest.raises(NotImplementedError, match="dropped keys"):
        model.generate(
            ids, attention_mask=mask, max_new_tokens=3, past_key_values=SinkWindowCache(model)
        )


def test_masks_that_no_layer_uses_do_not_matter() -> None:
    """Qwen2-MoE makes the mask of sliding layers for models that have none."""
    torch.manual_seed(0)
    config = transformers.Qwen2MoeConfig(
        vocab_size=97, hidden_size=32, intermediate_size=32, moe_intermediate_size=16,
        shared_expert_intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, pad_token_id=0,
    )  # fmt: skip
    model = transformers.Qwen2MoeForCausalLM(config).eval()
    configure(model, mode="sink_window", num_sink=2, window_size=6, dense_below=0)
    ids, options = tokens(2, 20), {"max_new_tokens": 8, "do_sample": False}
    cache = SinkWindowCache(model, move_sinks=False)
    found = model.generate(ids, past_key_values=cache, **options)
    assert torch.equal(found, model.generate(ids, **options))


def test_cache_can_be_reset_but_not_cropped() -> None:
    model, ids = _model(), tokens(1, 50)
    cache = SinkWindowCache(model, move_sinks=False)
    with torch.no_grad():
        first = model(ids, past_key_values=cache).logits
        with pytest.raises(NotImplementedError, match="taken back"):
            cache.crop(-2)
        cache.reset()
        assert cache.get_seq_length() == 0
        again = model(ids, past_key_values=cache).logits
    assert torch.equal(first, again)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "sink_window"),
        ({"mode": "dense"}, "sink_window"),
        (WINDOW | {"dense_below": 64}, "dense_below"),
        (WINDOW | {"dense_layers": 1}, "dense_layers"),
    ],
)
def test_settings_that_need_more_keys_are_refused(settings: dict[str, Any], words: str) -> None:
    model = make_model()
    configure(model, **settings)
    with pytest.raises(ValueError, match=words):
        SinkWindowCache(model)


def test_layers_that_would_ignore_the_window_are_refused() -> None:
    model = make_model()
    configure(model, **WINDOW)
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="expected attn_implementation 'sparsek', got 'sdpa'"):
        SinkWindowCache(model)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.MistralConfig(
        vocab_size=97, intermediate_size=32, sliding_window=6, num_key_value_heads=2, **sizes
    )
    config.sparsek = WINDOW
    model = transformers.MistralForCausalLM._from_config(config, attn_implementation="sparsek")
    with pytest.raises(ValueError, match=r"got .*'a sliding window'"):
        SinkWindowCache(model)
