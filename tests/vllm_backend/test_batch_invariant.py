"""Layers under ``VLLM_BATCH_INVARIANT``: one kernel serves every row, and nothing else may."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from sparsek_backend.vllm_backend import compat
from sparsek_backend.vllm_backend.engine import engine_of
from sparsek_backend.vllm_backend.report import EAGER_NORMS
from sparsek_backend.vllm_backend.sparsek import impl as impl_module
from sparsek_backend.vllm_backend.sparsek import metadata as metadata_module
from sparsek_kernels.paged.attend import launch
from sparsek_kernels.paged.attend.reference import Select
from sparsek_kernels.paged.chosen import Chosen
from sparsek_kernels.paged.operands import PagedOperands
from sparsek_kernels.paged.plan import Segment
from sparsek_kernels.paged.policy import SelectionPolicy
from sparsek_kernels.paged.reference import paged_attention_reference
from tests.kernels.launched import select_launched
from tests.kernels.paged.records_oracle import checked_lists
from tests.vllm_backend import layers
from tests.vllm_backend.layers import (
    SETTINGS,
    building,
    keys_and_values,
    make_builder,
    make_cache,
    make_config,
    make_layer,
    make_step,
    run,
    write,
)

pytestmark = pytest.mark.usefixtures("registered")


@pytest.fixture
def current(registered: None, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An engine whose variable is set after its start, which a CPU refuses."""
    settings = {name: value for name, value in SETTINGS.items() if name != "query_tile"}
    with building(make_config(tmp_path, additional_config={"sparsek": settings})) as config:
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
        yield config


@dataclass(frozen=True)
class Call:
    """What a layer asks of the paged kernels.

    Args:
        segment: of the step.
        rows: of its queries.
        chosen: by the kernels.
    """

    segment: Segment
    rows: int
    chosen: Chosen | None

    def select(self) -> Select:
        """What takes the kernels' lists, once they are checked, in place of the oracle's."""
        assert self.chosen is not None
        return checked_lists(self.chosen.indices, 0.02)  # logits of vectors are in 16 bits


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """What layers ask of the paged kernels, which run in Triton's interpreter."""
    seen = []

    def attend_segment(operands: PagedOperands, segment: Segment, index: Any) -> None:
        chosen = None if index is None else select_launched(operands, segment, index)
        seen.append(Call(segment, operands.q.shape[0], chosen))
        launch.attend_segment(operands, segment, chosen)

    monkeypatch.setattr(impl_module, "attend_segment", attend_segment)
    return seen


def test_one_call_serves_decodes_and_prefills(
    current: Any, calls: list[Call], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "flash_attention", lambda *_: (lambda **_: None, 3))
    monkeypatch.setattr(torch, "get_default_dtype", lambda: torch.bfloat16)
    layer = make_layer()
    assert layer.impl.flash is None
    builder, spec = make_builder(layer, current)
    cache = make_cache(spec, 32)
    policy = layer.impl.policy
    assert policy.selects_blocks
    assert policy.prefill == policy.decode
    write(layer, cache, make_step([199, 160], [199, 160], 32), seed=1)
    step = make_step([200, 170], [1, 10], 32)
    metadata, q, _, _, output = run(layer, builder, cache, step)
    (call,) = calls
    segment, rows = call.segment, call.rows
    assert segment.fixed_order
    assert (segment.policy, rows) == (policy.decode, 11)
    expected = paged_attention_reference(
        q, *keys_and_values(cache), metadata.batch, policy, select=call.select()
    )
    torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=1e-5)
    positions = [199, *range(160, 170)]
    attended = sum(policy.decode.attended_tokens(position) for position in positions)
    assert sum(metadata.attended) == attended


def test_prompts_by_records_are_decoded_token_by_token(
    tmp_path: Any, calls: list[Call], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "PAGE", 64)
    settings = {"decode_tokens": 32, "num_sink": 16, "window_size": 32, "dense_below": 0}
    with building(make_config(tmp_path, additional_config={"sparsek": settings})) as config:
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
        layer = make_layer()
        builder, spec = make_builder(layer, config)
        cache = make_cache(spec, 32)
        with monkeypatch.context() as patch:
            patch.setattr(impl_module, "attend_segment", lambda *_: None)
            run(layer, builder, cache, make_step([399, 380], [399, 380], 32), seed=1)
        metadata, q, _, _, output = run(layer, builder, cache, make_step([400, 385], [1, 5], 32))
    policy = layer.impl.policy.decode
    (call,) = calls
    segment, rows = call.segment, call.rows
    assert segment.fixed_order
    assert (segment.policy, rows) == (policy, 6)
    expected = paged_attention_reference(
        q, *keys_and_values(cache), metadata.batch, policy, select=call.select()
    )
    torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=1e-5)
    positions = [399, *range(380, 385)]
    attended = sum(policy.attended_tokens(position) for position in positions)
    assert sum(metadata.attended) == attended < sum(metadata.context)


def test_a_models_window_is_cut_per_token(current: Any, calls: list[Call]) -> None:
    layer = make_layer(per_layer_sliding_window=48)
    builder, spec = make_builder(layer, current)
    cache = make_cache(spec, 32)
    write(layer, cache, make_step([199, 160], [199, 160], 32), seed=1)
    run(layer, builder, cache, make_step([200, 170], [1, 10], 32))
    (call,) = calls
    segment, rows = call.segment, call.rows
    assert segment.policy == SelectionPolicy(window_size=48)
    assert (segment.batch.num_decodes, segment.batch.decode_query_len, rows) == (11, 1, 11)


def test_speculated_tokens_are_prefills_and_graphs_hold_single_tokens(
    current: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.attention.backend import AttentionCGSupport

    layer = make_layer()
    builder, _ = make_builder(layer, current)
    asked = []
    monkeypatch.setattr(
        type(builder),
        "_init_reorder_batch_threshold",
        lambda self, *args, **kwargs: asked.append(kwargs["supports_spec_as_decode"]),
    )
    support = type(builder).get_cudagraph_support
    make_builder(layer, current)
    assert support(current, None) == AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    engine = engine_of(current)
    monkeypatch.setattr(engine, "resolved", replace(engine.resolved, batch_invariant=False))
    make_builder(layer, current)
    assert support(current, None) == AttentionCGSupport.UNIFORM_BATCH
    assert asked == [False, True]


def test_the_server_says_so(current: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(metadata_module.logger, "info_once", lines.append)
    make_builder(make_layer(), current)
    (line,) = lines
    assert line.endswith("CPU path, batch-invariant, selection per query")
    assert "tokens of a prompt dense" not in line


@pytest.mark.parametrize("eager", [True, False])
def test_eager_norms_are_warned_of(
    current: Any, monkeypatch: pytest.MonkeyPatch, eager: bool
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(metadata_module.logger, "warning_once", lines.append)
    monkeypatch.setattr(current.model_config, "enforce_eager", eager)
    make_builder(make_layer(), current)
    assert lines == [EAGER_NORMS] * eager


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"alibi_slopes": [0.5] * 4}, "ALiBi"), ({"logits_soft_cap": 30.0}, "logits soft cap")],
    ids=["alibi", "soft-cap"],
)
def test_layers_that_need_sdpa_are_refused(
    current: Any, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(NotImplementedError, match=f"{reason}.*unset VLLM_BATCH_INVARIANT"):
        make_layer(**options)
