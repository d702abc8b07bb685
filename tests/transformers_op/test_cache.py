"""SinkWindowCache: the same tokens as a full cache, in constant memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.transformers_op.tiny import make_model, tokens

import sparsek_backend.transformers_op as sparsek  # isort: skip
from sparsek_backend.transformers_op import SinkWindowCache  # isort: skip

WINDOW: dict[str, Any] = {
    "mode": "sink_window",
    "num_sink": 4,
    "window_size": 16,
    "dense_below": 0,
}


def _model() -> Any:
    model = make_model()
    sparsek.configure(model, **WINDOW)
    model.set_attn_implementation("sparsek")
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
    sparsek.configure(model, **settings)
    with pytest.raises(ValueError, match=words):
        SinkWindowCache(model)
