"""A model under context parallelism and FSDP2, and gradients summed by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sparsek_backend.distributed import SequenceLayout
from tests.distributed import cases
from tests.distributed.group import Ranks


def test_steps_of_cp_and_fsdp_are_those_of_one_rank(ranks: Ranks) -> None:
    torch.manual_seed(1)
    layout = SequenceLayout(52, 2, "zigzag", (0, 9, 52))
    tokens = torch.randint(64, (2, 53))
    found = ranks.run(4, cases.train, layout, tokens.numpy(), 3)
    model = cases.new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        for stream in tokens[:, None]:
            for rows in (slice(0, 9), slice(9, 52)):
                losses = cases.token_losses(model, stream[:, :-1][:, rows], stream[:, 1:][:, rows])
                (losses / 104).backward()
        optimizer.step()
    for weights in found:
        for name, x in model.state_dict().items():
            torch.testing.assert_close(torch.from_numpy(weights[name]), x, atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_are_summed_once(ranks: Ranks, dtype: str) -> None:
    for found in ranks.run(4, cases.summed_gradients, dtype):
        assert np.array_equal(found, [10, 10, 10])


def test_gradients_that_a_rank_lacks(ranks: Ranks) -> None:
    for done, what in ranks.outcomes(2, cases.uneven_gradients):
        assert not done
        assert what[1].startswith("parameters: expected the same on all ranks")
