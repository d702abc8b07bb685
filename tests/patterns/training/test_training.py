"""Patterns that are learned while a model trains."""

from __future__ import annotations

import copy
import math
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.utils.checkpoint import checkpoint

from sparsek_backend.patterns import BlockSparsePattern
from sparsek_backend.patterns.training import (
    BlockGates,
    ImportanceOptions,
    LearnedPattern,
    PatternScheduler,
    Pruning,
    SparseAttentionLayer,
    SparsitySchedule,
    gated_attention,
)
from sparsek_kernels import block_sparse_attention
from tests.patterns.training.planted import train


@pytest.mark.parametrize("gates", [False, True], ids=["importance", "gates"])
def test_a_planted_pattern_is_learned(gates: bool) -> None:
    run = train(gates=gates)
    assert run.recall >= 0.95
    assert int(run.layer.pattern.num_blocks) == int(run.mask.sum())
    assert run.scheduler.sparsity == pytest.approx(run.layer.attention.sparsity, abs=0.02)
    assert run.losses[-1] < 0.5 * run.losses[0]
    assert run.scheduler.reverts == 0
    after = [max(run.losses[s : s + 5]) / run.losses[s - 1] for s in range(40, 140, 20)]
    assert max(after) < 1.5, "no pruning raises the loss by more than half"


@pytest.mark.parametrize("shape", ["cubic", "linear", "constant"])
def test_schedules(shape: Any) -> None:
    schedule = SparsitySchedule(0.8, begin=10, end=30, every=5, initial=0.2, shape=shape)
    assert [s for s in range(40) if schedule.due(s)] == [10, 15, 20, 25, 30, 35]
    assert schedule.sparsity(9) == 0.0
    assert schedule.sparsity(30) == schedule.sparsity(99) == 0.8
    odd = SparsitySchedule(0.8, begin=10, end=33, every=10)
    assert [s for s in range(45) if odd.due(s)] == [10, 20, 30, 33, 40], "final is reached at end"
    middle = {"cubic": 0.8 - 0.6 / 8, "linear": 0.5, "constant": 0.8}[shape]
    assert schedule.sparsity(20) == pytest.approx(middle)


def watched(heads: Any = "kv", **options: Any) -> LearnedPattern:
    """Four heads on two KV heads over 64 tokens, which have seen a batch."""
    learned = LearnedPattern(4, 2, 64, 16, heads=heads, **options)
    torch.manual_seed(0)
    learned(torch.randn(1, 64, 4, 8), torch.randn(1, 64, 2, 8), torch.randn(1, 64, 2, 8))
    return learned


@pytest.mark.parametrize(("heads", "patterns"), [("query", 4), ("kv", 2), ("all", 1)])
def test_heads_share_or_not(heads: Any, patterns: int) -> None:
    learned = watched(heads)
    assert learned.pattern.num_patterns == patterns
    PatternScheduler(learned, SparsitySchedule(0.5)).prune(0.3)
    assert learned.pattern.mask().sum((1, 2)).tolist() == [7] * patterns


def test_layers_share_a_budget() -> None:
    layers = torch.nn.ModuleList(LearnedPattern(2, 2, 64, 16) for _ in "ab")
    sharp = torch.eye(4).expand(2, 4, 4) + 1e-3
    for layer, mass in zip(layers, (sharp, torch.ones(2, 4, 4)), strict=True):
        layer.tracker.add(mass)
    rule = Pruning(pooled="model", sinks=0, window=0)
    PatternScheduler(layers, SparsitySchedule(0.5), rule).prune(0.2)
    assert [int(layer.keep.sum()) for layer in layers] == [2 * 6, 2 * 10]
    assert layers[0].keep.diagonal(0, 1, 2).all()


def test_a_jump_of_the_loss_brings_the_patterns_back() -> None:
    learned = watched()
    scheduler = PatternScheduler(learned, SparsitySchedule(0.3, begin=3, every=4, end=3))
    before = learned.keep.clone()
    changed = [scheduler.step(loss) for loss in (2.0, 2.0, 2.0, 2.9)]
    assert changed == [False, False, True, False]
    pruned = learned.keep.clone()
    assert scheduler.sparsity == 0.3
    assert pruned.sum() < before.sum()
    assert scheduler.step(3.2), "51 % above the average"
    assert torch.equal(learned.keep, before)
    assert (scheduler.sparsity, scheduler.reverts) == (0.0, 1)
    assert not scheduler.step(torch.tensor(2.0))
    assert scheduler.step(2.0), "the next pruning"
    assert scheduler.sparsity == pytest.approx(0.15), "goes half as far"
    assert scheduler.step(math.nan), "so is a loss that is no number"
    assert torch.equal(learned.keep, before)


