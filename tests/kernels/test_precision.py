"""The softmax that the torch paths share."""

from __future__ import annotations

import pytest
import torch

from sparsek_kernels.common.precision import softmax_


@pytest.mark.parametrize("size", [0.0, 1e4, -1e6, 1e9, -1e9])
def test_weights_add_up_to_one(size: float) -> None:
    scores = torch.randn(3, 5, 40) + size
    scores[0, 0] = float("-inf")
    weights, lse = softmax_(scores.clone())
    assert (weights.sum(-1).flatten()[1:] - 1.0).abs().max() < 1e-6
    assert (weights[0, 0] == 0).all()
    assert lse[0, 0].isneginf().all()
    torch.testing.assert_close(lse[..., 0], scores.logsumexp(-1))


def test_a_log_sum_exp_that_is_given_is_used() -> None:
    scores = torch.randn(3, 5, 40)
    whole = scores.logsumexp(-1, keepdim=True)
    parts = [softmax_(scores[..., part].clone(), whole)[0] for part in (slice(9), slice(9, 40))]
    torch.testing.assert_close(torch.cat(parts, -1), scores.softmax(-1))
