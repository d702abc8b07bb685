"""Patterns from attention statistics: what is counted, and what is kept of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sparsek_backend.patterns import (
    BlockSparsePattern,
    attend_patterns,
    learn_model_patterns,
    learn_pattern,
)
from sparsek_backend.patterns.masses import sampled_block_masses
from sparsek_backend.patterns.ranking import fixed_blocks
from sparsek_backend.patterns.training import ImportanceOptions, Pruning
from sparsek_kernels import block_sparse_attention


def samples(n: int = 50, m: int = 70, count: int = 2, seed: int = 0) -> list[Any]:
    """q ``[2, n, 4, 8]``, k and v ``[2, m, 2, 8]``, sharp enough to have heavy blocks."""
    torch.manual_seed(seed)
    return [
        (3 * torch.randn(2, n, 4, 8), torch.randn(2, m, 2, 8), torch.randn(2, m, 2, 8))
        for _ in range(count)
    ]


def test_sinks_and_window_stay() -> None:
    fixed = fixed_blocks(torch.ones(1, 4, 4), torch.ones(4, 4).tril().bool()[None], 1, 2)
    assert fixed[0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 1, 1]]


@pytest.mark.parametrize(("heads", "patterns"), [("query", 4), ("kv", 2), ("all", 1)])
def test_a_learned_pattern_has_the_heaviest_blocks(heads: Any, patterns: int) -> None:
    data = samples(128, 128)
    pattern = learn_pattern(iter(data), block_size=16, sparsity=0.4, heads=heads)
    masses = [sampled_block_masses(*x, 16, measure="l2", samples=16) for x in data]
    mean = torch.stack(masses).mean(0).unflatten(0, (patterns, -1)).mean(1)
    kept = pattern.mask()
    assert kept.sum((1, 2)).tolist() == [22] * patterns, "of 36 that causality leaves"
    assert torch.equal(pattern.mass(), mean * kept)
    sinks_and_own = torch.eye(8).bool()
    sinks_and_own[:, 0] = True
    assert kept[:, sinks_and_own].all()
    for weights, chosen in zip(mean, kept, strict=True):
        left_out = weights[~chosen & torch.ones(8, 8).tril().bool()]
        assert weights[chosen & ~sinks_and_own].min() >= left_out.max()


def test_no_sparsity_is_dense_attention() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 60, h, 8) for h in (4, 2, 2))
    pattern = learn_pattern([(q, k, v)], block_size=16, sparsity=0.0)
    out = block_sparse_attention(q, k, v, pattern, causal=True)
    dense = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True
    ).transpose(1, 2)
    torch.testing.assert_close(out, dense)


def test_layers_of_a_model() -> None:
    tiny = pytest.importorskip("tests.transformers_op.tiny")
    model = tiny.make_model()
    before = model.config._attn_implementation
    batches = [tiny.tokens(1, 80), tiny.tokens(1, 80, seed=2)]
    exact = ImportanceOptions(measure="mass", samples=16, reduction="mean")
    learned = learn_model_patterns(
        model, batches, block_size=16, sparsity=0.4, importance=exact, name="tiny"
    )
    assert model.config._attn_implementation == before
    assert (learned.model, learned.sparsity, sorted(learned.patterns)) == ("tiny", 0.4, [0, 1])
    assert all(p.num_patterns == 2 and p.shape == (5, 5) for p in learned.patterns.values())
    model.set_attn_implementation("eager")
    with torch.no_grad():
        first, second = (model(x, output_attentions=True).attentions for x in batches)
    whole = learn_model_patterns(model, batches, block_size=16, sparsity=0.0, importance=exact)
    for layer, pattern in whole.patterns.items():
        probs = torch.cat([first[layer], second[layer]]).mean(0)  # [6, 80, 80]
        blocks = probs.unflatten(2, (5, 16)).sum(3).unflatten(1, (5, 16)).mean(2)
        torch.testing.assert_close(
            pattern.mass(), blocks.unflatten(0, (2, 3)).mean(1), atol=1e-5, rtol=1e-4
        )


BOUNDED: dict[str, tuple[str, dict[str, Any]]] = {
    "a sliding window": ("Mistral", {"sliding_window": 8}),
    "a sliding window, longer than the text": ("Mistral", {"sliding_window": 80}),
    "a sliding window that is not passed on": (
        "Phimoe", {"sliding_window": 8, "num_local_experts": 2},
    ),
    "chunks": (
        "Llama4Text",
        {
            "attention_chunk_size": 16, "no_rope_layers": [1], "num_local_experts": 2,
            "intermediate_size_mlp": 32, "head_dim": 16,
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", BOUNDED)
def test_layers_that_see_less_are_refused(kind: str) -> None:
    tiny = pytest.importorskip("tests.transformers_op.tiny")
    import transformers

    name, fields = BOUNDED[kind]
    config = getattr(transformers, f"{name}Config")(
        vocab_size=tiny.VOCABULARY, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, **fields,
    )  # fmt: skip
    model = getattr(transformers, name.removesuffix("Text") + "ForCausalLM")(config)
    words = kind.split(",")[0].removesuffix(" that is not passed on")
    with pytest.raises(NotImplementedError, match=f"got {words} in layer 0"):
        learn_model_patterns(model, [tiny.tokens(1, 40)], block_size=16, sparsity=0.5)
    pattern = BlockSparsePattern.local((3, 3), 16, window=1)
    with (
        attend_patterns(model, {0: pattern}),
        pytest.raises(NotImplementedError, match=f"got {words} in layer 0"),
    ):
        model(tiny.tokens(1, 40))
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("words", ["padding", "packed texts", "a mask", "cached keys"])
def test_inputs_that_see_less_are_refused(words: str) -> None:
    tiny = pytest.importorskip("tests.transformers_op.tiny")
    model, ids = tiny.make_model(), tiny.tokens(1, 32)
    inputs: dict[str, dict[str, Any]] = {
        "padding": {"attention_mask": torch.ones(1, 32, dtype=torch.long)},
        "packed texts": {"position_ids": torch.arange(32)[None] % 20, "use_cache": False},
        "a mask": {"attention_mask": torch.ones(1, 1, 32, 32, dtype=torch.bool)},
        "cached keys": {},
    }
    inputs["padding"]["attention_mask"][0, :3] = 0
    if words == "cached keys":
        inputs[words]["past_key_values"] = model(ids).past_key_values
    pattern = BlockSparsePattern.local((2, 2), 16, window=1)
    with (
        attend_patterns(model, {0: pattern}),
        pytest.raises(NotImplementedError, match=f"got {words} in layer 0"),
    ):
        model(ids, **inputs[words])


@pytest.mark.parametrize(
    ("extra", "keys", "words"),
    [
        ({"softcap": 50.0}, 32, "a logit soft cap"),
        ({"s_aux": torch.zeros(4)}, 32, "learned sinks"),
        ({"is_causal": False}, 32, "attention without causality"),
        ({"dropout": 0.1}, 32, "attention dropout"),
        ({"position_bias": torch.zeros(1, 4, 32, 32)}, 32, "a position bias"),
        ({}, 48, "cached keys"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_layers_that_do_more_are_refused(extra: dict[str, Any], keys: int, words: str) -> None:
    """Their attention would lack what these say, without a word."""
    models = pytest.importorskip("sparsek_backend.patterns.models")
    layer = torch.nn.Module()
    layer.layer_idx = 0
    q, k = torch.randn(1, 4, 32, 8), torch.randn(1, 4, keys, 8)
    models._active[layer] = {0: BlockSparsePattern.local((2, 2), 16, window=1)}
    with pytest.raises(NotImplementedError, match=f"got {words} in layer 0"):
        models._attention(layer, q, k, k, None, **extra)


def test_a_model_attends_its_patterns(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = pytest.importorskip("tests.transformers_op.tiny")
    from sparsek_backend.patterns import models

    model, ids = tiny.make_model(), tiny.tokens(2, 80)
    calls: list[Any] = []
    real = models.block_sparse_attention
    monkeypatch.setattr(
        models, "block_sparse_attention", lambda *a, **k: calls.append(a[3]) or real(*a, **k)
    )
    dense = tiny.logits(model, "sdpa", ids)
    everything = BlockSparsePattern.from_mask(torch.ones(5, 5).bool(), 16)
    near = BlockSparsePattern.local((5, 5), 16, window=1)
    with attend_patterns(model, {0: everything, 1: everything}), torch.no_grad():
        torch.testing.assert_close(model(ids).logits, dense, atol=1e-4, rtol=1e-4)
    assert model.config._attn_implementation == "sdpa"
    with attend_patterns(model, {1: near}), torch.no_grad():
        found = model(ids).logits
    assert calls == [everything, everything, near]
    torch.testing.assert_close(found[:, :16], dense[:, :16], atol=1e-4, rtol=1e-4)
    assert not torch.allclose(found[:, 16:], dense[:, 16:], atol=1e-2)
    with attend_patterns(model, {1: near}), pytest.raises(ValueError, match="pattern: expected 4"):
        model(ids[:, :64])
    others: Any
    for others in ({2: near}, {"1": near}):
        refused = pytest.raises(ValueError, match="patterns: expected indices of the model's")
        with refused, attend_patterns(model, others):
            pass


def test_a_model_trains_through_its_patterns() -> None:
    tiny = pytest.importorskip("tests.transformers_op.tiny")
    model, ids = tiny.make_model(), tiny.tokens(2, 80)
    weight = model.model.layers[0].self_attn.k_proj.weight
    everything = BlockSparsePattern.from_mask(torch.ones(5, 5).bool(), 16)
    grads = []
    for patterns in ({}, {0: everything, 1: everything}):
        with attend_patterns(model, patterns):
            loss = model(ids, labels=ids, use_cache=False).loss
        grads.append(torch.autograd.grad(loss, weight)[0])
    assert grads[0].abs().sum() > 0
    torch.testing.assert_close(grads[1], grads[0], atol=1e-6, rtol=1e-4)


def test_the_other_parts_of_a_larger_model_attend_as_they_did() -> None:
    """An image goes through the vision encoder, whose layers have no pattern."""
    architectures = pytest.importorskip("tests.transformers_op.architectures")
    model = architectures.make("llava", {"text_config": "eager", "vision_config": "sdpa"}).eval()
    side = model.config.vision_config.image_size // model.config.vision_config.patch_size
    image = {"pixel_values": torch.randn(1, 3, 32, 32), "use_cache": False}
    ids = torch.full((1, side**2 + 16), 5)
    ids[0, : side**2] = model.config.image_token_id
    everything = BlockSparsePattern.from_mask(torch.ones(2, 2).bool(), 16)
    with torch.no_grad():
        dense = model(ids, **image).logits
        with attend_patterns(model, {0: everything}):
            torch.testing.assert_close(model(ids, **image).logits, dense, atol=1e-4, rtol=1e-4)
    parts = model.config.text_config, model.config.vision_config
    assert [x._attn_implementation for x in parts] == ["eager", "sdpa"]


def test_layers_without_attention_have_no_pattern() -> None:
    architectures = pytest.importorskip("tests.transformers_op.architectures")
    model, ids = architectures.make("bamba", "sdpa"), torch.full((1, 64), 5)
    learned = learn_model_patterns(model, [ids], block_size=16, sparsity=0.2)
    assert list(learned.patterns) == [1]
    refused = pytest.raises(ValueError, match=r"indices of the model's layers, got \[0\]")
    with refused, attend_patterns(model, {0: learned.patterns[1]}):
        pass


def test_values_of_another_width_than_keys() -> None:
    architectures = pytest.importorskip("tests.transformers_op.architectures")
    model, ids = architectures.make("deepseek_v3", "eager"), torch.arange(3, 67)[None]
    whole = learn_model_patterns(model, [ids], block_size=16, sparsity=0.0)
    near = dict.fromkeys(whole.patterns, BlockSparsePattern.local((4, 4), 16, window=1))
    with torch.no_grad():
        dense = model(ids, use_cache=False).logits
        with attend_patterns(model, whole.patterns):
            torch.testing.assert_close(model(ids).logits, dense, atol=1e-4, rtol=1e-4)
        with attend_patterns(model, near):
            assert not torch.allclose(model(ids).logits, dense, atol=1e-3)


@pytest.mark.parametrize("name", ["bloom", "mamba", "zamba2"])
def test_models_without_numbered_layers_that_attend_are_refused(name: str) -> None:
    architectures = pytest.importorskip("tests.transformers_op.architectures")
    model, ids = architectures.make(name, "eager"), torch.full((1, 64), 5)
    refused = pytest.raises(NotImplementedError, match="ForCausalLM has no numbered layer")
    with refused, attend_patterns(model, {0: BlockSparsePattern.local((4, 4), 16, window=1)}):
        pass
    with refused:
        learn_model_patterns(model, [ids], block_size=16, sparsity=0.5)


((Q, K, V),) = samples(count=1)
REFUSED: list[tuple[str, list[Any], dict[str, Any]]] = [
    ("samples: expected some of the same queries, keys, heads and KV heads, got", [], {}),
    ("samples: expected some of the same queries, keys", [(Q, K, V), (Q[:, 1:], K, V)], {}),
    ("samples: expected some queries, got q of shape .0, ", [(Q[:0], K[:0], V[:0])], {}),
    (r"samples: expected some queries, got q of shape .\d, 0, ", [(Q[:, :0], K, V)], {}),
    ("q: expected shape", [(Q[0], K, V)], {}),
    ("k: expected shape", [(Q, K[..., :4], V)], {}),
    ("q: expected a multiple of num_kv_heads=2", [(Q[:, :, :3], K, V)], {}),
    ("sparsity: expected a number from 0 to below 1, got 1", [(Q, K, V)], {"sparsity": 1}),
    ("heads: expected 'query', 'kv' or 'all', got 'row'", [(Q, K, V)], {"heads": "row"}),
    ("block_size: expected a multiple of 16", [(Q, K, V)], {"block_size": 20}),
]


@pytest.mark.parametrize(("message", "data", "changes"), REFUSED, ids=[r[0] for r in REFUSED])
def test_refuses(message: str, data: list[Any], changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=message):
        learn_pattern(data, **{"block_size": 16, "sparsity": 0.5, **changes})


@pytest.mark.parametrize("name", ["sinks", "window"])
def test_a_rule_refuses(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: expected an integer >= 0, got -1"):
        Pruning(**{name: -1})


def test_a_model_needs_batches_of_one_length() -> None:
    tiny = pytest.importorskip("tests.transformers_op.tiny")
    for batches in ([], [tiny.tokens(1, 40), tiny.tokens(1, 50)]):
        with pytest.raises(ValueError, match="batches: expected texts of one length, got"):
            learn_model_patterns(tiny.make_model(), batches, block_size=16, sparsity=0.5)
    for ids in (tiny.tokens(1, 40)[0], tiny.tokens(1, 40)[:0]):
        with pytest.raises(ValueError, match=r"batches: expected token ids \[B, N\], got shape"):
            learn_model_patterns(tiny.make_model(), [ids], block_size=16, sparsity=0.5)
