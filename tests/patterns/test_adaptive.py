"""Patterns that depend on the queries: learned, routed, and better than a static one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("scipy", reason="scipy is not installed (the patterns extra)")

from sparsek_backend.patterns import BlockSparsePattern
from sparsek_backend.patterns.adaptive import AdaptiveLearner, AdaptivePattern
from sparsek_backend.patterns.training import ImportanceOptions, Pruning
from sparsek_kernels import block_sparse_attention
from sparsek_kernels.block_sparse.structure import indices_of_mask

BLOCKS, SIZE, DIM = 8, 16, 16
EXACT = ImportanceOptions(measure="mass", samples=SIZE)


def sequences(count: int, seed: int) -> list[torch.Tensor]:
    """q, k and v ``[count, 128, 2, 16]``: a block of queries looks at the first or second half.

    Which it is differs from sequence to sequence, so no static pattern of half the blocks fits.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (count, BLOCKS * SIZE, 2, DIM)
    q, k, v = (torch.randn(shape, generator=generator) for _ in range(3))
    kind = torch.randint(2, (count, BLOCKS, 2), generator=generator)
    q[..., 0] = (8.0 * (2 * kind - 1)).repeat_interleave(SIZE, 1)
    half = 2 * (torch.arange(BLOCKS * SIZE) >= BLOCKS * SIZE // 2) - 1
    k[..., 0] = 4.0 * half[:, None]
    return [q, k, v]


def learner(causal: bool = False) -> AdaptiveLearner:
    found = AdaptiveLearner(2, SIZE, causal=causal, importance=EXACT)
    found.observe(*sequences(24, seed=0))
    return found


def test_it_beats_a_static_pattern_of_its_budget_on_other_data() -> None:
    rule = Pruning(sinks=0, window=0)
    adaptive, static = (
        learner().pattern(0.45, clusters, pruning=rule, smoothing=0.1) for clusters in (2, 1)
    )
    q, k, v = sequences(4, seed=1)
    dense = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v))
    ).transpose(1, 2)
    attended = [float(p.mask(q).float().mean()) for p in (adaptive, static)]
    assert attended[0] <= attended[1] + 0.02
    errors = [float((p(q, k, v) - dense).norm() / dense.norm()) for p in (adaptive, static)]
    assert errors[0] < 0.1
    assert errors[1] > 0.3
    kinds = adaptive.route(q).flatten(), (q[:, ::SIZE, :, 0] > 0).transpose(1, 2).flatten()
    assert len(set(zip(*(x.tolist() for x in kinds), strict=True))) <= 4
    per_head = adaptive.route(q)[:, 0] == (q[:, ::SIZE, 0, 0] > 0).long()
    assert per_head.all() or not per_head.any(), "a cluster is a kind"


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("tokens", [128, 120])
def test_it_attends_what_it_routes_to(causal: bool, tokens: int) -> None:
    torch.manual_seed(0)
    visible = torch.ones(BLOCKS, BLOCKS).tril() if causal else torch.ones(BLOCKS, BLOCKS)
    table = (torch.rand(2, 3, BLOCKS, BLOCKS) < 0.5) & visible.bool()
    pattern = AdaptivePattern(torch.randn(2, 3, DIM) / 4, table, SIZE, causal=causal)
    q, k, v = (torch.randn(2, tokens, h, DIM).requires_grad_() for h in (4, 2, 2))
    chosen = pattern.mask(q)
    assert len(pattern.route(q).unique()) == 3
    parts = [
        block_sparse_attention(
            *(x[b : b + 1] for x in (q, k, v)),
            BlockSparsePattern.from_mask(chosen[b], SIZE),
            causal=causal,
        )
        for b in range(2)
    ]
    wanted = torch.cat([x for x in parts if isinstance(x, torch.Tensor)])
    out = pattern(q, k, v)
    torch.testing.assert_close(out, wanted)
    grads = [torch.autograd.grad(x.square().sum(), [q, k, v]) for x in (out, wanted)]
    torch.testing.assert_close(grads[0], grads[1])


@pytest.mark.parametrize("causal", [True, False])
def test_gradcheck(causal: bool) -> None:
    """Of all but the routing, which has no gradient: the queries stay far from its borders."""
    torch.manual_seed(0)
    table = torch.ones(2, 2, 2, 2, dtype=torch.bool).tril()
    table[1, :, 1, 0] = False
    centroids = torch.tensor([[-50.0] * 4, [50.0] * 4]).expand(2, -1, -1)
    pattern = AdaptivePattern(centroids.contiguous(), table, 16, causal=causal)
    leaves = [torch.randn(1, 24, h, 4, dtype=torch.float64, requires_grad=True) for h in (4, 2, 2)]
    assert torch.autograd.gradcheck(pattern, leaves, fast_mode=True)


def test_routing_waits_for_nothing() -> None:
    """Fake tensors have no values: an operation that needs one fails."""
    pattern = learner(causal=True).pattern(0.5, 3)
    with FakeTensorMode(allow_non_fake_inputs=True):
        q, k, v = (torch.empty(2, 128, 2, DIM) for _ in range(3))
        assert pattern(q, k, v).shape == q.shape


