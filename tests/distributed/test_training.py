"""A model under context parallelism, FSDP2 and tensor parallelism; gradients summed by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from sparsek_backend.distributed import SequenceLayout
from sparsek_backend.nn import NSALlamaForCausalLM
from tests.distributed import cases
from tests.distributed.group import Ranks


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("how", ["fsdp", "tp"])
def test_steps_of_four_ranks_are_those_of_one(
    ranks: Ranks, how: str, tied: bool, tmp_path: Path
) -> None:
    torch.manual_seed(1)
    layout = SequenceLayout(52, 2, "zigzag", (0, 9, 52))
    tokens = torch.randint(64, (2, 53))
    ranks.run(4, cases.train, how, tied, layout, tokens.numpy(), str(tmp_path))
    model = cases.new_model(tied=tied)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        for stream in tokens[:, None]:
            for rows in (slice(0, 9), slice(9, 52)):
                losses = cases.token_losses(model, stream[:, :-1][:, rows], stream[:, 1:][:, rows])
                (losses / 104).backward()
        optimizer.step()
    found = NSALlamaForCausalLM.from_pretrained(tmp_path).state_dict()
    for name, x in model.state_dict().items():
        torch.testing.assert_close(found[name], x, atol=1e-4, rtol=1e-4, msg=name)


def test_tensor_parallel_gradients(ranks: Ranks) -> None:
    torch.manual_seed(2)
    tokens, dout = torch.randint(64, (2, 40)), torch.randn(2, 40, 64)
    whole = {"tokens": tokens.numpy(), "dout": dout.numpy()}
    model = cases.new_model()
    logits = model(tokens)
    logits.backward(dout)
    for found in ranks.run(2, cases.head_parallel_gradients, whole):
        torch.testing.assert_close(torch.from_numpy(found.pop("logits")), logits.detach())
        for name, parameter in model.named_parameters():
            path, _, rest = name.partition(".self_attn.")
            due = parameter.grad
            if rest:
                due = model.get_submodule(f"{path}.self_attn").restacked(rest, due)
            have = torch.from_numpy(found.pop(name))
            torch.testing.assert_close(have, due, atol=1e-5, rtol=1e-4, msg=name)
        assert not found


@pytest.mark.parametrize(
    ("size", "twice", "message"),
    [
        (4, False, "device_mesh: expected a divisor of 2 KV heads"),
        (2, True, "model: expected whole weights"),
    ],
)
def test_tensor_parallel_that_cannot_be(ranks: Ranks, size: int, twice: bool, message: str) -> None:
    for done, what in ranks.outcomes(size, cases.wrong_tensor_parallel, twice):
        assert not done
        assert what[0] == "ValueError"
        assert what[1].startswith(message), what[1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_are_summed_once(ranks: Ranks, dtype: str) -> None:
    for found in ranks.run(4, cases.summed_gradients, dtype):
        assert np.array_equal(found, [10, 10, 10])


def test_gradients_that_a_rank_lacks(ranks: Ranks) -> None:
    for done, what in ranks.outcomes(2, cases.uneven_gradients):
        assert not done
        assert what[1].startswith("parameters: expected the same on all ranks")
