"""The oracle against torch's attention and cases that can be worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as functional

from tests.kernels.sink_window.reference import (
    sink_flash_attention_reference,
    sink_window_mask,
)


def test_mask_of_a_small_case_by_hand() -> None:
    rows = sink_window_mask(4, 6, num_sink=1, window_size=2)
    assert rows.int().tolist() == [
        [1, 1, 1, 0, 0, 0],
        [1, 0, 1, 1, 0, 0],
        [1, 0, 0, 1, 1, 0],
        [1, 0, 0, 0, 1, 1],
    ]


def test_mask_with_more_queries_than_keys_leaves_early_rows_empty() -> None:
    assert sink_window_mask(3, 1).int().tolist() == [[0], [0], [1]]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2)])
def test_matches_torch_attention(causal: bool, heads: int, kv_heads: int) -> None:
    torch.manual_seed(0)
    q = torch.randn(2, 33, heads, 16, dtype=torch.float64, requires_grad=True)
    k = torch.randn(2, 33, kv_heads, 16, dtype=torch.float64, requires_grad=True)
    v = torch.randn(2, 33, kv_heads, 16, dtype=torch.float64, requires_grad=True)
    want = functional.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        is_causal=causal,
        enable_gqa=True,
    ).transpose(1, 2)
    dout = torch.randn_like(want)
    grads = torch.autograd.grad(want, (q, k, v), dout)
    out, _, *found = sink_flash_attention_reference(q, k, v, causal=causal, dout=dout)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(found, list(grads))


def test_window_matches_torch_attention_with_the_same_mask() -> None:
    torch.manual_seed(1)
    q, k, v = (torch.randn(1, 40, 2, 8, dtype=torch.float64) for _ in range(3))
    mask = sink_window_mask(40, 40, num_sink=3, window_size=7)
    want = functional.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask
    ).transpose(1, 2)
    out, _ = sink_flash_attention_reference(q, k, v, num_sink=3, window_size=7)
    torch.testing.assert_close(out, want)


def test_learned_sink_takes_its_share_of_the_denominator() -> None:
    q = torch.zeros(1, 1, 1, 4, dtype=torch.float64)
    k = torch.ones(1, 3, 1, 4, dtype=torch.float64)
    v = torch.full((1, 3, 1, 4), 2.0, dtype=torch.float64)
    sinks = torch.tensor([math.log(3.0)], dtype=torch.float64)
    out, lse = sink_flash_attention_reference(q, k, v, sinks=sinks)
    assert out.flatten().tolist() == pytest.approx([1.0] * 4)  # 3 of 6 parts are keys
    assert lse.item() == pytest.approx(math.log(6.0))


def test_row_without_keys_is_zero_with_minus_infinite_lse() -> None:
    q, k = torch.ones(1, 3, 1, 4), torch.ones(1, 1, 1, 4)
    out, lse = sink_flash_attention_reference(q, k, k)
    assert out[0, :2].abs().max() == 0
    assert lse.flatten().tolist()[:2] == [-math.inf, -math.inf]
