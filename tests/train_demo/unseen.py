"""Fewer unseen sequences, for tests of something else than how well a model has learned."""

from __future__ import annotations

import pytest

from sparsek_backend.train_demo import train
from sparsek_backend.train_demo.task import Batch, make_batch


def judge_by_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let models of this process be judged by at most 64 sequences, instead of 16384 tokens."""

    def few(count: int, length: int, seed: int, step: int) -> Batch:
        return make_batch(min(count, 64) if step == train.UNSEEN else count, length, seed, step)

    monkeypatch.setattr(train, "make_batch", few)
