"""Layers of mode infllm as on a GPU: pages keep means in place of records, once a step."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, cast

import pytest
import torch

from sparsek_backend.vllm_backend import compat
from sparsek_backend.vllm_backend.engine import Engine
from sparsek_backend.vllm_backend.sparsek import impl as impl_module
from sparsek_backend.vllm_backend.sparsek.warmup import warm_up
from tests.vllm_backend.layers import (
    DIM,
    building,
    make_builder,
    make_cache,
    make_config,
    make_layer,
    make_step,
    run,
)
from tests.vllm_backend.tiny_models import SPARSE_CONFIG

pytestmark = pytest.mark.usefixtures("registered")


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """What layers write: ``kv`` with its summary, ``means`` with the batch."""
    found: list[tuple[str, Any]] = []
    write_kv = impl_module.write_kv

    def spied(
        key: Any, value: Any, k: Any, v: Any, summary: Any, *rest: Any, **scales: Any
    ) -> None:
        found.append(("kv", summary))
        write_kv(key, value, k, v, summary, *rest, **scales)

    monkeypatch.setattr(impl_module, "write_kv", spied)
    monkeypatch.setattr(
        impl_module,
        "write_index",
        lambda k, v, summary, batch, policy, index: found.append(("means", batch)),
    )
    return found


@pytest.fixture(params=[False, True], ids=["rotated", "use_nope"])
def current(request: Any, registered: None, tmp_path: Any) -> Iterator[Any]:
    section = {**SPARSE_CONFIG, "use_nope": request.param}
    config = make_config(
        tmp_path,
        hf_overrides={"sparse_config": section},
        additional_config={"sparsek": {"mode": "infllm", "dense_layers": [0]}},
        max_model_len=512,
    )
    with building(config):
        yield config


def test_means_are_written_with_the_step(current: Any, writes: list[tuple[str, Any]]) -> None:
    layer = make_layer(1)
    builder, spec = make_builder(layer, current)
    metadata, *_ = run(layer, builder, make_cache(spec, 64), make_step([300, 200], [1, 200], 64))
    assert [kind for kind, _ in writes] == ["kv", "means"]
    assert writes[0][1] is None
    assert writes[1][1] is metadata.batch
    wanted = current.model_config.hf_config.sparse_config["use_nope"]
    assert (metadata.batch.rotation is not None) == wanted


def test_the_owner_of_shared_pages_writes_them(current: Any, writes: list[tuple[str, Any]]) -> None:
    """One that attends everything, too; its sharer never."""
    owner = make_layer(0)
    sharer = make_layer(1, kv_sharing_target_layer_name=owner.layer_name)
    builder, spec = make_builder(owner, current)
    make_builder(sharer, current)
    assert not owner.impl.policy.selects_blocks
    cache = make_cache(spec, 64)
    metadata, q, k, v, _ = run(owner, builder, cache, make_step([300], [300], 64))
    sharer.impl.forward(sharer, q, k, v, cache, metadata, torch.empty_like(q))
    assert [kind for kind, _ in writes] == ["kv", "means"]
    assert writes[0][1] is None


def test_kernels_of_means_are_compiled_at_the_start(
    current: Any, writes: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = make_layer(1)
    builder, spec = make_builder(layer, current)
    attended = []
    monkeypatch.setattr(
        impl_module, "attend_segment", lambda _, segment, __: attended.append(segment.batch)
    )
    warm_up([layer], spec, current, torch.device("cpu"), rotation=builder.rotation)
    assert attended
    means = [batch for kind, batch in writes if kind == "means"]
    assert [b.seq_lens_host for b in means] == [b.seq_lens_host for b in attended]
    assert len(writes) == 2 * len(means)  # and the rows of each
    assert all(batch.rotation is builder.rotation for batch in attended)


def test_heads_of_another_size_stop_the_start(current: Any, request: Any) -> None:
    """As a draft model's; its first step would end the engine."""
    layer = make_layer(1, head_size=2 * DIM)
    turns_back = request.node.callspec.id == "use_nope"
    words = f"layer 1 has heads of {2 * DIM} channels, .* of heads of {DIM}; use dense_layers"
    with pytest.raises(NotImplementedError, match=words) if turns_back else nullcontext():
        make_builder(layer, current)
    make_builder(make_layer(0, head_size=2 * DIM), current)  # it attends everything


def test_the_rotation_goes_to_the_device_once() -> None:
    """In a thread of its own, whose allocations outlive a sleeping engine's KV cache."""
    threads = []

    class Rotation(torch.Tensor):
        def to(self, *args: Any, **options: Any) -> Any:
            threads.append(threading.get_ident())
            return torch.empty(self.shape, device="meta")

    meta = torch.device("meta")
    owner = Engine(cast(Any, None), torch.float32, {}, rotation=Rotation(torch.ones(3, 4)))
    moved = owner.rotation_on(meta)
    assert moved is not None
    assert moved.device == meta
    assert owner.rotation_on(meta) is moved
    assert len(threads) == 1
    assert threading.get_ident() not in threads
    assert Engine(cast(Any, None), torch.float32, {}).rotation_on(meta) is None


def test_reading_the_rotation_leaves_the_models_own_as_it_is(current: Any) -> None:
    """vLLM's module would keep it in the dtype of whatever it turned last."""
    from vllm.model_executor.layers.rotary_embedding import get_rope

    config = current.model_config.hf_text_config
    rotary = get_rope(
        DIM, max_position=config.max_position_embeddings, rope_parameters=config.rope_parameters
    )
    before = rotary.cos_sin_cache
    own = rotary.cos_sin_cache = before.bfloat16()
    try:
        turned = compat.rotation_of(current.model_config)
        assert rotary.cos_sin_cache is own
    finally:
        rotary.cos_sin_cache = before
    assert turned.dtype == torch.float32
    torch.testing.assert_close(turned, own[: len(turned)].float(), atol=0, rtol=0)


def test_the_rotation_reaches_as_far_as_contexts_do(registered: None, tmp_path: Any) -> None:
    """Scaled RoPE turns positions beyond ``max_position_embeddings`` too."""
    scaled = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    config = make_config(
        tmp_path, hf_overrides={"max_position_embeddings": 128, "rope_parameters": scaled}
    )
    with building(config):
        turned = compat.rotation_of(config.model_config)
    assert turned.shape == (config.model_config.max_model_len, DIM) == (512, DIM)
    angle = torch.tensor(511 / 4.0) * 10000.0 ** -(torch.arange(0, DIM, 2) / DIM)
    wanted = torch.cat([angle.cos(), angle.sin()])
    torch.testing.assert_close(turned[511], wanted, atol=1e-4, rtol=0)
