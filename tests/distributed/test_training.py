"""A model under context parallelism, FSDP2 and tensor parallelism; gradients summed by hand."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from sparsek_backend.distributed import SequenceLayout
from sparsek_backend.nn import NSALlamaForCausalLM
from tests.distributed import training_cases
from tests.distributed.group import Ranks


@pytest.mark.parametrize(("how", "tied"), [("fsdp", False), ("tp", False), ("tp", True)])
def test_steps_of_four_ranks_are_those_of_one(
    ranks: Ranks, how: str, tied: bool, tmp_path: Path
) -> None:
    torch.manual_seed(1)
    layout = SequenceLayout(52, 2, "zigzag", (0, 9, 52))
    tokens = torch.randint(64, (2, 53))
    ranks.run(4, training_cases.train, how, tied, layout, tokens.numpy(), str(tmp_path))
    model = training_cases.new_model(tied=tied)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        for stream in tokens[:, None]:
            for rows in (slice(0, 9), slice(9, 52)):
                losses = training_cases.token_losses(
                    model, stream[:, :-1][:, rows], stream[:, 1:][:, rows]
                )
                (losses / 104).backward()
        optimizer.step()
    found = NSALlamaForCausalLM.from_pretrained(tmp_path).state_dict()
    for name, x in model.state_dict().items():
        torch.testing.assert_close(found[name], x, atol=1e-4, rtol=1e-4, msg=name)


@pytest.mark.parametrize("context", [False, True])
def test_tensor_parallel_gradients(ranks: Ranks, context: bool) -> None:
    torch.manual_seed(2)
    tokens, dout = torch.randint(64, (2, 40)), torch.randn(2, 40, 64)
    whole = {"tokens": tokens.numpy(), "dout": dout.numpy()}
    model = training_cases.new_model()
    logits = model(tokens)
    logits.backward(dout)
    for found in ranks.run(
        4 if context else 2, training_cases.head_parallel_gradients, whole, context
    ):
        torch.testing.assert_close(torch.from_numpy(found.pop("logits")), logits.detach())
        for name, parameter in model.named_parameters():
            path, _, rest = name.partition(".self_attn.")
            due = parameter.grad
            if rest:
                due = model.get_submodule(f"{path}.self_attn").restacked(rest, due)
            have = torch.from_numpy(found.pop(name))
            torch.testing.assert_close(have, due, atol=1e-5, rtol=1e-4, msg=name)
        assert not found


def test_wrapped_layers_are_saved_under_their_names(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(4, training_cases.save_wrapped, str(tmp_path))
    saved, due = (
        NSALlamaForCausalLM.from_pretrained(tmp_path),
        training_cases.new_model().state_dict(),
    )
    torch.testing.assert_close(saved.state_dict(), due, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("size", "then", "error", "message"),
    [
        (4, "", "ValueError", "mesh: expected a divisor of num_key_value_heads=2, got 4 ranks"),
        (4, "layer", "ValueError", "device_mesh: expected a divisor of 2 KV heads"),
        (2, "neurons", "ValueError", "mesh: expected a divisor of intermediate_size=49, got 2"),
        (2, "again", "ValueError", "model: expected whole weights"),
        (2, "load", "RuntimeError", "stacked_by_head"),
    ],
)
def test_tensor_parallel_that_cannot_be(
    ranks: Ranks, size: int, then: str, error: str, message: str
) -> None:
    for done, what in ranks.outcomes(size, training_cases.wrong_tensor_parallel, then):
        assert not done
        assert what[0] == error
        assert message in what[1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_are_summed_once(ranks: Ranks, dtype: str) -> None:
    for found in ranks.run(4, training_cases.summed_gradients, dtype):
        assert np.array_equal(found, [10, 10, 10])


@pytest.mark.parametrize("lacking", [[[0, 1], [0]], [[0], [1]]], ids=["one", "each another"])
def test_gradients_that_a_rank_lacks(ranks: Ranks, lacking: list[list[int]]) -> None:
    for done, what in ranks.outcomes(2, training_cases.uneven_gradients, lacking):
        assert not done
        assert what[1].startswith("parameters: expected the same on all ranks")


def test_any_error_of_one_rank_is_one_of_all(ranks: Ranks) -> None:
    found = ranks.outcomes(2, training_cases.gradients_of_nothing)
    assert [(done, what[0]) for done, what in found] == [
        (False, "AttributeError"),
        (False, "ValueError"),
    ]
    assert found[1][1][1].endswith("has no attribute 'grad' (on rank 0 of the mesh)")


def test_gradients_are_not_summed_twice(ranks: Ranks) -> None:
    for done, what in ranks.outcomes(2, training_cases.sharded_gradients):
        assert not done
        assert what[1].startswith("parameters: expected whole ones on the ranks of"), what[1]


def test_example_goes_on_with_fewer_ranks(ranks: Ranks, tmp_path: Path) -> None:
    def arguments(folder: str, steps: int, *more: str) -> list[str]:
        small = ["--layers", "1", "--tokens", "64", "--batch", "2", "--save-every", "2"]
        small += ["--device", "cpu"]
        return [str(tmp_path / folder), "--steps", str(steps), *small, *more]

    cp, tp = ("--context-parallel", "2"), ("--tensor-parallel", "2")
    (whole, *_) = ranks.run(4, training_cases.run_example, arguments("whole", 4, *cp))
    (heads, *_) = ranks.run(4, training_cases.run_example, arguments("heads", 2, *cp, *tp))
    shutil.copytree(tmp_path / "whole" / "step-2", tmp_path / "cut" / "step-2")
    fewer = Ranks(2)
    try:
        (rest, _) = fewer.run(2, training_cases.run_example, arguments("cut", 4, *cp))
        (rest_of_heads, _) = fewer.run(2, training_cases.run_example, arguments("heads", 4, *tp))
    finally:
        fewer.close()
    assert len(whole) == 4
    assert np.allclose(rest, whole[2:], atol=1e-4)
    assert np.allclose(heads + rest_of_heads, whole, atol=1e-4)
    for folder in ("whole", "cut", "heads"):
        NSALlamaForCausalLM.from_pretrained(tmp_path / folder / "model")
