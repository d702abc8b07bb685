"""The NSA oracle against the paper's special cases, torch's attention and hand-made numbers."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.nsa import reference as ref


def test_equal_blocks_score_as_their_probability() -> None:
    probs = torch.rand(4, 3, 6, dtype=torch.float64)
    scores = ref.block_scores(probs, 7, 2, 8, 8, 8)
    torch.testing.assert_close(scores[..., :6], probs.unflatten(0, (2, 2)).sum(1))
    assert (scores[..., 6] == 0).all()


def test_overlapping_blocks_count_shared_strides() -> None:
    # l = 2 d, l' = 4 d: compressed block 4j - 1 and 4j + 3 share one stride with block j,
    # the three between share two.
    probs = torch.eye(9, dtype=torch.float64)[None]
    scores = ref.block_scores(probs, 3, 1, 32, 16, 64)[0]
    expected = torch.tensor(
        [
            *[[2, 0, 0], [2, 0, 0], [2, 0, 0], [1, 1, 0]],
            *[[0, 2, 0], [0, 2, 0], [0, 2, 0], [0, 1, 1], [0, 0, 2]],
        ],
        dtype=torch.float64,
    )
    torch.testing.assert_close(scores, expected)


@pytest.mark.parametrize(("size", "stride", "sel"), [(32, 16, 64), (64, 16, 64), (16, 4, 32)])
def test_scores_are_overlaps_in_tokens(size: int, stride: int, sel: int) -> None:
    num_cmp, num_blocks = 11, 6
    scores = ref.block_scores(
        torch.eye(num_cmp, dtype=torch.float64)[None], num_blocks, 1, size, stride, sel
    )[0]
    for c in range(num_cmp):
        for j in range(num_blocks):
            lo, hi = max(c * stride, j * sel), min(c * stride + size, (j + 1) * sel)
            assert scores[c, j] == max(hi - lo, 0) // stride


def test_select_ties_go_to_the_lower_index() -> None:
    scores = torch.zeros(1, 1, 8)
    scores[..., 4] = 1.0
    chosen = ref.select_reference(scores, 8 * 4, 4, 5, 1, 2)
    assert chosen[0, 0].tolist() == [0, 1, 4, 6, 7]


def test_select_fills_up_with_minus_one() -> None:
    chosen = ref.select_reference(torch.zeros(1, 9, 3), 9, 4, 4, 1, 2)
    assert chosen[0, 0].tolist() == [0, -1, -1, -1]
    assert chosen[8, 0].tolist() == [0, 1, 2, -1]


def test_attention_is_torchs_attention() -> None:
    q, k, v = (torch.randn(9, h, 8, dtype=torch.float64) for h in (4, 2, 2))
    mask = torch.rand(9, 9) > 0.5
    mask[:, 0] = True
    out, lse, probs = ref.masked_attention(q, k, v, mask, 0.3)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in (q, k, v)), attn_mask=mask, scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(out, expected[0].transpose(0, 1))
    torch.testing.assert_close(probs.sum(-1), torch.ones_like(lse))


def test_a_query_without_keys_gives_zero() -> None:
    q, k, v = (torch.randn(2, 1, 4, dtype=torch.float64) for _ in range(3))
    mask = torch.tensor([[False, False], [True, False]])
    out, lse, _ = ref.masked_attention(q, k, v, mask, 1.0)
    assert out[0].abs().max() == 0
    assert lse[0, 0] == float("-inf")
    torch.testing.assert_close(out[1], v[0])


def test_everything_selected_is_causal_attention() -> None:
    q, k, v = (torch.randn(1, 40, 2, 8, dtype=torch.float64) for _ in range(3))
    one, zero = torch.ones(1, 40, 2), torch.zeros(1, 40, 2)
    found = ref.nsa_reference(
        q, k, v, zero, one, zero, cmp_block_size=4, cmp_stride=4, sel_block_size=4, top_n=10
    )
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True
    ).transpose(1, 2)
    torch.testing.assert_close(found.out, expected)
    wide = ref.nsa_reference(q, k, v, zero, zero, one, window_size=40)
    torch.testing.assert_close(wide.out, expected)


def test_packed_is_one_sequence_after_another() -> None:
    q, k, v = (torch.randn(1, 70, 2, 8, dtype=torch.float64) for _ in range(3))
    gates = [torch.rand(1, 70, 2, dtype=torch.float64) for _ in range(3)]
    small = {"cmp_block_size": 8, "cmp_stride": 4, "sel_block_size": 8, "top_n": 4}
    packed = ref.nsa_reference(
        q, k, v, *gates, cu_seqlens=torch.tensor([0, 3, 3, 40, 70]), window_size=9, **small
    )
    for lo, hi in ((0, 3), (3, 40), (40, 70)):
        part = ref.nsa_reference(*(x[:, lo:hi] for x in (q, k, v, *gates)), window_size=9, **small)
        torch.testing.assert_close(packed.out[:, lo:hi], part.out)
        assert torch.equal(packed.block_indices[:, lo:hi], part.block_indices)