def test_a_loss_may_be_negative() -> None:
    learned = watched()
    scheduler = PatternScheduler(learned, SparsitySchedule(0.5, end=2, every=1))
    assert [scheduler.step(-1.0) for _ in range(4)] == [True] * 4
    assert (scheduler.sparsity, scheduler.reverts) == (0.5, 0)
    assert scheduler.step(-0.4)  # 60 % of its size above -1
    assert scheduler.reverts == 1


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_counts_a_batch_once(reentrant: bool) -> None:
    layer = SparseAttentionLayer(32, 2, 64, 16)
    for _ in range(2):
        x = torch.randn(1, 64, 32, requires_grad=True)
        checkpoint(layer, x, use_reentrant=reentrant).sum().backward()
    assert int(layer.attention.tracker.added) == layer.attention.batches == 2


def test_pruned_blocks_may_return() -> None:
    learned = watched()
    scheduler = PatternScheduler(learned, SparsitySchedule(0.5), Pruning(sinks=0, window=0))
    scheduler.prune(0.5)
    first = learned.keep.clone()
    learned.tracker.reset()
    learned.tracker.add((learned.visible & ~first).float())
    scheduler.prune(0.5)
    assert (learned.keep & ~first).any()
    assert not (learned.keep & ~learned.visible).any()


def test_a_state_of_other_patterns_is_refused() -> None:
    one = PatternScheduler(LearnedPattern(2, 2, 64, 16, heads="all"), SparsitySchedule(0.5))
    one.patterns[0].tracker.add(torch.rand(1, 4, 4))
    one.prune(0.5)
    two = PatternScheduler(LearnedPattern(2, 2, 64, 16), SparsitySchedule(0.5))
    with pytest.raises(ValueError, match="masks_before: expected masks of shapes"):
        two.load_state_dict(one.state_dict())


def test_a_layer_that_was_tried_in_inference_mode_is_trained() -> None:
    layer = SparseAttentionLayer(32, 2, 64, 16)
    x = torch.randn(1, 64, 32)
    with torch.inference_mode():
        layer(x)
    layer(x).sum().backward()
    assert layer.q_proj.weight.grad is not None


def test_a_layer_made_in_inference_mode_attends() -> None:
    with torch.inference_mode():
        layer = SparseAttentionLayer(32, 2, 64, 16).eval()
        x = torch.randn(1, 64, 32)
        before = layer(x)
        layer.attention.set_mask(torch.eye(4, dtype=torch.bool).expand(2, 4, 4))
        assert not torch.equal(layer(x), before)


@pytest.mark.parametrize("gates", [False, True])
def test_a_saved_layer_goes_on(gates: bool) -> None:
    from safetensors.torch import load, save

    torch.manual_seed(0)
    make = dict(num_kv_heads=1, rope_theta=1e4, gates=gates)
    layer, other = (SparseAttentionLayer(32, 2, 70, 16, **make) for _ in range(2))  # type: ignore[arg-type]
    x = torch.randn(2, 70, 32)
    layer(x)
    scheduler = PatternScheduler(layer, SparsitySchedule(0.3, begin=1, end=1, every=1))
    scheduler.step(1.0)
    other.load_state_dict(load(save(layer.state_dict())))
    torch.testing.assert_close(other.eval()(x), layer.eval()(x))
    again = PatternScheduler(other, scheduler.schedule)
    again.load_state_dict(scheduler.state_dict())
    assert again.step(9.0)
    assert other.pattern.density == 15 / 25, "the pattern before"
    twin = copy.deepcopy(layer)
    torch.testing.assert_close(twin(x), layer(x))


def test_a_resumed_run_draws_what_an_uninterrupted_one_draws() -> None:
    torch.manual_seed(0)
    batches = torch.randn(6, 3, 1, 64, 2, 8).unbind()
    options = ImportanceOptions(samples=2, every=2)
    whole, resumed = (LearnedPattern(2, 2, 64, 16, importance=options) for _ in range(2))
    for batch in batches[:3]:
        whole(*batch)
    state = copy.deepcopy(whole.state_dict())
    resumed.load_state_dict(state)
    for batch in batches[3:]:
        whole(*batch)
        resumed(*batch)
    assert torch.equal(resumed.tracker.history, whole.tracker.history)
    del state["batches"], state["generator"]  # as of version 0.3
    resumed.load_state_dict(state)


