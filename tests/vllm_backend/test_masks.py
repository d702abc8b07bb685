"""Masks that a model brings, without an engine: image ranges, chunks, causality."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sparsek_backend.vllm_backend.sparsek.selection import select_by_model
from sparsek_kernels.fallback import fallback_counts
from sparsek_kernels.paged.policy import SelectionPolicy, StepPolicy
from tests.vllm_backend.layers import (
    DIM,
    HEADS,
    KV_HEADS,
    PAGE,
    SETTINGS,
    building,
    make_builder,
    make_cache,
    make_config,
    make_layer,
    make_step,
    run,
    write,
)

pytestmark = pytest.mark.usefixtures("registered")


@pytest.fixture(scope="module")
def vllm_config(registered: None, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_config(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def current(vllm_config: Any) -> Iterator[Any]:
    with building(vllm_config) as config:
        yield config


def test_bidirectional_prefix_is_served_by_the_fallback(current: Any) -> None:
    layer = make_layer()
    builder, spec = make_builder(layer, current)
    cache = make_cache(spec, 32)
    ranges = {1: [(5, 60), (70, 79)]}
    step = make_step([50, 90], [50, 90], 32, mm_req_doc_ranges=ranges)
    before = fallback_counts().get("bidirectional prefix", 0)
    metadata, q, k, v, output = run(layer, builder, cache, step)
    assert fallback_counts()["bidirectional prefix"] == before + 1
    assert metadata.mm_prefix_range == ((), [(5, 60), (70, 79)])
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    for rows, found in ((slice(0, 50), ()), (slice(50, 140), ranges[1])):
        length = rows.stop - rows.start
        seen = torch.ones(length, length, dtype=torch.bool).tril()
        for low, high in found:
            seen[low : high + 1, low : high + 1] = True
        expected = torch.nn.functional.scaled_dot_product_attention(
            *(x[rows].transpose(0, 1) for x in (q, k, v)), attn_mask=seen
        )
        torch.testing.assert_close(output[rows], expected.transpose(0, 1), atol=1e-5, rtol=1e-5)


def test_an_image_of_another_request_changes_nothing(current: Any) -> None:
    """Decodes beside it select as ever, one with an image in its past among them."""
    layer = make_layer()
    builder, spec = make_builder(layer, current)
    cache = make_cache(spec, 64)
    run(layer, builder, cache, make_step([400, 500], [400, 500], 64), seed=1)
    found = []
    for ranges in (None, {1: [(5, 60)], 2: [(5, 60)]}):
        step = make_step([401, 501, 90], [1, 1, 90], 64, mm_req_doc_ranges=ranges)
        metadata, *_, output = run(layer, builder, cache, step)
        found.append(output)
    assert metadata.mm_prefix_range == ((), (), [(5, 60)])
    assert torch.equal(found[0][:2], found[1][:2])
    assert not torch.allclose(found[0][7:62], found[1][7:62], atol=1e-3)


def test_prefixes_that_are_past_need_no_fallback(current: Any) -> None:
    layer = make_layer()
    builder, _ = make_builder(layer, current)
    step = make_step([90], [1], 32, mm_req_doc_ranges={0: [(5, 60), (70, 70)]})
    assert builder.build(0, step).mm_prefix_range is None
    step = make_step([90], [40], 32, mm_req_doc_ranges={0: [(5, 60)]})
    assert builder.build(0, step).mm_prefix_range == ([(5, 60)],)


def test_bidirectional_ranges_of_gemma_4(current: Any) -> None:
    """They keep to the window, and to layers with one: vLLM clears them for the others."""
    models = Path(__import__("vllm").__file__).parent / "model_executor/models"
    assert "metadata.mm_prefix_range = None" in (models / "gemma4_mm.py").read_text("utf-8")
    window, (low, high) = 48, (10, 120)
    sliding = make_layer(0, per_layer_sliding_window=window, mm_prefix_clamp_sliding_window=True)
    whole = make_layer(1)
    place = torch.arange(150)
    distance = place - place[:, None]
    inside = (place >= low) & (place <= high)
    both = inside & inside[:, None] & (distance > -window)
    for layer, seen in (
        (sliding, (distance <= 0) & (distance > -window) | both),
        (whole, distance <= 0),
    ):
        builder, spec = make_builder(layer, current)
        cache = make_cache(spec, 32)
        if layer is whole:  # chooses nothing here, to be compared with SDPA
            layer.impl.own = select_by_model(None)
        step = make_step([150], [150], 32, mm_req_doc_ranges={0: [(low, high)]})
        metadata = builder.build(0, step)
        assert hasattr(metadata, "mm_prefix_range")
        if layer is whole:
            metadata.mm_prefix_range = None
        q, k, v = (x[:150] for x in write(layer, cache, step))
        output = torch.empty_like(q)
        layer.impl.forward(layer, q, k, v, cache, metadata, output)
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
        expected = torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(0, 1) for x in (q, k, v)), attn_mask=seen
        )
        torch.testing.assert_close(output, expected.transpose(0, 1), atol=1e-5, rtol=1e-5)


IMAGES = {1: [(5, 60), (70, 79)], 2: [(300, 420)], 3: [(200, 259)], 5: [(1, 20)]}
"""Ranges of a request's positions: in a step, beyond its end, at its only token, and past."""


