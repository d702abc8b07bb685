"""The Transformers drop-in on a GPU, against SDPA with the mask written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sparsek_backend.transformers_op import sequences, tiles, topk
from sparsek_kernels.paged import InfLLM, SelectionPolicy, StepPolicy
from sparsek_kernels.paged.sample import CELL_BITS
from tests.transformers_op.tiny import configure, logits, make_model, tokens, visible

pytestmark = pytest.mark.gpu
LENGTH = 500
SINKS: dict[str, Any] = {
    "mode": "sink_window",
    "num_sink": 4,
    "window_size": 32,
    "dense_below": 0,
}
TOPK: dict[str, Any] = {
    "mode": "block_topk",
    "num_sink": 64,
    "window_size": 64,
    "top_k": 1,
    "dense_below": 0,
}


@pytest.fixture
def model() -> Any:
    return make_model().to("cuda", torch.bfloat16)


def _close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    scale = wanted.abs().max().item()
    assert (found - wanted).abs().max().item() < 0.03 * max(scale, 1.0)


def test_modes_against_sdpa(model: Any) -> None:
    ids = tokens(2, LENGTH).cuda()
    dense = logits(model, "sdpa", ids)
    for settings in ({}, {"mode": "dense"}, TOPK | {"top_k": 8}):
        configure(model, **settings)
        _close(logits(model, "sparsek", ids), dense)
    configure(model, **SINKS)
    mask = visible(LENGTH, 4, 32).expand(2, -1, -1, -1).cuda()
    _close(logits(model, "sparsek", ids), logits(model, "sdpa", ids, attention_mask=mask))


@pytest.mark.parametrize("settings", [SINKS, TOPK], ids=["sinks", "topk"])
def test_training_sees_what_inference_sees(model: Any, settings: dict[str, Any]) -> None:
    ids = tokens(2, LENGTH).cuda()
    configure(model, **settings)
    wanted = logits(model, "sparsek", ids)
    found = model(ids).logits
    _close(found, wanted)
    found.float().logsumexp(-1).sum().backward()
    grads = [x.grad for x in model.parameters() if x.grad is not None]
    assert grads
    assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("elements", [1, 1 << 25])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
def test_training_sees_the_weights_that_inference_sees(
    sinks: bool, dtype: torch.dtype, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And has the gradients of a CPU."""
    monkeypatch.setattr(tiles, "_MOST_ELEMENTS", elements)
    policy = SelectionPolicy(num_sink=16, window_size=32, top_k=4, sel_block_size=16)
    torch.manual_seed(0)
    shapes = (2, 300, 8, 64), (2, LENGTH, 2, 64), (2, LENGTH, 2, 64), (8,)
    q, k, v, logits = (torch.randn(x).to("cuda", dtype).requires_grad_() for x in shapes)
    rule = topk.AttentionRule(StepPolicy.of(policy), 0.125, logits if sinks else None)
    entries = topk.select_entries(q, k, v, policy, 0.125)
    assert (entries >> CELL_BITS).max() > 16, "some blocks count for more than one"
    found = sequences.attend(q, k, v, rule)
    with torch.no_grad():
        _close(found, sequences.attend(q, k, v, rule))
    inputs = (q, k, v, logits) if sinks else (q, k, v)
    upstream = torch.randn_like(found)
    given = (entries.cpu(), policy, 0.125, logits.cpu().float() if sinks else None)
    wanted = tiles.attend_tiles(*(x.cpu().float() for x in (q, k, v)), *given)
    _close(found.cpu(), wanted)
    grads = torch.autograd.grad(found, inputs, upstream)
    wanted_grads = torch.autograd.grad(wanted, inputs, upstream.cpu().float())
    for grad, want in zip(grads, wanted_grads, strict=True):
        _close(grad, want)


@pytest.mark.parametrize("queries", [1, 300])
def test_infllms_blocks_are_those_of_a_cpu(queries: int) -> None:
    """But for near ties: a GPU's means are rounded."""
    policy = SelectionPolicy(num_sink=32, window_size=64, top_k=4, sel_block_size=32, query_tile=1)
    q = 3.0 * torch.randn(2, queries, 8, 64)
    k, v = torch.randn(2, 2, LENGTH, 2, 64)
    found, wanted = (
        topk.block_indices(q.to(device), k.to(device), v.to(device), policy, 0.125, InfLLM()).cpu()
        for device in ("cuda", "cpu")
    )
    assert found.shape == wanted.shape
    same = (found[..., None] == wanted[..., None, :]).any(-1)
    assert same.float().mean() > 0.97


@pytest.mark.parametrize("settings", [{}, SINKS, TOPK], ids=["defaults", "sinks", "topk"])
def test_padded_generation(model: Any, settings: dict[str, Any]) -> None:
    ids = tokens(2, LENGTH).cuda()
    mask = torch.ones_like(ids)
    mask[0, :200] = 0
    configure(model, **settings)
    found = model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False)
    alone = model.generate(
        ids[:1, 200:],
        attention_mask=mask[:1, 200:],
        max_new_tokens=4,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    # a random model's logits lie close together: equal up to the first near-tie
    if torch.equal(found[0, LENGTH:], alone.sequences[0, LENGTH - 200 :]):
        return
    first = int((found[0, LENGTH:] != alone.sequences[0, LENGTH - 200 :]).nonzero()[0, 0])
    pair = alone.logits[first][0].float()
    gap = pair.max() - pair[found[0, LENGTH + first]]
    assert gap < 0.05
