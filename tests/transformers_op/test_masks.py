"""Every kind of mask that Transformers' models ask for, against SDPA or eager in the same model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.transformers_op.tiny import VOCABULARY, logits, make_model, tokens

import sparsek_backend.transformers_op as sparsek  # isort: skip
import transformers  # isort: skip
from sparsek_backend.transformers_op.mask import LazyMask, sparsek_mask  # isort: skip
from sparsek_kernels.fallback import fallback_counts  # isort: skip
from transformers import masking_utils as hf  # isort: skip

TOLERANCE = 1e-5
LENGTH = 20
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}


def _make(name: str, **fields: Any) -> Any:
    """A random model whose logits depend on what its layers attend."""
    torch.manual_seed(0)
    config, ending = name.removesuffix("*"), "Model" if name.endswith("*") else "ForCausalLM"
    made = getattr(transformers, f"{config}Config")(**SIZES | fields)
    model = getattr(transformers, config.removesuffix("Text") + ending)(made).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.normal_(0, weight.shape[1] ** -0.5)
    return model


def _last(found: Any) -> torch.Tensor:
    out = found.logits if "logits" in found else found.last_hidden_state
    assert isinstance(out, torch.Tensor)
    return out


def _run(model: Any, implementation: str, **inputs: Any) -> torch.Tensor:
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        return _last(model(**inputs))


def _masks() -> dict[str, torch.Tensor]:
    """Padding left, right and inside the first of two rows."""
    ones = torch.ones(2, LENGTH, dtype=torch.long)
    masks = {name: ones.clone() for name in ("none", "left", "right", "inside")}
    masks["left"][0, :7] = 0
    masks["right"][0, -7:] = 0
    masks["inside"][0, 9:13] = 0
    return masks


MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    # name: model, its settings, what the outputs are compared with
    "causal": ("Llama", {}, "sdpa"),
    "window": ("Mistral", {"sliding_window": 6}, "sdpa"),
    "window, not passed on": ("Phimoe", {"sliding_window": 6, "num_local_experts": 4}, "sdpa"),
    "window in some layers": (
        "Qwen2Moe",
        EXPERTS
        | {
            "num_experts": 4,
            "shared_expert_intermediate_size": 16,
            "use_sliding_window": True,
            "sliding_window": 6,
            "max_window_layers": 1,
        },
        "sdpa",
    ),
    "chunks": (
        "Llama4Text",
        {
            "attention_chunk_size": 8,
            "num_local_experts": 2,
            "intermediate_size_mlp": 32,
            "head_dim": 8,
            "no_rope_layers": [1, 0],
        },
        "sdpa",
    ),
    "soft cap": (
        "Gemma2",
        {"head_dim": 8, "sliding_window": 6, "attn_logit_softcapping": 0.5},
        "eager",
    ),
    "soft cap, other model": (
        "VaultGemma",
        {"head_dim": 8, "sliding_window": 6, "attn_logit_softcapping": 0.5},
        "eager",
    ),
    "sinks": (
        "GptOss",
        {"head_dim": 8, "sliding_window": 6, "num_local_experts": 4, "num_experts_per_tok": 2},
        "eager",
    ),
    "no causality": ("Bert*", {}, "sdpa"),
    "window on both sides": (
        "ModernBert*",
        {"local_attention": 8, "global_attn_every_n_layers": 2},
        "sdpa",
    ),
}


@pytest.mark.parametrize("kind", MODELS)
def test_padding_changes_nothing_beside_the_reference(kind: str) -> None:
    name, fields, reference = MODELS[kind]
    model, ids = _make(name, **fields), tokens(2, LENGTH)
    for side, mask in _masks().items():
        inputs = {"input_ids": ids, "attention_mask": mask}
        wanted = _run(model, reference, **inputs)
        found = _run(model, "sparsek", **inputs)
        assert (found - wanted).abs()[mask.bool()].max() < TOLERANCE, side


@pytest.mark.parametrize("kind", [kind for kind in MODELS if not MODELS[kind][0].endswith("*")])
def test_packed_texts(kind: str) -> None:
    name, fields, reference = MODELS[kind]
    model, ids = _make(name, **fields), tokens(2, LENGTH)
    position = torch.stack([torch.arange(LENGTH) % 8, (torch.arange(LENGTH) + 5) % 17])
    position[1, :12] = torch.arange(12)
    inputs = {"input_ids": ids, "position_ids": position, "use_cache": False}
    wanted = _run(model, reference, **inputs)
    assert (_run(model, "sparsek", **inputs) - wanted).abs().max() < TOLERANCE


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("kind", ["causal", "window, not passed on", "chunks", "soft cap", "sinks"])
def test_cached_steps(kind: str, side: str, cache: str) -> None:
    name, fields, reference = MODELS[kind]
    model, ids = _make(name, **fields), tokens(2, LENGTH + 4)
    mask = torch.cat([_masks()[side], torch.ones(2, 4, dtype=torch.long)], dim=1)
    position = (mask.cumsum(1) - 1).clamp_min(0)
    found = {}
    for implementation in (reference, "sparsek"):
        if cache == "static":
            held: Any = transformers.StaticCache(config=model.config, max_cache_len=32)
        else:
            held = transformers.DynamicCache(config=model.config)
        outs = []
        for step in (slice(0, LENGTH), slice(LENGTH, LENGTH + 3), slice(LENGTH + 3, LENGTH + 4)):
            inputs = {"input_ids": ids[:, step], "position_ids": position[:, step]}
            inputs["attention_mask"] = mask[:, : step.stop]
            outs.append(_run(model, implementation, **inputs, past_key_values=held))
        found[implementation] = torch.cat(outs, dim=1)[mask.bool()]
    assert (found["sparsek"] - found[reference]).abs().max() < TOLERANCE


def test_custom_masks_hold_where_positions_start_over() -> None:
    model, ids = make_model(), tokens(1, LENGTH)
    mask = torch.rand(1, 1, LENGTH, LENGTH) > 0.5
    mask |= torch.eye(LENGTH, dtype=torch.bool)
    position = (torch.arange(LENGTH) % 8)[None]
    inputs = {"attention_mask": mask, "position_ids": position}
    wanted = logits(model, "sdpa", ids, **inputs)
    assert (logits(model, "sparsek", ids, **inputs) - wanted).abs().max() < TOLERANCE


@pytest.mark.parametrize("kind", ["no causality", "window on both sides", "causal", "soft cap"])
def test_offsets_keep_texts_apart(kind: str) -> None:
    name, fields, reference = MODELS[kind]
    model, ids = _make(name, **fields), tokens(1, LENGTH)
    lengths = [8, 12]
    wanted = torch.cat(
        [_run(model, reference, input_ids=part) for part in ids.split(lengths, 1)], 1
    )
    starts = torch.tensor([0, 8, 20], dtype=torch.int32)
    position = torch.cat([torch.arange(n) for n in lengths])[None]
    inputs = {"input_ids": ids, "cu_seq_lens_q": starts, "cu_seq_lens_k": starts}
    inputs |= {"max_length_q": 12, "max_length_k": 12}
    ours = _make(name, **fields, attn_implementation="sparsek")  # which some set at load alone
    found = _run(ours, "sparsek", **inputs, position_ids=position)
    assert (found - wanted).abs().max() < TOLERANCE


@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_a_padded_decoder_stays_causal(side: str) -> None:
    """Moonshine passes ``is_causal=False`` beside every mask."""
    torch.manual_seed(0)
    sizes = {
        f"{part}_{name}": number
        for part in ("encoder", "decoder")
        for name, number in (
            ("num_hidden_layers", 2),
            ("num_attention_heads", 4),
            ("num_key_value_heads", 4),
        )
    }
    config = transformers.MoonshineConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=32, **sizes
    )
    model = transformers.MoonshineForConditionalGeneration(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.normal_(0, weight.shape[1] ** -0.5)
    mask = _masks()[side]
    heard = torch.ones(2, 4000, dtype=torch.long)
    heard[0, 3000:] = 0
    inputs = {
        "input_values": torch.randn(2, 4000),
        "attention_mask": heard,
        "decoder_input_ids": tokens(2, LENGTH),
        "decoder_attention_mask": mask,
    }
    wanted = _run(model, "sdpa", **inputs)
    found = _run(model, "sparsek", **inputs)
    assert (found - wanted).abs()[mask.bool()].max() < TOLERANCE


def test_windows_count_slots_of_padding() -> None:
    """A window looks back over slots, as SDPA's mask does; that needs no kernel's window."""
    name, fields, _ = MODELS["window"]
    model, ids = _make(name, **fields), tokens(2, LENGTH)
    reason = "a window over padding between tokens in Transformers"
    for side, times in (("left", 0), ("right", 0), ("inside", 2)):
        before = fallback_counts().get(reason, 0)
        _run(model, "sparsek", input_ids=ids, attention_mask=_masks()[side])
        assert fallback_counts().get(reason, 0) == before + times


def _rules() -> dict[str, tuple[Callable[..., Any], type]]:
    texts = torch.tensor([[0] * 4 + [1] * 8, [0] * 9 + [1] * 3])
    packed = hf.packed_sequence_mask_function(texts)
    chunks = hf.chunked_causal_mask_function(5, torch.tensor([0, 3]))
    window = hf.sliding_window_causal_mask_function(4)
    both = hf.sliding_window_bidirectional_mask_function(3)
    remap = getattr(hf, "remap_positions_for_packed_sequence", lambda rule, _: rule)
    counts = torch.arange(12) - torch.tensor([[0] * 4 + [4] * 8, [0] * 9 + [9] * 3])
    prefix = hf.or_masks(hf.causal_mask_function, lambda b, h, q, k: k < 2)
    return {
        "causal": (hf.causal_mask_function, LazyMask),
        "bidirectional": (hf.bidirectional_mask_function, LazyMask),
        "window": (window, LazyMask),
        "window on both sides": (both, LazyMask),
        "chunks": (chunks, LazyMask),
        "packed": (hf.and_masks(hf.causal_mask_function, packed), LazyMask),
        "packed window": (hf.and_masks(window, packed), LazyMask),
        "packed chunks": (hf.and_masks(chunks, packed), LazyMask),
        "packed, by position": (hf.and_masks(remap(window, counts), packed), LazyMask),
        "packed chunks, by position": (hf.and_masks(remap(chunks, counts), packed), LazyMask),
        "prefix": (prefix, torch.Tensor),
        "packed prefix": (hf.and_masks(prefix, packed), torch.Tensor),
        "window without order": (hf.sliding_window_overlay(4), torch.Tensor),
        "ordered window on both sides": (
            hf.and_masks(hf.causal_mask_function, both),
            torch.Tensor,
        ),
        "unknown": (lambda b, h, q, k: k <= q + 1, torch.Tensor),
    }


@pytest.mark.parametrize("num_q", [12, 5, 1])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("name", _rules())
def test_masks_written_out_are_those_of_eager_attention(
    name: str, padded: bool, num_q: int
) -> None:
    rule, kind = _rules()[name]
    padding = torch.ones(2, 12, dtype=torch.bool)
    padding[0, :3] = not padded
    padding[1, 5:7] = not padded
    asked: dict[str, Any] = {
        "batch_size": 2,
        "q_length": num_q,
        "q_offset": 12 - num_q,
        "kv_length": 12,
        "mask_function": rule,
        "attention_mask": padding,
    }
    wanted = hf.eager_mask(**asked)
    found = sparsek_mask(**asked)
    assert type(found) is kind
    assert torch.equal(found + 0, wanted)
    assert torch.equal(found[:, :, :, :4], wanted[:, :, :, :4])
    assert torch.equal(found.bool(), wanted.bool())


def test_masks_keep_their_rule_until_they_are_changed() -> None:
    mask = sparsek_mask(batch_size=2, q_length=3, kv_length=3, config=None)
    for same in (mask, mask.detach(), mask.to("cpu"), mask.clone(), mask.half()):
        assert isinstance(same, LazyMask)
        assert same.rule.is_plain_causal
        assert same.holds
    assert mask.half().written.min() == torch.finfo(torch.half).min
    assert type(mask[:1]) is torch.Tensor
    assert type(mask == 0) is torch.Tensor
    assert "causal=True" in repr(mask)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_masks_that_were_changed_in_place_are_served_as_they_are(context: Any) -> None:
    layer = torch.nn.Module()
    layer.config, layer.is_causal = make_model().config, True
    with context():
        q = torch.randn(2, 6, 10, 16)
        changes: list[Callable[[torch.Tensor], object]] = [
            lambda mask: mask[..., 3:5].fill_(-1e9),
            lambda mask: mask.masked_fill_(torch.arange(10) == 4, -1e9),
            lambda mask: mask.__setitem__((..., 4), -1e9),
        ]
        for change in changes:
            mask = sparsek_mask(batch_size=2, q_length=10, kv_length=10)
            change(mask)
            found, _ = sparsek.sparsek_attention(layer, q, q, q, mask)
            additive = hf.eager_mask(batch_size=2, q_length=10, kv_length=10)
            change(additive)
            wanted = torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=additive)
            assert (found - wanted.transpose(1, 2)).abs().max() < TOLERANCE


def test_masks_added_to_scores_mask_them() -> None:
    asked: dict[str, Any] = {"batch_size": 2, "q_length": 4, "kv_length": 4}
    asked["attention_mask"] = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]], dtype=torch.bool)
    scores, mask = torch.randn(2, 3, 4, 4), sparsek_mask(**asked)
    wanted = scores + hf.eager_mask(**asked)
    for found in (scores + mask, mask + scores, scores.clone().add_(mask)):
        assert torch.equal(found.softmax(-1), wanted.softmax(-1))


@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("kind", ["causal", "window"])
def test_compiled_models(kind: str, side: str) -> None:
    name, fields, _ = MODELS[kind]
    model = _make(name, **fields)
    inputs = {"input_ids": tokens(2, LENGTH), "attention_mask": _masks()[side], "use_cache": False}
    wanted = _run(model, "sparsek", **inputs)
    with torch.no_grad():
        found = torch.compile(model, backend="eager")(**inputs).logits
    assert (found - wanted).abs().max() < TOLERANCE


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradients_with_checkpointing(use_reentrant: bool) -> None:
    name, fields, _ = MODELS["window in some layers"]
    model, ids, mask = _make(name, **fields).train(), tokens(2, LENGTH), _masks()["left"]
    labels = ids.masked_fill(mask == 0, -100)
    labels[0, 7] = -100  # predicted by a padding token, whose state is no reference's
    grads = []
    for implementation in ("sdpa", "sparsek"):
        model.set_attn_implementation(implementation)
        if implementation == "sparsek":
            options = {"use_reentrant": use_reentrant}
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        loss = model(ids, attention_mask=mask, labels=labels, use_cache=False).loss
        model.zero_grad()
        loss.backward()
        grads.append(model.model.layers[0].self_attn.q_proj.weight.grad.clone())
    assert grads[0].abs().max() > 1e-3
    assert (grads[1] - grads[0]).abs().max() < TOLERANCE


def test_masks_that_do_not_fit_are_refused() -> None:
    layer = torch.nn.Module()
    layer.config, layer.is_causal = make_model().config, True
    q = torch.randn(2, 6, 10, 16)
    with pytest.raises(ValueError, match="attention_mask: expected a shape that broadcasts"):
        sparsek.sparsek_attention(layer, q, q, q, torch.ones(2, 1, 9, 10, dtype=torch.bool))
    for offsets in ([0, 7], [0, 9, 5, 20], []):
        starts = torch.tensor(offsets)
        both = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts}
        with pytest.raises(ValueError, match=r"cu_seq_lens_q: expected . offsets from 0 to .* 20"):
            sparsek.sparsek_attention(layer, q, q, q, None, **both)
    for name, other in (("cu_seq_lens_q", "cu_seq_lens_k"), ("cu_seq_lens_k", "cu_seq_lens_q")):
        with pytest.raises(
            ValueError, match=f"{name}: expected offsets of packed texts .*, got None"
        ):
            sparsek.sparsek_attention(layer, q, q, q, None, **{other: torch.tensor([0, 20])})


def test_a_mask_that_hides_nothing_fits_keys_of_any_number() -> None:
    """Encoders that are run with a cache make it for their new tokens only."""
    layer = torch.nn.Module()
    layer.config, layer.is_causal = make_model().config, True
    asked = {"q_length": 3, "kv_length": 3, "mask_function": hf.bidirectional_mask_function}
    mask = sparsek_mask(batch_size=2, **asked)
    q, k = torch.randn(2, 6, 3, 16), torch.randn(2, 6, 9, 16)
    found, _ = sparsek.sparsek_attention(layer, q, k, k, mask)
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, k).transpose(1, 2)
    assert (found - wanted).abs().max() < TOLERANCE


@pytest.mark.parametrize(("head_dim", "value_dim"), [(8, 24), (24, 8), (320, 320)])
def test_head_dims(head_dim: int, value_dim: int) -> None:
    layer = torch.nn.Module()
    layer.config, layer.is_causal = make_model().config, True
    torch.manual_seed(0)
    q, k = torch.randn(2, 4, 9, head_dim), torch.randn(2, 2, 9, head_dim)
    v = torch.randn(2, 2, 9, value_dim)
    found, _ = sparsek.sparsek_attention(layer, q, k, v, None)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True
    ).transpose(1, 2)
    assert (found - wanted).abs().max() < TOLERANCE
    assert found.is_contiguous()