@pytest.mark.parametrize(
    ("window", "clamped"), [(None, False), (48, False), (48, True), (None, True)]
)
def test_what_requests_with_images_attend_is_counted(
    window: int | None, clamped: bool, current: Any
) -> None:
    """Of Gemma 4 in layers with a window, but not in those without."""
    layer = make_layer(0, per_layer_sliding_window=window)
    layer.mm_prefix_clamp_sliding_window = clamped and window is not None
    make_layer(1).mm_prefix_clamp_sliding_window = clamped
    builder, _ = make_builder(layer, current)
    lengths, new = [500, 90, 400, 260, 300, 300], [1, 90, 150, 1, 300, 40]
    order = [0, 3, 1, 2, 4, 5]  # decodes first
    lengths, new = ([x[i] for i in order] for x in (lengths, new))
    ranges = {order.index(request): found for request, found in IMAGES.items()}
    usual = builder.build(0, make_step(lengths, new, 64))
    found = builder.build(0, make_step(lengths, new, 64, mm_req_doc_ranges=ranges))
    if clamped and window is None:
        assert (found.attended, found.context) == (usual.attended, usual.context)
        return
    live = [request for request in ranges if request != order.index(5)]
    assert found.mm_prefix_range is not None
    assert [bool(x) for x in found.mm_prefix_range] == [i in live for i in range(6)]
    attended, context = list(usual.attended), list(usual.context)
    for request in live:
        phase = request < 2
        alone = builder.build(0, make_step([lengths[request]], [new[request]], 64))
        place = torch.arange(lengths[request])
        query = place[lengths[request] - new[request] :, None]
        both = torch.zeros(len(query), len(place), dtype=torch.bool)
        for low, high in ranges[request]:
            both |= (query >= low) & (query <= high) & (place >= low) & (place <= high)
        causal = place <= query
        seen = causal | both
        if window is not None:
            seen = causal & (place > query - window)
            seen |= both & (place > query - window) if clamped else both
        attended[phase] += int(seen.sum()) - sum(alone.attended)
        context[phase] += int((causal | both).sum()) - sum(alone.context)
    assert (found.attended, found.context) == (tuple(attended), tuple(context))


@pytest.mark.parametrize("mode", ["block_topk", "sink_window"])
def test_chunks_without_the_hybrid_kv_manager(mode: str, tmp_path: Path) -> None:
    """As in Llama 4: their pages keep every token then, and have one spec with whole layers'."""
    from vllm.model_executor.layers.attention import ChunkedLocalAttention
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from sparsek_backend.vllm_backend.sparsek.metadata import SparseKMetadataBuilder

    sizes = ("dense_below", "num_sink", "window_size")
    settings = SETTINGS if mode == "block_topk" else {name: SETTINGS[name] for name in sizes}
    options = {"additional_config": {"sparsek": {**settings, "mode": mode}}}
    with building(make_config(tmp_path, **options)) as config:
        whole = make_layer(0)
        chunked = ChunkedLocalAttention(
            HEADS, DIM, 1.0, 64, num_kv_heads=KV_HEADS, prefix="model.layers.1.attn"
        )
        spec = FullAttentionSpec(
            block_size=PAGE,
            num_kv_heads=KV_HEADS,
            head_size=DIM,
            dtype=torch.float32,
            attention_chunk_size=64,
        )
        for layer in (whole, chunked):
            SparseKMetadataBuilder(spec, [layer.layer_name], config, torch.device("cpu"))
    assert chunked.impl.policy == StepPolicy.of(SelectionPolicy())
    assert not whole.impl.policy.decode.is_dense


def test_decoders_that_are_not_causal_are_refused(current: Any) -> None:
    """As vLLM's class for prefix language models builds them."""
    builder, _ = make_builder(make_layer(), current)
    step = make_step([40], [40], 4)
    step.causal = False
    with pytest.raises(NotImplementedError, match="causal: expected True"):
        builder.build(0, step)


def test_per_request_causality_is_refused(current: Any) -> None:
    layer = make_layer()
    builder, _ = make_builder(layer, current)
    step = make_step([40], [40], 4)
    step.causal = torch.tensor([True])
    with pytest.raises(NotImplementedError, match="causal"):
        builder.build(0, step)
