"""Examples for other frameworks: verl's attention hook, Transformers' Trainer, torchtitan."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from packaging.version import Version

from sparsek_backend.nn import NSALlamaForCausalLM
from sparsek_backend.transformers_op import configure
from tests import processes
from tests.distributed import training_cases
from tests.distributed.group import Ranks


def test_verl_hook_on_a_packed_stream(ranks: Ranks) -> None:
    """Logits and gradients are those of one rank with ``attn_implementation="sparsek"``."""
    torch.manual_seed(2)
    positions = torch.cat([torch.arange(count) for count in (5, 37, 18, 4)])[None]
    whole = {"tokens": torch.randint(64, (1, 64)), "positions": positions}
    whole["dout"] = torch.randn(1, 64, 64)
    arrays = {name: x.numpy() for name, x in whole.items()}
    model = training_cases.tiny_llama("sparsek")
    configure(model, mode="sink_window", num_sink=3, window_size=9, dense_below=0)
    logits = model(input_ids=whole["tokens"], position_ids=positions, use_cache=False).logits
    logits.backward(whole["dout"])
    pair = ranks.run(2, training_cases.attend_as_verl_does, arrays)
    for shares in (pair, [training_cases.attend_as_verl_does(None, arrays)]):
        found = torch.cat([torch.from_numpy(x.pop("logits")) for x in shares], dim=1)
        torch.testing.assert_close(found, logits.detach(), atol=1e-5, rtol=1e-4)
        for name, parameter in model.named_parameters():
            have = sum(torch.from_numpy(x[name]) for x in shares)
            torch.testing.assert_close(have, parameter.grad, atol=1e-5, rtol=1e-4, msg=name)


def test_verl_hook_refuses_what_it_cannot_serve() -> None:
    hook = training_cases.SinkWindowAttention(3, 9, lambda: None)
    q, positions = torch.zeros(1, 4, 2, 8), torch.arange(4)[None]
    with pytest.raises(NotImplementedError, match="position_ids: expected one packed stream"):
        hook(q, q, q, torch.ones(1, 4), 4, position_ids=positions)
    with pytest.raises(NotImplementedError, match="softcap, is_causal: expected causal"):
        hook(q, q, q, None, 4, position_ids=positions, is_causal=False)


def test_transformers_trainer_on_two_ranks(tmp_path: Path) -> None:
    """The example; on CPUs Accelerate has no FSDP, which the tests on GPUs run."""
    pytest.importorskip("accelerate", reason="accelerate is not installed; the Trainer needs it")
    from transformers import AutoModelForCausalLM

    options = ["--cpu", "--tokens", "64", "--window-size", "16", "--steps", "3"]
    pair = Ranks(2)
    try:
        found = pair.run(2, training_cases.train_transformers, [str(tmp_path), *options])
    finally:
        pair.close()
    assert [(len(losses), calls) for losses, calls in found] == [(3, 2 * 3)] * 2
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="sparsek")
    assert model.config.sparsek["mode"] == "sink_window"


def test_transformers_model_saved_under_fsdp2(tmp_path: Path) -> None:
    """Trained and saved by two ranks, it is the model that one rank trains."""
    folders = [str(tmp_path / name) for name in ("start", "shared", "alone")]
    training_cases.new_model().save_pretrained(folders[0])
    pair = Ranks(2)
    try:
        pair.run(2, training_cases.train_and_save, *folders[:2], "transformers")
    finally:
        pair.close()
    training_cases.train_and_save(None, folders[0], folders[2], "transformers")
    shared, alone = (NSALlamaForCausalLM.from_pretrained(x).state_dict() for x in folders[1:])
    for name, x in alone.items():
        torch.testing.assert_close(shared[name], x, atol=1e-5, rtol=1e-4, msg=name)


def test_torchtitan_on_two_ranks(tmp_path: Path) -> None:
    """Its own trainer: ranks that share tokens or heads do what one rank does."""
    pytest.importorskip("torchtitan", reason="torchtitan is not installed (the torchtitan extra)")
    new = Version(version("torchtitan")) >= Version("0.3")
    if new and Version(torch.__version__) < Version("2.14"):
        pytest.skip("torchtitan 0.3 calls torch.distributed.set_timeout, of torch 2.14")
    root = Path(__file__).parents[2]
    run = processes.run(sys.executable, "-m", "tests.distributed.titan", tmp_path, cwd=root)
    assert run.returncode == 0, run.stderr
    losses = json.loads(run.stdout.splitlines()[-1])
    assert len(losses["alone"]) == 3
    alone = NSALlamaForCausalLM.from_pretrained(tmp_path / "alone" / "model").state_dict()
    for name in ("context", "tensor"):
        assert losses[name] == pytest.approx(losses["alone"], rel=1e-5), name
        shared = NSALlamaForCausalLM.from_pretrained(tmp_path / name / "model").state_dict()
        for part, x in alone.items():
            torch.testing.assert_close(shared[part], x, atol=1e-3, rtol=1e-3, msg=part)