@pytest.mark.gpu
def test_routing_does_not_synchronise() -> None:
    pattern = learner(causal=True).pattern(0.5, 3).cuda()
    q, k, v = (x.cuda() for x in sequences(2, seed=1))
    wanted = pattern(q, k, v)
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = pattern(q, k, v)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(found.cpu(), pattern.cpu()(*sequences(2, seed=1)), atol=1e-3, rtol=0)


def test_indices_without_knowing_their_number() -> None:
    from sparsek_backend.patterns.adaptive.routing import indices_with_room

    mask = torch.rand(3, 5, 7, generator=torch.Generator().manual_seed(0)) < 0.4
    crow, col = indices_of_mask(mask)
    for room in (len(col), len(col) + 9):
        found = indices_with_room(mask, room)
        assert torch.equal(found[0], crow)
        assert torch.equal(found[1][: len(col)], col)
        assert len(found[1]) == room


def test_heads_may_share_a_budget() -> None:
    """The second head looks at nothing in particular, so the first gets more blocks."""
    found = AdaptiveLearner(2, SIZE, causal=False, importance=EXACT)
    q, k, v = sequences(12, seed=0)
    q[:, :, 1] *= 0.01
    found.observe(q, k, v)
    for pooled in (False, True):
        rule = Pruning(sinks=0, window=1, pooled=pooled)
        table = found.pattern(0.7, 2, pruning=rule).table
        expected = table.float().mean((1, 2, 3))
        assert expected.mean() < 0.35
        assert (expected[0] > 1.3 * expected[1]) == pooled


def test_sinks_and_window_are_in_every_cluster() -> None:
    pattern = learner(causal=True).pattern(0.6, 3, pruning=Pruning(sinks=1, window=2))
    fixed = BlockSparsePattern.local((BLOCKS, BLOCKS), SIZE, window=2, sinks=1).mask()[0]
    assert pattern.table[:, :, fixed].all()
    assert not pattern.table.triu(1).any()


def test_layers_of_a_model() -> None:
    tiny = pytest.importorskip("tests.transformers_op.tiny")
    from sparsek_backend.patterns import attend_patterns
    from sparsek_backend.patterns.models import observe_model

    model, ids = tiny.make_model(), tiny.tokens(2, 80)
    learners = {layer: AdaptiveLearner(2, 16) for layer in range(2)}
    observe_model(model, learners, [ids])
    everything = {n: one.pattern(0.0, 2) for n, one in learners.items()}
    dense = tiny.logits(model, "sdpa", ids)
    with attend_patterns(model, everything), torch.no_grad():
        torch.testing.assert_close(model(ids).logits, dense, atol=1e-4, rtol=1e-4)
    sparse = {n: one.pattern(0.4, 2) for n, one in learners.items()}
    with attend_patterns(model, sparse), torch.no_grad():
        assert not torch.allclose(model(ids).logits, dense, atol=1e-3)


def test_a_loaded_table_may_list_more_blocks() -> None:
    q = torch.randn(2, 64, 2, 8)
    centroids = torch.randn(1, 2, 8)
    dense = torch.ones(1, 2, 4, 4, dtype=torch.bool).tril()
    made = AdaptivePattern(centroids, dense, 16)
    loaded = AdaptivePattern(centroids, dense & torch.eye(4, dtype=torch.bool), 16)
    loaded.load_state_dict(made.state_dict())
    torch.testing.assert_close(loaded(q, q, q), made(q, q, q))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_it_may_be_cast_with_its_model(dtype: torch.dtype) -> None:
    q = torch.randn(2, 64, 2, 8, dtype=dtype)
    table = torch.ones(1, 2, 4, 4, dtype=torch.bool).tril()
    cast = AdaptivePattern(torch.randn(1, 2, 8), table, 16).to(dtype)
    assert cast(q, q, q).dtype == dtype


SHORT = torch.zeros(1, 64, 2, DIM)


@pytest.mark.parametrize(
    ("message", "action"),
    [
        ("observe: expected at least one", lambda: AdaptiveLearner(1, 16).pattern(0.5, 2)),
        ("clusters: expected at most the 192 dif", lambda: learner().pattern(0.5, 193)),
        ("smoothing: expected a number above 0", lambda: learner().pattern(0.5, 2, smoothing=0.0)),
        ("sparsity: expected a number from 0 to", lambda: learner().pattern(1.0, 2)),
        ("sparsity: expected a number from 0 to", lambda: learner().pattern(-0.1, 2)),
        ("q: expected 128 tokens as before, got 64", lambda: learner().observe(*[SHORT] * 3)),
        ("q: expected 8 blocks of 16", lambda: learner().pattern(0.5, 2)(SHORT, SHORT, SHORT)),
    ],
)
def test_refuses(message: str, action: Any) -> None:
    with pytest.raises(ValueError, match=message):
        action()