def test_distributed_checkpoints_find_the_state_of_a_layer() -> None:
    model, resumed = torch.nn.Sequential(watched()), torch.nn.Sequential(watched())
    resumed[0].batches = 0
    state = get_model_state_dict(model)
    assert state.keys() == model.state_dict().keys()
    set_model_state_dict(resumed, state)
    assert resumed[0].batches == 1


@pytest.mark.parametrize("how", ["copied", "pickled"])
def test_a_copy_attends_the_state_that_it_loads(how: str) -> None:
    learned, dense = LearnedPattern(2, 1, 64, 16), LearnedPattern(2, 1, 64, 16)
    for _ in range(3):
        learned.set_mask(torch.eye(4, dtype=torch.bool).expand(1, 4, 4))
        assert learned.pattern.num_blocks == 4
        twin = copy.deepcopy(learned) if how == "copied" else pickle.loads(pickle.dumps(learned))
        twin.load_state_dict(dense.state_dict())
        assert twin.pattern.num_blocks == 10


def test_a_state_that_lacks_the_importance_is_refused() -> None:
    learned, state = watched(), watched().state_dict()
    state["tracker.history"] = torch.zeros(1, 2, 3, 3)
    with pytest.raises(RuntimeError, match=r"tracker.history: expected shape \[1, 2, 4, 4\]"):
        learned.load_state_dict(state)
    del state["tracker.history"]
    with pytest.raises(RuntimeError, match=r"Missing key.*tracker.history"):
        learned.load_state_dict(state)


def test_shorter_inputs_attend_the_first_blocks() -> None:
    learned = LearnedPattern(2, 2, 64, 16).eval()
    learned.pattern = BlockSparsePattern.local((4, 4), 16, window=2).union(
        BlockSparsePattern.from_mask(torch.zeros(2, 4, 4).bool(), 16)
    )
    q, k, v = (torch.randn(1, 40, 2, 8) for _ in range(3))
    near = BlockSparsePattern.local((3, 3), 16, window=2)
    torch.testing.assert_close(learned(q, k, v), block_sparse_attention(q, k, v, near, causal=True))
    with pytest.raises(ValueError, match="q: expected at most 4 blocks of 16 tokens, got 5"):
        learned(*(torch.randn(1, 65, 2, 8) for _ in range(3)))
    with pytest.raises(ValueError, match="pattern: expected blocks of 16 and shape"):
        learned.pattern = near


def test_gates_weigh_their_blocks() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 40, h, 8, dtype=torch.float64) for h in (4, 2, 2))
    gates = torch.rand(2, 3, 3, dtype=torch.float64) * 0.9 + 0.05
    pattern = BlockSparsePattern.from_mask(torch.ones(3, 3).bool(), 16)
    found = gated_attention(q, k, v, pattern, gates)
    weights = gates.repeat_interleave(2, 0).repeat_interleave(16, 1).repeat_interleave(16, 2)
    scores = torch.einsum("bnhd,bmhd->bhnm", q, k.repeat_interleave(2, 2)) * 8**-0.5
    scores = scores.masked_fill(~torch.ones(40, 40).tril().bool(), float("-inf"))
    probs = scores.softmax(-1) * weights[:, :40, :40]
    probs = probs / probs.sum(-1, keepdim=True)
    wanted = torch.einsum("bhnm,bmhd->bnhd", probs, v.repeat_interleave(2, 2))
    torch.testing.assert_close(found, wanted)
    small = [x[:, :18, :, :2].clone().requires_grad_() for x in (q, k, v)]
    edge = gates[:, :2, :2].clone().requires_grad_()
    two = pattern.crop((2, 2))
    assert torch.autograd.gradcheck(
        lambda *x: gated_attention(x[0], x[1], x[2], two, x[3]), (*small, edge)
    )


@pytest.mark.parametrize("gates", [False, True])
def test_a_compiled_layer_is_compiled_once(gates: bool) -> None:
    torch._dynamo.reset()
    counter, counts = CompileCounter(), []
    layer = SparseAttentionLayer(32, 2, 64, 16, gates=gates)
    compiled = torch.compile(layer, backend=counter)
    scheduler = PatternScheduler(layer, SparsitySchedule(0.5, end=2, every=1))
    for _ in range(3):
        compiled(torch.randn(1, 64, 32)).sum().backward()
        scheduler.step()
        counts.append(counter.frame_count)
    assert counts == [2, 2, 2]  # before the pattern and after it
    if not gates:
        assert int(layer.attention.tracker.added) == 3
    x = torch.randn(1, 64, 32)
    assert torch.equal(compiled.eval()(x), layer.eval()(x))


