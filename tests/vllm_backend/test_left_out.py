"""With ``min_mass``, what is reported is what was attended: steps are told once they ran."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from sparsek_kernels.paged.reference import gather_sequence, visible_reference
from tests.vllm_backend.layers import (
    DIM,
    SETTINGS,
    building,
    keys_and_values,
    make_builder,
    make_cache,
    make_config,
    make_layer,
    make_step,
    run,
)

pytestmark = pytest.mark.usefixtures("registered")
LEAST = {**SETTINGS, "top_k": 5, "decode_top_k": 5, "min_mass": 0.1, "dense_last": 20}


@pytest.fixture
def current(registered: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("llama")
    with building(make_config(folder, additional_config={"sparsek": LEAST})) as config:
        yield config


def seen(metadata: Any, q: torch.Tensor, cache: torch.Tensor, policy: Any) -> float:
    """Keys that the oracle sees in a step, mean over KV heads."""
    keys, _ = keys_and_values(cache)
    found, token, batch = 0.0, 0, metadata.batch
    lengths = zip(batch.seq_lens_host, batch.query_lens, strict=True)
    for request, (length, new) in enumerate(lengths):
        rule = policy.per_token() if request < batch.num_decodes else policy
        positions = list(range(length - new, length))
        k = gather_sequence(keys, batch.block_table[request], length)
        visible = visible_reference(q[token : token + new], k, positions, rule, DIM**-0.5)
        for row in range(max(new - rule.dense_last, 0), new):
            visible[row] = torch.arange(length) <= positions[row]
        found += visible.double().sum(-1).mean(1).sum().item()
        token += new
    return found


def test_steps_join_the_totals_as_they_were_attended(
    current: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sparsek_backend.vllm_backend.metrics import EngineMetrics
    from sparsek_backend.vllm_backend.stats import STATS

    told: list[tuple[float, float]] = []
    monkeypatch.setattr(EngineMetrics, "record_step", lambda self, *counts: told.append(counts[:2]))
    layer = make_layer()
    builder, spec = make_builder(layer, current)
    cache = make_cache(spec, 64)
    policy = layer.impl.policy
    assert policy.leaves_out
    STATS.finish()
    before = STATS.attended_tokens, STATS.context_tokens
    attended, most, context = [], 0.0, 0.0
    for lengths, new in (
        ([399, 320], [399, 320]),
        ([400, 321, 340], [1, 1, 340]),
        ([401, 322], [1, 1]),
    ):
        metadata, q, *_ = run(layer, builder, cache, make_step(lengths, new, 64), seed=1)
        attended.append(seen(metadata, q, cache, policy))
        most += metadata.attended_tokens
        context += metadata.context_tokens
    assert [counts for counts, _ in told] == [0.0, *attended[:2]]
    assert STATS.attended_tokens - before[0] == sum(attended[:2])
    STATS.finish()
    assert STATS.attended_tokens - before[0] == sum(attended) < most
    assert STATS.context_tokens - before[1] == context
    STATS.finish()
    assert STATS.attended_tokens - before[0] == sum(attended)


def test_made_up_prefills_are_not_counted(current: Any) -> None:
    from sparsek_backend.vllm_backend.left_out import LEFT_OUT
    from sparsek_backend.vllm_backend.sparsek.warmup import made_up_prefill

    layer = make_layer()
    _, spec = make_builder(layer, current)
    before = LEFT_OUT.total()
    cache = make_cache(spec, 1).zero_()
    layer.impl.dummy_run(layer, cache, made_up_prefill(900, 300, 1, 40, cache.device))
    assert torch.equal(LEFT_OUT.total(), before)


class Event:
    """A copy that is there when the test says so."""

    there = False

    def record(self) -> None:
        """As of the current stream."""

    def query(self) -> bool:
        return Event.there

    def synchronize(self) -> None:
        Event.there = True


def test_a_gpu_is_asked_once_in_a_while_and_never_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from sparsek_backend.vllm_backend.left_out import COPY_INTERVAL, LeftOut

    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(LeftOut, "_on_gpu", True)
    monkeypatch.setattr(Event, "there", False)
    counts = LeftOut()
    counter = counts.counter(torch.device("cpu"), 4)
    assert counts.counter(torch.device("cpu"), 4) is counter

    def step() -> tuple[float, float]:
        """Two groups of layers build, then both run: ten keys left out by the mean head."""
        found = [counts.settle(builder, 50.0, 100.0) for builder in (1, 2)]
        counter[1] += torch.tensor([40, 400])
        assert found[1] == (0.0, 0.0)
        return found[0]

    assert step() == (0.0, 0.0)
    assert step() == (0.0, 0.0)  # the first step's counts are on their way
    assert step() == (0.0, 0.0)
    Event.there = True
    assert step() == (90.0, 200.0)
    assert step() == (0.0, 0.0)  # too early for another copy
    clock[0] += COPY_INTERVAL
    assert step() == (4 * 90.0, 4 * 200.0)
    Event.there = False
    assert counts.finish() == (90.0, 200.0)
    assert counts.finish() == (0.0, 0.0)
    assert counts.total().tolist() == [[0.0, 0.0], [60.0, 600.0]]
