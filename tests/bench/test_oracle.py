"""The chunked oracle against torch's own attention and autograd."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from sparsek_backend.bench.oracle import MaskRule, attend_head, compare

RULES = [
    pytest.param(MaskRule(), id="causal"),
    pytest.param(MaskRule(causal=False), id="full"),
    pytest.param(MaskRule(0, 7), id="window"),
    pytest.param(MaskRule(3, 7), id="sinks"),
    pytest.param(MaskRule(3, 1000), id="wide"),
]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("queries", "keys"), [(50, 50), (13, 50), (1, 50)])
def test_outputs_and_gradients_equal_torch(rule: MaskRule, queries: int, keys: int) -> None:
    torch.manual_seed(0)
    q = torch.randn(queries, 2, 8, dtype=torch.float64, requires_grad=True)
    k = torch.randn(keys, 8, dtype=torch.float64, requires_grad=True)
    v = torch.randn(keys, 8, dtype=torch.float64, requires_grad=True)
    dout = torch.randn(queries, 2, 8, dtype=torch.float64)
    rows = torch.arange(queries) + keys - queries
    mask = rule.visible(rows, torch.arange(keys))
    want = F.scaled_dot_product_attention(q.transpose(0, 1), k, v, attn_mask=mask).transpose(0, 1)
    grads = torch.autograd.grad(want, (q, k, v), dout)
    with torch.no_grad():
        out, *got = attend_head(
            q, k, v, rule, dtype=torch.float64, softmax_scale=8**-0.5, dout=dout, chunk=16
        )
    torch.testing.assert_close(out, want.detach())
    for mine, torchs in zip(got, grads, strict=True):
        torch.testing.assert_close(mine, torchs)
    assert rule.count_pairs(queries, keys) == int(mask.sum())


def test_learned_sinks_take_part_in_the_denominator_only() -> None:
    torch.manual_seed(0)
    q = torch.randn(20, 2, 8, dtype=torch.float64)
    k, v = torch.randn(2, 20, 8, dtype=torch.float64)
    sinks = torch.randn(2, dtype=torch.float64, requires_grad=True)
    dout = torch.randn(20, 2, 8, dtype=torch.float64)
    logits = torch.einsum("ngd,md->gnm", q, k) * 8**-0.5
    logits = logits.masked_fill(~MaskRule().visible(torch.arange(20), torch.arange(20)), -1e30)
    logits = torch.cat([logits, sinks[:, None, None].expand(2, 20, 1)], dim=-1)
    want = (logits.softmax(-1)[..., :-1] @ v).transpose(0, 1)
    (dsinks,) = torch.autograd.grad(want, sinks, dout)
    with torch.no_grad():
        out, *grads = attend_head(
            q, k, v, MaskRule(), dtype=torch.float64, softmax_scale=8**-0.5, sinks=sinks, dout=dout
        )
    torch.testing.assert_close(out, want.detach())
    torch.testing.assert_close(grads[3], dsinks)


def test_the_two_times_rule_goes_red() -> None:
    exact = torch.randn(100, dtype=torch.float64)
    plain = exact + 0.01
    assert compare(["out"], [exact + 0.019], [exact], [plain]).passed
    red = compare(["out"], [exact + 0.03], [exact], [plain])
    assert not red.passed
    assert "out" in red.detail
    assert not compare(["out"], [exact * float("nan")], [exact], [plain]).passed
    assert not compare(["out"], [exact[:50]], [exact], [plain]).passed
    spike = exact.clone()
    spike[3] += 0.1
    assert not compare(["out"], [spike], [exact], [plain]).passed
