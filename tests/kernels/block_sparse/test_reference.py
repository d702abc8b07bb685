"""The oracle against torch's attention and cases that can be worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as functional

from tests.kernels.block_sparse.reference import (
    block_sparse_attention_reference,
    block_sparse_mask,
    dropout_factors,
    philox,
)


def ints(*values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_mask_of_a_small_case_by_hand() -> None:
    crow, col = ints([0, 1, 3]), ints(1, 0, 1)
    assert block_sparse_mask(crow, col, 2, 3, 4, False)[0].int().tolist() == [
        [0, 0, 1, 1],
        [0, 0, 1, 1],
        [1, 1, 1, 1],
    ]
    assert block_sparse_mask(crow, col, 2, 3, 4, True)[0].int().tolist() == [
        [0, 0, 0, 0],
        [0, 0, 1, 0],
        [1, 1, 1, 1],
    ]


@pytest.mark.parametrize("causal", [True, False])
def test_matches_torch_attention_with_the_same_mask(causal: bool) -> None:
    torch.manual_seed(0)
    q = torch.randn(2, 5, 4, 8, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(2, 7, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    # two patterns of 2 x 2 blocks of 4: all but the block above the diagonal, and all
    crow, col = ints([0, 1, 3], [3, 5, 7]), ints(0, 0, 1, 0, 1, 0, 1)
    blocks = torch.tensor([[[1, 0], [1, 1]], [[1, 1], [1, 1]]], dtype=torch.bool)
    mask = blocks.repeat_interleave(4, 1).repeat_interleave(4, 2)[:, :5, :7]
    if causal:
        mask = mask & torch.ones(5, 7, dtype=torch.bool).tril(2)
    want = functional.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask.repeat_interleave(2, 0),
        enable_gqa=True,
    ).transpose(1, 2)
    dout = torch.randn_like(want)
    grads = torch.autograd.grad(want, (q, k, v), dout)
    out, _, *found = block_sparse_attention_reference(
        q, k, v, crow, col, 4, causal=causal, dout=dout
    )
    torch.testing.assert_close(out, want.detach())
    torch.testing.assert_close(found, list(grads))


def test_row_without_keys_is_zero_with_minus_infinite_lse() -> None:
    q, k = torch.ones(1, 4, 1, 4), torch.ones(1, 2, 1, 4)
    out, lse = block_sparse_attention_reference(q, k, k, ints([0, 0, 1]), ints(0), 2)
    assert out[0, :2].abs().max() == 0
    assert lse.flatten().tolist()[:2] == [-math.inf, -math.inf]
    assert out[0, 2:].flatten().tolist() == pytest.approx([1.0] * 8)
    assert lse.flatten().tolist()[2:] == pytest.approx([2.0 + math.log(2.0)] * 2)


@pytest.mark.parametrize(
    ("counter", "seed", "words"),
    [
        ((0, 0, 0, 0), 0, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            0x299F31D0A4093822,
            (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
        ),
    ],
)
def test_philox_gives_the_published_words(
    counter: tuple[int, ...], seed: int, words: tuple[int, ...]
) -> None:
    """Known answers of Random123, the authors' library, for 7 rounds."""
    assert philox(torch.tensor(counter), seed).tolist() == list(words)


def test_dropout_by_hand() -> None:
    """Keys 8 and 9 share the first word of their octet."""
    word = int(philox(torch.tensor([1, 2, 5, 9]), 4)[0])
    bits = [word % 2**16, word // 2**16]
    factors = dropout_factors(3, 16, 5, 0.5, 4, 9)
    assert factors[2, 8:10].tolist() == [2.0 * (b >= 2**15) for b in bits]


def test_padding_is_a_mask() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 6, 1, 4, dtype=torch.float64) for _ in range(3))
    keys, queries = torch.arange(6)[None] < 4, torch.arange(6)[None] > 0
    out, lse = block_sparse_attention_reference(
        q, k, v, ints([0, 1]), ints(0), 6, key_mask=keys, query_mask=queries
    )
    want, want_lse = block_sparse_attention_reference(
        q, k[:, :4], v[:, :4], ints([0, 1]), ints(0), 6
    )
    torch.testing.assert_close(out[:, 1:], want[:, 1:])
    torch.testing.assert_close(lse[..., 1:], want_lse[..., 1:])
    assert out[:, 0].abs().max() == 0
    assert lse[0, 0, 0] == -math.inf
