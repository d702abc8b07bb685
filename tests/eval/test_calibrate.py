"""Curves of missed mass, budgets shared out by them, and the command that writes both down."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sparsek_backend.layer_budgets import load_budgets, mean_of
from typer.testing import CliRunner

from sparsek_backend.eval.allocation import (
    MOST,
    falling_convex,
    levels_of,
    missed_of,
    share_out,
    step_of,
)
from sparsek_backend.eval.curves import Curves, missed_masses, sampled_positions
from sparsek_backend.eval.prompt_file import PromptSet, save_prompts
from sparsek_backend.eval.tasks import make_prompts
from sparsek_kernels.paged.policy import SelectionPolicy
from sparsek_kernels.paged.reference import visible_reference
from tests.eval.readers import WordTokenizer

LEVELS = (4, 8, 16, 24, 64)
POLICY = SelectionPolicy(num_sink=16, window_size=32, top_k=1, sel_block_size=16, query_tile=16)


def test_levels_begin_at_a_step_and_hold_the_mean() -> None:
    assert levels_of(32) == [8, 16, 24, 32, 48, 64, 96, 128]
    assert (step_of(30), step_of(13), step_of(1)) == (6, 1, 1)
    assert all(mean in levels_of(mean) for mean in range(1, 70))


def test_curves_are_bounded_from_below_by_a_convex_one() -> None:
    found = falling_convex([5.0, 5.0, 2.0, 3.0, 0.0])
    assert found == pytest.approx([5.0, 3.5, 2.0, 1.0, 0.0])


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_the_mean_stays_and_nothing_better_is_left(data: st.DataObject) -> None:
    layers, heads = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    drop = st.lists(st.floats(0.0, 1.0), min_size=len(LEVELS), max_size=len(LEVELS))
    missed = {
        (layer, head): [sum(row[i:]) for i in range(len(LEVELS))]
        for layer in range(layers)
        for head in range(heads)
        for row in [data.draw(drop)]
    }
    curves = Curves(LEVELS, missed)
    by = data.draw(st.sampled_from(["head", "layer"]))
    found = share_out(curves, 16, by=by)
    assert mean_of(found) == 16
    numbers = np.array([found[layer] for layer in range(layers)])
    assert (numbers % step_of(16) == 0).all()
    assert numbers.min() >= 4
    assert numbers.max() <= MOST * 16
    assert by == "head" or (numbers == numbers[:, :1]).all()
    again = share_out(curves, 16, by=by)
    assert again == found


def test_the_heads_that_miss_get_the_budget() -> None:
    flat, steep = [0.1] * 5, [0.8, 0.6, 0.4, 0.3, 0.0]
    curves = Curves(LEVELS, {(0, 0): flat, (0, 1): steep, (1, 0): flat, (1, 1): flat})
    assert share_out(curves, 16) == {0: [4, 52], 1: [4, 4]}
    equal = {0: [16, 16], 1: [16, 16]}
    assert missed_of(curves, share_out(curves, 16)) < missed_of(curves, equal)
    assert share_out(curves, 16, by="layer") == {0: [28, 28], 1: [4, 4]}
    with pytest.raises(ValueError, match="levels from 8 to at least 32"):
        share_out(Curves((16, 32), {(0, 0): [1.0, 0.0]}), 32)


def test_missed_masses_are_what_no_selection_sees() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 200, heads, 32, generator=generator) for heads in (4, 2, 2))
    policies = [replace(POLICY, top_k=top_k) for top_k in (2, 4, 20)]
    policies.append(replace(POLICY, top_k=4, min_mass=0.12))  # leaves places empty
    found = missed_masses(q, k, v, policies, 0.2)
    assert (found[:, 2] == 0.0).all()
    assert (found[:, 0] > found[:, 1]).all()
    assert (found[:, 3] > found[:, 1]).all()
    tiles, tokens = sampled_positions(200, policies[0])
    for number in (0, 1, 3):
        policy = policies[number]
        missed = torch.zeros(2, 2, dtype=torch.float64)
        rows = [base + row for base in tiles for row in torch.linspace(0, 15, 8).long().tolist()]
        whole = [base + row for base in tiles for row in range(16)]
        for phase, (rule, positions, wanted) in enumerate(
            ((policy, whole, rows), (policy.per_token(), tokens, tokens))
        ):
            visible = visible_reference(q[0, positions], k[0], positions, rule, 0.2)
            for position in wanted:
                heads = q[0, position].double().unflatten(0, (2, 2))
                logits = torch.einsum("hgd,nhd->hgn", heads, k[0, : position + 1].double()) * 0.2
                seen = visible[positions.index(position), :, : position + 1]
                shares = (logits.softmax(-1) * ~seen[:, None]).sum(-1).mean(-1)
                missed[phase] += shares / len(wanted)
        torch.testing.assert_close(found[:, number].double(), missed.mean(0), atol=2e-3, rtol=0)


def test_short_prompts_are_refused() -> None:
    with pytest.raises(ValueError, match="raise --length"):
        sampled_positions(64, POLICY)


def test_the_command_writes_budgets_of_the_same_mean(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    from sparsek_backend.eval.calibrate import app

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=4000,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    prompts = make_prompts(
        WordTokenizer(), tasks=["records"], variants=["plain"], lengths=[1100], count=1, seed=0
    )
    ids = PromptSet(list(prompts), [])
    save_prompts(tmp_path / "prompts.json", ids)
    command = [str(tmp_path / "model"), "--prompts", str(tmp_path / "prompts.json")]
    command += ["--budget", "block_topk:4,window_size=64", "--length", "1100"]
    for name in ("a.json", "b.json"):
        done = CliRunner().invoke(app, [*command, "--out", str(tmp_path / name)])
        assert done.exit_code == 0, done.output
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    found = load_budgets(tmp_path / "a.json")
    assert (found.mean, found.num_hidden_layers, found.num_key_value_heads) == (4, 3, 2)
    assert set(found.top_k) == {0, 1, 2}
    assert found.made_by["missed"] <= found.made_by["missed_equal"]
    done = CliRunner().invoke(app, [*command, "--length", "1000"])
    assert done.exit_code == 2
    assert "expected variant plain of" in " ".join(done.output.split())
