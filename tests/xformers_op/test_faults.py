"""The checks of this folder fail when the operators are wrong: faults are planted one by one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.xformers_op.cases import BATCHED, PACKED, check_pair, inputs

from sparsek_backend.xformers_op import native, op, plan  # isort: skip


NAMES = ("none", "causal", "sink-window", "block-sparse-heads")


def _lse_in_base_two(monkeypatch: pytest.MonkeyPatch) -> None:
    real = native.native_forward

    def faulty(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = real(*args)
        return out, lse / math.log(2.0)

    monkeypatch.setattr(op, "native_forward", faulty)


def _dk_five_percent_up(monkeypatch: pytest.MonkeyPatch) -> None:
    real = native.native_backward

    def faulty(*args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        dq, dk, dv = real(*args)
        return dq, dk * 1.05, dv

    monkeypatch.setattr(op, "native_backward", faulty)


def _window_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    real = plan.plan_of

    def faulty(bias: Any) -> plan.MaskPlan:
        found = real(bias)
        window = found.band.window_size
        if window is None:
            return found
        return replace(found, band=replace(found.band, window_size=window + 1))

    monkeypatch.setattr(op, "plan_of", faulty)


@pytest.mark.parametrize(
    ("plant", "names", "words"),
    [
        (_lse_in_base_two, (*NAMES, "diagonal-causal"), "lse|dq"),
        (_dk_five_percent_up, (*NAMES, "diagonal-causal"), "dk"),
        (
            _window_off_by_one,
            (
                "bottom-right-local",
                "left-window",
                "sink-window",
                "diagonal-local",
                "diagonal-local-bottom-right",
            ),
            "out",
        ),
    ],
    ids=["lse-base-2", "dk-5-percent", "window-off-by-one"],
)
def test_planted_fault_is_found(
    plant: Callable[[pytest.MonkeyPatch], None],
    names: tuple[str, ...],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in names:
        make, num_q, num_k = _case(name)
        q, k, v = inputs(num_q, num_k)
        check_pair(q, k, v, make(q.device))
    plant(monkeypatch)
    for name in names:
        make, num_q, num_k = _case(name)
        q, k, v = inputs(num_q, num_k)
        with pytest.raises(AssertionError, match=words):
            check_pair(q, k, v, make(q.device))


def _case(name: str) -> tuple[Any, int, int]:
    if name in BATCHED:
        return BATCHED[name]
    make, lengths_q, lengths_k = PACKED[name]
    return make, sum(lengths_q), sum(lengths_k)
