"""The share of exact attention that a selection catches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from sparsek_backend.eval.cli import app
from sparsek_backend.eval.mass import PHASES, block_masses, measure, measure_model, plot_masses
from sparsek_backend.patterns.prefill import PrefillPattern
from sparsek_backend.transformers_op.topk import AttentionRule, attend_selected
from sparsek_kernels.paged.index.vertical_slash import VerticalSlash
from sparsek_kernels.paged.index.vertical_slash.lists import block_lists, listed_blocks
from sparsek_kernels.paged.policy import SelectionPolicy, StepPolicy

pytest.importorskip("transformers", reason="Transformers is not installed (the eval extra)")

POLICY = SelectionPolicy(num_sink=16, window_size=32, top_k=3, sel_block_size=16, query_tile=16)
RECORDS = POLICY.by_records(64)
LENGTH, HEADS, KV_HEADS, DIM = 300, 4, 2, 32


def states(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(1, LENGTH, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    return 2 * q, k, v


def test_masses_are_the_softmax_summed_over_blocks() -> None:
    q, k, _ = states()
    rows = torch.tensor([0, 15, 16, 299])
    masses = block_masses(q[0], k[0], rows, size=16, softmax_scale=0.2)
    assert masses.shape == (4, KV_HEADS, 19)
    torch.testing.assert_close(masses.sum(-1), torch.ones(4, KV_HEADS))
    for number, row in enumerate(rows.tolist()):
        for head in range(KV_HEADS):
            group = q[0, row, 2 * head : 2 * head + 2].double()
            weights = (group @ k[0, : row + 1, head].double().T * 0.2).softmax(-1).mean(0)
            for block, part in enumerate(weights.split(16)):
                assert masses[number, head, block].item() == pytest.approx(part.sum().item())


@pytest.mark.parametrize(
    ("policy", "larger"),
    [
        (RECORDS, POLICY.by_records(96)),
        (POLICY, replace(POLICY, top_k=9)),
        (replace(POLICY, query_tile=64), replace(POLICY, query_tile=64, top_k=9)),
    ],
    ids=["records", "16", "64"],
)
def test_a_selection_catches_at_most_the_best_choice(
    policy: SelectionPolicy, larger: SelectionPolicy
) -> None:
    q, k, v = states()
    caught, best, attended, error = measure(q, k, v, policy, DIM**-0.5)
    assert (caught <= best + 1e-6).all()
    assert (caught > 0.3).all()
    first = next(i for i in range(LENGTH) if not policy.sees_all(i))
    rows = torch.linspace(first, LENGTH - 1, min(128, LENGTH - first)).long().tolist()
    shares = [policy.attended_tokens(row) / (row + 1) for row in rows]
    places = torch.tensor(sum(shares) / len(shares)).expand(KV_HEADS)
    # of a sample places may be left over: few, or one
    left = 0.03 * places if policy.alignment else policy.sel_block_size / first
    assert (attended <= places + 1e-6).all()
    assert (attended >= places - left).all()
    more, _, of_more, error_of_more = measure(q, k, v, larger, DIM**-0.5)
    assert (more > caught).all()
    assert (of_more > attended).all()
    assert (error_of_more < error).all()


@pytest.mark.parametrize("policy", [POLICY, RECORDS], ids=["tiles", "records"])
def test_the_error_is_of_what_is_attended(policy: SelectionPolicy) -> None:
    q, k, v = states()
    *_, error = measure(q, k, v, policy, DIM**-0.5)
    first = next(i for i in range(LENGTH) if not policy.sees_all(i))
    rows = torch.linspace(first, LENGTH - 1, min(128, LENGTH - first)).long()
    step = StepPolicy(policy, policy if policy.alignment else SelectionPolicy(sel_block_size=16))
    rule = AttentionRule(step, DIM**-0.5, None, as_prompts=True)
    found, exact = (attend_selected(q, k, v, x)[0, rows] for x in (rule, rule.dense()))
    parts = (x.unflatten(1, (KV_HEADS, -1)).square().sum((0, 2, 3)) for x in (found - exact, exact))
    difference, whole = parts
    torch.testing.assert_close(error, (difference / whole).sqrt(), atol=2e-3, rtol=1e-2)


def test_the_dense_end_of_a_prompt_selects_nothing() -> None:
    q, k, v = states()
    whole = measure(q, k, v, replace(POLICY, dense_last=44), DIM**-0.5)
    part = measure(q[:, :256], k[:, :256], v[:, :256], POLICY, DIM**-0.5)
    for found, of_part in zip(whole, part, strict=True):
        torch.testing.assert_close(found, of_part)
    with pytest.raises(ValueError, match="lower the budget"):
        measure(q, k, v, replace(POLICY, dense_last=LENGTH), DIM**-0.5)


def test_a_key_that_takes_all_attention_is_caught() -> None:
    q, k, v = states()
    q[:] = q[:, -1:]
    q[:, :, 1::2] = q[:, :, ::2]
    k[:, 64:80] = 3 * q[:, -1:, ::2]  # one block that every query wants
    caught, best, _, error = measure(q, k, v, RECORDS, 1.0)
    assert (error < 1e-2).all()
    torch.testing.assert_close(caught, torch.ones(KV_HEADS), atol=1e-3, rtol=0)
    torch.testing.assert_close(best, torch.ones(KV_HEADS), atol=1e-3, rtol=0)


def test_tiles_that_follow_a_list() -> None:
    q, k, v = states()
    entries = torch.tensor([[5, -4, 7, 2], [-6, 1, 3, -3]], dtype=torch.int32)
    lists = block_lists(entries, POLICY)
    caught, best, share, _ = measure(q, k, v, POLICY, DIM**-0.5, VerticalSlash(lists))
    _, same_best, drawn_share, _ = measure(q, k, v, POLICY, DIM**-0.5)
    torch.testing.assert_close(best, same_best)
    assert (share >= drawn_share).all()
    assert (caught <= best).all()
    first = next(i for i in range(LENGTH) if not POLICY.sees_all(i))
    rows = torch.linspace(first, LENGTH - 1, min(128, LENGTH - first)).long()
    masses = block_masses(q[0], k[0], rows, size=16, softmax_scale=DIM**-0.5)
    wanted = torch.zeros(len(rows), KV_HEADS)
    for i, row in enumerate(rows.tolist()):
        begin, end = POLICY.local_range(row)
        chosen = listed_blocks(lists, torch.tensor([row // 16 * 16]), POLICY)[0]
        for head in range(KV_HEADS):
            blocks = {0, *range(begin, end), *chosen[head].tolist()}
            wanted[i, head] = masses[i, head, sorted(blocks)].sum()
    torch.testing.assert_close(caught, wanted.mean(0))


def test_a_budget_that_covers_the_context_is_refused() -> None:
    with pytest.raises(ValueError, match="lower the budget"):
        measure(*states(), replace(POLICY, top_k=100), 1.0)
    for policy, knob in ((replace(POLICY, top_k=100), "top_k"), (POLICY, "decode_tokens")):
        with pytest.raises(ValueError, match=f"the budget covers by {knob}, got {LENGTH}"):
            measure(*states(), policy if knob == "top_k" else policy.by_records(2048), 1.0)


def test_a_budget_that_the_command_cannot_measure_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "pattern.safetensors"
    PrefillPattern({0: torch.zeros(KV_HEADS, 4, dtype=torch.int32)}, 64).save(file)
    for budget, reason in (
        ("block_topk:8,sparse_phase=decode", "budget: expected blocks selected in both phases"),
        (f"pattern:8,pattern={file},sel_block_size=32", "expected blocks of 32 tokens, got 64"),
    ):
        found = CliRunner().invoke(app, ["mass", str(tmp_path), "--budget", budget])
        assert (found.exit_code, reason in found.output) == (2, True), found.output


def test_every_layer_of_a_model_is_measured(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        vocab_size=99,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    rows = measure_model(
        str(tmp_path / "model"),
        [i % 99 for i in range(LENGTH)],
        lambda layer: StepPolicy(POLICY, RECORDS),
    )
    assert [(row["layer"], row["phase"], row["kv_head"]) for row in rows] == [
        (layer, phase, head) for layer in range(3) for phase in PHASES for head in range(KV_HEADS)
    ]
    assert all(0 < row["caught"] <= row["best"] + 1e-5 for row in rows)
    picture = plot_masses(tmp_path / "m.png", rows, "title")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_picture_has_the_titles_that_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sparsek_backend.eval import mass

    figures: list[Any] = []
    monkeypatch.setattr(mass, "write_figure", lambda figure, path: figures.append(figure) or path)
    rows = [
        dict(phase=p, layer=0, kv_head=head, caught=x, best=0.9, attended=0.25, error=x / 10)
        for p in PHASES
        for head, x in enumerate((0.5, 0.7))
    ]
    plot_masses(tmp_path / "m.png", rows, "title")
    assert figures[0].get_suptitle() == "title"
    prefill, decode = figures[0].axes[:2]
    assert prefill.images[0].get_array().tolist() == [[0.5 / 10, 0.7 / 10]]
    assert decode.get_title() == (
        "decode: outputs off by 6.0%, 25.0% of keys\n0.6000 of the attention, 0.9000 possible"
    )
