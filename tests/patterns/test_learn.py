"""Patterns from attention statistics: what is counted, and what is kept of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsek_backend.patterns import (
    BlockMass,
    BlockSparsePattern,
    attend_patterns,
    learn_model_patterns,
    learn_pattern,
)
from sparsek_backend.patterns.ranking import blocks_holding, fixed_blocks
from sparsek_kernels import block_sparse_attention


def samples(n: int = 50, m: int = 70, count: int = 2, seed: int = 0) -> list[Any]:
    """Pairs of q ``[2, n, 4, 8]`` and k ``[2, m, 2, 8]``, sharp enough to have heavy blocks."""
    torch.manual_seed(seed)
    return [(3 * torch.randn(2, n, 4, 8), torch.randn(2, m, 2, 8)) for _ in range(count)]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("n", "m"), [(50, 70), (64, 64), (40, 20)])
def test_mass_is_the_mean_attention_of_a_block(causal: bool, n: int, m: int) -> None:
    mass = BlockMass(16, causal=causal)
    probs = []
    for q, k in samples(n, m):
        mass.add(q, k)
        scores = torch.einsum("bnhd,bmhd->bhnm", q, k.repeat_interleave(2, 2)) * 8**-0.5
        if causal:
            scores = scores.masked_fill(~torch.ones(n, m).tril(m - n).bool(), float("-inf"))
        probs.append(scores.softmax(-1).nan_to_num(0.0).mean(0))
    mean = torch.stack(probs).mean(0)  # [4, n, m]
    found = mass.mean()
    assert found.shape == (4, -(-n // 16), -(-m // 16))
    for r in range(found.shape[1]):
        for c in range(found.shape[2]):
            block = mean[:, 16 * r : 16 * r + 16, 16 * c : 16 * c + 16]
            torch.testing.assert_close(found[:, r, c], block.sum(2).mean(1))


@given(
    size=st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 5)),
    share=st.floats(0.01, 1.0),
    sinks=st.integers(0, 2),
    window=st.integers(0, 2),
    seed=st.integers(0, 99),
)
def test_no_fewer_blocks_hold_the_share(
    size: tuple[int, int, int], share: float, sinks: int, window: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    mass = torch.rand(size, generator=generator).pow(3)
    fixed = fixed_blocks(mass, mass > 0, sinks, window)
    kept = blocks_holding(mass, fixed, share)
    assert fixed.any(2).all()
    assert not (fixed & ~kept).any()
    for p in range(size[0]):
        rest = mass[p].double().masked_fill(fixed[p], 0.0)
        held = rest[kept[p]].sum()
        assert held >= share * rest.sum() - 1e-12
        others = rest[kept[p] & ~fixed[p]]
        if others.numel():
            assert held - others.min() < share * rest.sum(), "the lightest one is not needed"


def test_sinks_and_window_stay() -> None:
    fixed = fixed_blocks(torch.ones(1, 4, 4), torch.ones(4, 4).tril().bool()[None], 1, 2)
    assert fixed[0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 1, 1]]


def test_blocks_without_mass_are_never_kept() -> None:
    mass = torch.tensor([[[0.0, 1.0, 0.0], [0.0, 0.0, 0.0], [0.5, 0.0, 0.5]]])
    for sinks, window in ((0, 0), (1, 1), (2, 2)):
        fixed = fixed_blocks(mass, mass > 0, sinks, window)
        assert torch.equal(blocks_holding(mass, fixed, 1.0), mass > 0)


@pytest.mark.parametrize("scope", ["row", "head"])
@pytest.mark.parametrize(("heads", "patterns"), [("query", 4), ("kv", 2), ("all", 1)])
def test_a_learned_pattern_holds_its_share(scope: Any, heads: Any, patterns: int) -> None:
    mass = BlockMass(16)
    for q, k in samples(128, 128):
        mass.add(q, k)
    pattern = mass.pattern(0.6, scope=scope, heads=heads)
    assert pattern.num_patterns == patterns
    mean = mass.mean().unflatten(0, (patterns, -1)).mean(1)
    kept = pattern.mask()
    assert torch.equal(pattern.mass(), mean * kept)
    sinks_and_own = torch.eye(8).bool()
    sinks_and_own[:, 0] = True
    assert kept[:, sinks_and_own].all()
    rest = mean.masked_fill(sinks_and_own, 0.0).double()
    over = 2 if scope == "row" else (1, 2)
    assert ((rest * kept).sum(over) >= 0.6 * rest.sum(over) - 1e-9).all()
    assert pattern.density < 36 / 64, "fewer than the blocks of a triangle"
    assert not pattern.mask().triu(1).any()


def test_whole_share_is_dense_attention() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 60, h, 8) for h in (4, 2, 2))
    pattern = learn_pattern([(q, k)], block_size=16, share=1.0)
    out = block_sparse_attention(q, k, v, pattern, causal=True)
    dense = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True
    ).transpose(1, 2)
    torch.testing.assert_close(out, dense)


def test_layers_of_a_model() -> None:
    tiny = pytest.importorskip("tests.transformers_op.tiny")
    model = tiny.make_model()
    before = model.config._attn_implementation
    ids = tiny.tokens(2, 80)
    patterns = learn_model_patterns(model, [ids, tiny.tokens(1, 80, seed=2)], block_size=16)
    assert model.config._attn_implementation == before
    assert sorted(patterns) == [0, 1]
    assert all(p.num_patterns == 2 and p.shape == (5, 5) for p in patterns.values())
    model.set_attn_implementation("eager")
    with torch.no_grad():
        first, second = (
            model(x, output_attentions=True).attentions for x in (ids, tiny.tokens(1, 80, seed=2))
        )
    whole = learn_model_patterns(model, [ids, tiny.tokens(1, 80, seed=2)], block_size=16, share=1.0)
    for layer, pattern in whole.items():
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
        learn_model_patterns(model, [tiny.tokens(1, 40)], block_size=16)
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


((Q, K),) = samples(count=1)
REFUSED: list[tuple[str, list[Any], dict[str, Any]]] = [
    ("samples: expected at least one, got none", [], {}),
    ("q: expected queries, keys, heads and KV heads as in", [(Q, K), (Q[:, 1:], K)], {}),
    ("q: expected shape", [(Q[0], K)], {}),
    ("k: expected shape", [(Q, K[..., :4])], {}),
    ("q: expected a multiple of num_kv_heads=2", [(Q[:, :, :3], K)], {}),
    ("share: expected a number above 0 and up to 1, got 0", [(Q, K)], {"share": 0}),
    ("share: expected a number above 0 and up to 1, got 1.5", [(Q, K)], {"share": 1.5}),
    ("scope: expected 'row' or 'head', got 'all'", [(Q, K)], {"scope": "all"}),
    ("heads: expected 'query', 'kv' or 'all', got 'row'", [(Q, K)], {"heads": "row"}),
    ("sinks: expected an integer >= 0, got -1", [(Q, K)], {"sinks": -1}),
    ("window: expected an integer >= 0, got -1", [(Q, K)], {"window": -1}),
    ("block_size: expected a multiple of 16", [(Q, K)], {"block_size": 20}),
]


@pytest.mark.parametrize(("message", "data", "changes"), REFUSED, ids=[r[0] for r in REFUSED])
def test_refuses(message: str, data: list[Any], changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=message):
        learn_pattern(data, **{"block_size": 16, **changes})


def test_a_model_needs_batches() -> None:
    tiny = pytest.importorskip("tests.transformers_op.tiny")
    with pytest.raises(ValueError, match="batches: expected at least one, got none"):
        learn_model_patterns(tiny.make_model(), [], block_size=16)
