"""A Transformers model that learns patterns, in a loop of one's own and in the Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="Transformers is not installed (the eval extra)")

from sparsek_backend.patterns import attend_patterns, learned_patterns
from sparsek_backend.patterns.training import PatternCallback, PatternScheduler, SparsitySchedule
from tests.transformers_op import tiny


def test_a_model_is_pruned_while_it_trains() -> None:
    model, ids = tiny.make_model(), tiny.tokens(2, 80)
    dense = model(ids, labels=ids).loss.item()
    patterns = learned_patterns(model, 80, 16)
    scheduler = PatternScheduler(patterns.values(), SparsitySchedule(0.4, begin=1, end=3, every=1))
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    losses = []
    with attend_patterns(model, patterns):
        for _ in range(4):
            loss = model(ids, labels=ids, use_cache=False).loss
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            scheduler.step(loss)
            losses.append(loss.item())
        assert losses[0] == pytest.approx(dense, rel=1e-5), "all visible blocks at first"
        assert [round(p.sparsity, 1) for p in patterns.values()] == [0.4, 0.4]
        added = int(patterns[0].tracker.added)
        model.eval()
        pruned = model(ids, labels=ids, use_cache=False).loss.item()
        assert int(patterns[0].tracker.added) == added, "nothing is counted in evaluation"
    static = {layer: learned.pattern for layer, learned in patterns.items()}
    with attend_patterns(model, static):
        assert model(ids, labels=ids, use_cache=False).loss.item() == pytest.approx(pruned)
    assert model(ids, labels=ids, use_cache=False).loss.item() != pytest.approx(pruned, rel=1e-6)


def test_a_model_trains_under_autocast() -> None:
    model, ids = tiny.make_model().train(), tiny.tokens(1, 48)
    patterns = learned_patterns(model, 48, 16)
    losses = []
    with torch.autocast("cpu", torch.bfloat16):
        losses.append(model(ids, labels=ids, use_cache=False).loss)
        with attend_patterns(model, patterns):
            losses.append(model(ids, labels=ids, use_cache=False).loss)
    losses[1].backward()
    assert losses[1].item() == pytest.approx(losses[0].item(), abs=0.02)
    assert model.model.layers[0].self_attn.q_proj.weight.grad.isfinite().all()


def test_the_trainer_steps_the_scheduler(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed; the Trainer needs it")
    from transformers import Trainer, TrainingArguments

    model = tiny.make_model()
    patterns = learned_patterns(model, 48, 16, heads="query")
    scheduler = PatternScheduler(patterns.values(), SparsitySchedule(0.2, begin=1, end=2, every=1))
    data = [{"input_ids": row, "labels": row} for row in tiny.tokens(8, 48)]
    arguments = TrainingArguments(
        tmp_path, max_steps=3, per_device_train_batch_size=1, gradient_accumulation_steps=2,
        logging_steps=1, report_to=[], use_cpu=not torch.cuda.is_available(), save_strategy="no",
        disable_tqdm=True,
    )  # fmt: skip
    callback = PatternCallback(scheduler)
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[callback])
    with attend_patterns(model, patterns):
        trainer.train()
    assert scheduler.steps == 3
    assert all(p.sparsity == pytest.approx(1 / 6) for p in patterns.values())


def test_patterns_follow_a_model_that_the_trainer_moved() -> None:
    model = tiny.make_model()
    patterns = learned_patterns(model, 48, 16)
    scheduler = PatternScheduler(patterns.values(), SparsitySchedule(0.3))
    PatternCallback(scheduler).on_train_begin(None, None, None, model=model.to("meta"))
    assert {x.keep.device.type for x in patterns.values()} == {"meta"}
    assert {x.tracker.history.device.type for x in patterns.values()} == {"meta"}


def test_the_callback_takes_the_mean_loss_of_a_step() -> None:
    model = tiny.make_model().train()
    patterns = learned_patterns(model, 48, 16)
    scheduler = PatternScheduler(patterns.values(), SparsitySchedule(0.3, begin=1, end=1, every=9))
    seen: list[Any] = []
    step = scheduler.step
    scheduler.step = lambda loss=None: seen.append(loss) or step(loss)  # type: ignore[method-assign,func-returns-value]
    callback, logs = PatternCallback(scheduler), {"loss": 1.0}
    callback.on_train_begin(None, None, None, model=model)  # a training that is interrupted
    with attend_patterns(model, patterns):
        x = tiny.tokens(1, 48)
        model(x, labels=(x + 7) % 48, use_cache=False)
        callback.on_train_begin(None, None, None, model=model)
        losses = [model(x, labels=x, use_cache=False).loss for x in tiny.tokens(2, 48)[:, None]]
    callback.on_step_end(None, None, None)
    callback.on_log(None, None, None, logs=logs)
    callback.on_train_end(None, None, None)
    assert seen[0] == pytest.approx(sum(x.item() for x in losses) / 2)
    assert logs == {"loss": 1.0, "pattern_sparsity": 0.3, "pattern_reverts": 0}
    assert not model._forward_hooks