@pytest.mark.parametrize("gates", [False, True])
def test_inputs_without_tokens_or_sequences(gates: bool) -> None:
    layer = SparseAttentionLayer(32, 2, 64, 16, gates=gates)
    for shape in ((2, 0, 32), (0, 64, 32)):
        x = torch.randn(shape, requires_grad=True)
        layer(x).sum().backward()
        assert x.grad is not None
        assert x.grad.shape == shape


def test_odd_heads_cannot_turn() -> None:
    with pytest.raises(ValueError, match="num_kv_heads=0"):
        SparseAttentionLayer(64, 4, 64, 16, num_kv_heads=0)
    with pytest.raises(ValueError, match="head_dim: expected an even size with"):
        SparseAttentionLayer(60, 4, 64, 16, rope_theta=1e4)
    assert SparseAttentionLayer(60, 4, 64, 16)(torch.randn(1, 64, 60)).shape == (1, 64, 60)


def test_draws_of_gates() -> None:
    torch.manual_seed(0)
    gates = BlockGates((2, 4, 4), temperature=0.1, initial=0.0)
    drawn = torch.stack([gates() for _ in range(200)])
    assert ((drawn >= 0.0) & (drawn <= 1.0)).all()
    assert ((drawn < 0.05) | (drawn > 0.95)).float().mean() > 0.7, "near to 0 and 1"
    assert 0.45 < drawn.mean() < 0.55
    drawn.sum().backward()
    assert gates.logits.grad is not None
    assert (gates.logits.grad > 0).all()
    visible = torch.ones(4, 4).tril().bool()
    assert gates.sparsity_loss(visible, 0.5).item() == 0
    assert gates.sparsity_loss(visible, 0.9).item() == pytest.approx(0.16)
    assert torch.equal(gates.eval()(), torch.full((2, 4, 4), 0.5))


REFUSED: list[tuple[type[Exception], str, Any]] = [
    (ValueError, "final: expected a number from 0", lambda: SparsitySchedule(1.0)),
    (ValueError, "end: expected an integer >= 5", lambda: SparsitySchedule(0.5, begin=5, end=4)),
    (ValueError, "shape: expected cubic", lambda: SparsitySchedule(0.5, shape="x")),  # type: ignore[arg-type]
    (ValueError, "temperature: expected", lambda: BlockGates((1, 1, 1), temperature=0.0)),
    (ValueError, "heads: expected 'query'", lambda: LearnedPattern(2, 2, 64, 16, heads="x")),  # type: ignore[arg-type]
    (
        ValueError, "hidden_size: expected a multiple of num_heads=4 without head_dim, got 10",
        lambda: SparseAttentionLayer(10, 4, 64),
    ),
    (ValueError, "q: expected a multiple of num_kv_heads", lambda: SparseAttentionLayer(16, 0, 64)),
    (
        ValueError, "every: expected an integer >= 1",
        lambda: LearnedPattern(2, 2, 64, 16, importance=ImportanceOptions(every=0)),
    ),
    (
        ValueError, "modules: expected at least one LearnedPattern",
        lambda: PatternScheduler(torch.nn.Linear(1, 1), SparsitySchedule(0.5)),
    ),
    (
        ValueError, "tolerance: expected a number above 0",
        lambda: PatternScheduler(watched(), SparsitySchedule(0.5), tolerance=0.0),
    ),
    (
        NotImplementedError, "gates: expected at most 192 key blocks with head_dim 64, got 200",
        lambda: gated_attention(
            *(torch.zeros(1, 16, 1, 64) for _ in range(3)),
            BlockSparsePattern.from_mask(torch.ones(1, 1).bool(), 16), torch.ones(1, 1, 200),
        ),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("error", "message", "action"), REFUSED, ids=[r[1] for r in REFUSED])
def test_refuses(error: type[Exception], message: str, action: Any) -> None:
    with pytest.raises(error, match=message):
        action()


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize(("sparsity", "warned"), [(0.8, True), (0.2, False)])
def test_a_budget_of_sinks_and_window_alone_is_warned_of(
    pooled: bool, sparsity: float, warned: bool
) -> None:
    visible = torch.ones(6, 6, dtype=torch.bool).tril()  # 21 blocks, of which 11 are forced
    rule = Pruning(pooled=pooled)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mask = rule.mask(torch.rand(2, 6, 6), visible, sparsity)
    assert bool(caught) == warned
    assert all("sinks and window alone are" in str(one.message) for one in caught)
    assert int(mask.sum()) == (22 if warned else 34)
