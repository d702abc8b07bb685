"""Examples for other frameworks: verl's attention hook, Transformers' Trainer under FSDP2."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sparsek_backend.transformers_op import configure
from tests.distributed import cases
from tests.distributed.group import Ranks

pytest.importorskip("transformers")


@pytest.mark.parametrize("world", [1, 4])
def test_verl_hook_on_a_packed_stream(ranks: Ranks, world: int) -> None:
    """Logits and gradients are those of one rank with ``attn_implementation="sparsek"``."""
    torch.manual_seed(2)
    positions = torch.cat([torch.arange(count) for count in (5, 37, 18, 4)])[None]
    whole = {"tokens": torch.randint(64, (1, 64)), "positions": positions}
    whole["dout"] = torch.randn(1, 64, 64)
    arrays = {name: x.numpy() for name, x in whole.items()}
    shares = ranks.run(world, cases.attend_as_verl_does, arrays)
    model = cases.tiny_llama("sparsek")
    configure(model, mode="sink_window", num_sink=3, window_size=9, dense_below=0, dense_last=0)
    logits = model(input_ids=whole["tokens"], position_ids=positions, use_cache=False).logits
    logits.backward(whole["dout"])
    found = torch.cat([torch.from_numpy(x.pop("logits")) for x in shares], dim=1)
    torch.testing.assert_close(found, logits.detach(), atol=1e-5, rtol=1e-4)
    for name, parameter in model.named_parameters():
        have = sum(torch.from_numpy(x[name]) for x in shares)
        torch.testing.assert_close(have, parameter.grad, atol=1e-5, rtol=1e-4, msg=name)


def test_verl_hook_refuses_what_it_cannot_serve() -> None:
    hook = cases.SinkWindowAttention(3, 9, lambda: None)
    q, positions = torch.zeros(1, 4, 2, 8), torch.arange(4)[None]
    with pytest.raises(NotImplementedError, match="position_ids: expected one packed stream"):
        hook(q, q, q, torch.ones(1, 4), 4, position_ids=positions)
    with pytest.raises(NotImplementedError, match="softcap, is_causal: expected causal"):
        hook(q, q, q, None, 4, position_ids=positions, is_causal=False)


def test_transformers_trainer_under_fsdp2(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed; the Trainer needs it")
    from transformers import AutoModelForCausalLM

    options = ["--cpu", "--tokens", "64", "--window-size", "16", "--learning-rate", "0.01"]
    pair = Ranks(2)
    try:
        arguments = [str(tmp_path), "--steps", "3", "--save-every", "2", *options]
        (losses, _) = pair.run(2, cases.train_transformers, arguments)
    finally:
        pair.close()
    assert losses[-1] < losses[0]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="sparsek")
    assert model.config.sparsek["mode"] == "sink_window"
