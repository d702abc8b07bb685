"""One layer without an engine: pages, metadata, dispatch, and what never leaks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sparsek_kernels.fallback import FallbackMask, sdpa_fallback
from sparsek_kernels.paged.api import paged_attention
from sparsek_kernels.paged.batch import PagedBatch
from sparsek_kernels.paged.policy import SelectionPolicy, StepPolicy
from sparsek_kernels.paged.reference import paged_attention_reference
from tests.vllm_backend.layers import (
    DIM,
    HEADS,
    KV_HEADS,
    PAGE,
    SETTINGS,
    building,
    keys_and_values,
    make_builder,
    make_cache,
    make_config,
    make_layer,
    make_spec,
    make_step,
    run,
)

pytestmark = pytest.mark.usefixtures("registered")


@pytest.fixture(scope="module")
def vllm_config(registered: None, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_config(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def current(vllm_config: Any) -> Iterator[Any]:
    with building(vllm_config) as config:
        yield config


def test_step_with_decodes_prefills_and_padding(current: Any) -> None:
    layer = make_layer()
    builder, spec = make_builder(layer, current)
    cache = make_cache(spec, 64)
    run(layer, builder, cache, make_step([299, 220], [299, 220], 64), seed=1)
    step = make_step([300, 221, 400], [1, 1, 400], 64)
    metadata, q, _, _, output = run(layer, builder, cache, step)
    batch = metadata.batch
    assert (batch.num_decodes, batch.num_prefills, batch.num_decode_tokens) == (2, 1, 2)
    assert batch.seq_lens_host == (300, 221, 400)
    assert batch.query_lens_host == (1, 1, 400)
    policy = layer.impl.policy
    assert policy.selects_blocks
    expected = paged_attention_reference(q, *keys_and_values(cache), batch, policy)
    torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=1e-5)
    decoded = policy.decode.attended_tokens(299) + policy.decode.attended_tokens(220)
    dense, _ = policy.prefill.last_rows(400, 400)
    assert dense == 400 - 64
    share = sum(policy.prefill.attended_tokens(position) for position in range(dense))
    share += sum(position + 1 for position in range(dense, 400))
    assert metadata.attended == (share, decoded)
    assert metadata.context == (400 * 401 // 2, 300 + 221)


def test_the_last_token_of_a_prompt_is_a_decode_if_it_comes_alone(current: Any) -> None:
    builder, _ = make_builder(make_layer(), current)
    step = make_step([300, 221, 400], [1, 1, 2], 64)
    step.is_prefilling = torch.tensor([False, True, True])
    batch = builder.build(0, step).batch
    assert (batch.num_decodes, batch.num_prefills) == (2, 1)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_one_phase_alone_is_sparse(phase: str, tmp_path: Path) -> None:
    settings = {"sparsek": {**SETTINGS, "sparse_phase": phase}}
    with building(make_config(tmp_path, additional_config=settings)) as config:
        layer = make_layer()
        builder, spec = make_builder(layer, config)
    cache = make_cache(spec, 64)
    run(layer, builder, cache, make_step([299, 220], [299, 220], 64), seed=1)
    step = make_step([300, 221, 400], [1, 1, 400], 64)
    metadata, q, _, _, output = run(layer, builder, cache, step)
    policy = SelectionPolicy(
        num_sink=16, window_size=32, top_k=2, sel_block_size=32, dense_last=64, query_tile=32
    )
    caches = (*keys_and_values(cache), metadata.batch)
    sparse = paged_attention_reference(q, *caches, policy)
    dense = paged_attention_reference(q, *caches, SelectionPolicy())
    expected = torch.where(torch.arange(402)[:, None, None] < 2, dense, sparse)
    if phase == "decode":
        expected = torch.where(torch.arange(402)[:, None, None] < 2, sparse, dense)
    torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(sparse[:2], dense[:2], atol=1e-3)
    assert not torch.allclose(sparse[2:300], dense[2:300], atol=1e-3)
    decodes = sum(policy.by_records(64).attended_tokens(i) for i in (299, 220))
    prefill = sum(policy.attended_tokens(i) if i < 336 else i + 1 for i in range(400))
    attended = 300 + 221 + prefill if phase == "prefill" else decodes + 400 * 401 // 2
    assert sum(metadata.attended) == attended


def test_flash_attention_takes_dense_prefills_and_the_last_queries_of_sparse_ones(
    current: Any,
) -> None:
    from sparsek_backend.vllm_backend.sparsek.flash import FlashPrefill

    calls = []

    def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: Any) -> None:
        """FlashAttention's part, by our dense path."""
        calls.append((len(q), given["cu_seqlens_q"].tolist(), given["seqused_k"].tolist()))
        batch = PagedBatch(
            block_table=given["block_table"],
            seq_lens=given["seqused_k"],
            cu_seqlens_q=given["cu_seqlens_q"],
            num_decodes=0,
            num_decode_tokens=0,
            decode_query_len=1,
            max_query_len=given["max_seqlen_q"],
            max_seq_len=given["max_seqlen_k"],
            first_row=int(given["cu_seqlens_q"][0]),
        )
        caches = (k.transpose(1, 2), v.transpose(1, 2))
        paged_attention(q, *caches, batch, SelectionPolicy(), out=given["out"])

    layer = make_layer()
    builder, spec = make_builder(layer, current)
    layer.impl.flash = FlashPrefill(flash, 3)
    cache = make_cache(spec, 64)
    policy = layer.impl.policy
    assert policy.prefill.last_rows(600, 600) == (536, 600)
    run(layer, builder, cache, make_step([299, 260], [299, 260], 64), seed=1)
    calls.clear()
    step = make_step([300, 280, 600, 70], [1, 20, 600, 70], 64)
    metadata, q, _, _, output = run(layer, builder, cache, step)
    expected = paged_attention_reference(q, *keys_and_values(cache), metadata.batch, policy)
    torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=1e-5)
    assert calls == [(20, [0, 20], [280]), (70, [0, 70], [70]), (64, [0, 64], [600])]
    calls.clear()
    metadata, q, _, _, output = run(layer, builder, cache, make_step([400, 600], [400, 600], 64))
    expected = paged_attention_reference(q, *keys_and_values(cache), metadata.batch, policy)
    torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=1e-5)
    assert calls == [(128, [0, 64, 128], [400, 600])]  # one call for all ends


@pytest.mark.parametrize("first", [True, False])
def test_one_tensor_rank_reports_metrics(
    first: bool, current: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sparsek_backend.vllm_backend import compat, step
    from sparsek_backend.vllm_backend.stats import STATS

    assert compat.is_first_tensor_rank()
    monkeypatch.setattr(compat, "is_first_tensor_rank", lambda: first)
    builder, _ = make_builder(make_layer(), current)
    lines: list[str] = []
    monkeypatch.setattr(step.logger, "info", lines.append)
    monkeypatch.setattr(STATS, "_last_log", float("-inf"))
    builder.build(0, make_step([40], [40], 4))
    assert len(lines) == first
    assert all(line.startswith("SPARSEK attended") for line in lines)


@pytest.mark.parametrize("asked", [True, False])
def test_one_prefill_in_a_while_is_timed_where_asked_for(
    asked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sparsek_backend.vllm_backend.sparsek.probe import PROBE
    from sparsek_backend.vllm_backend.stats import STATS

    settings = {"sparsek": {**SETTINGS, "time_selection": asked}}
    with building(make_config(tmp_path, additional_config=settings)) as config:
        layer = make_layer()
        builder, spec = make_builder(layer, config)
    cache = make_cache(spec, 64)
    STATS.take_seconds()
    monkeypatch.setattr(PROBE, "_last", float("-inf"))
    *_, timed = run(layer, builder, cache, make_step([400], [400], 64), seed=1)
    taken = STATS.take_seconds()
    assert 0 < taken[0] < taken[1] if asked else taken == (0.0, 0.0)
    *_, untimed = run(layer, builder, cache, make_step([400], [400], 64), seed=1)
    assert torch.equal(timed, untimed)
    monkeypatch.setattr(PROBE, "_last", float("-inf"))
    run(layer, builder, cache, make_step([401], [1], 64), seed=2)
    assert STATS.take_seconds() == (0.0, 0.0), "decodes are not timed"


def test_a_timed_prefill_waits_for_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its events are read by a later prefill, once the GPU has passed them."""
    from sparsek_backend.vllm_backend.sparsek.probe import SelectionProbe
    from sparsek_backend.vllm_backend.stats import STATS

    done: list[str] = []

    class Event:
        passed = False

        def __init__(self, enable_timing: bool) -> None:
            self.at = 0

        def record(self) -> None:
            self.at = len(done)

        def query(self) -> bool:
            return Event.passed

        def elapsed_time(self, end: Event) -> float:
            assert Event.passed, "this would wait for the GPU"
            return 250.0 * (end.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    probe, device = SelectionProbe(), torch.device("cuda")
    STATS.take_seconds()
    assert probe.is_due(device)
    probe.run(lambda: done.append("select"), lambda _: done.extend("attend"), device)
    assert done == ["select", *"attend"]
    probe._last = float("-inf")
    assert not probe.is_due(device), "the last one is not read yet"
    assert STATS.take_seconds() == (0.0, 0.0)
    Event.passed = True
    assert probe.is_due(device)
    assert STATS.take_seconds() == (0.25, 1.75)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_gpu_times_prefills_by_its_events() -> None:
    from sparsek_backend.vllm_backend.sparsek.probe import SelectionProbe
    from sparsek_backend.vllm_backend.stats import STATS

    probe, device = SelectionProbe(), torch.device("cuda")
    x = torch.randn(2048, 2048, device=device)
    STATS.take_seconds()
    assert probe.is_due(device)
    probe.run(lambda: x @ x, lambda found: found @ x, device)
    assert STATS.take_seconds() == (0.0, 0.0)
    torch.cuda.synchronize()
    probe._last = float("-inf")
    assert probe.is_due(device)
    assert all(0 < seconds < 10 for seconds in STATS.take_seconds())


def test_a_dense_layer_keeps_the_summaries_of_the_one_that_shares_its_pages(
    tmp_path: Any,
) -> None:
    """As in Gemma 3n, with a dense owner: its sharer selects as from pages of its own."""
    settings = {**SETTINGS, "dense_layers": [0]}
    with building(make_config(tmp_path, additional_config={"sparsek": settings})) as config:
        owner = make_layer(0)
        sharer = make_layer(1, kv_sharing_target_layer_name=owner.layer_name)
        alone = make_layer(2)
        builder, spec = make_builder(owner, config)
        for layer in (sharer, alone):
            make_builder(layer, config)
        assert not owner.impl.policy.selects_blocks
        assert sharer.impl.policy.selects_blocks
        step = make_step([400], [400], 64)
        cache, own = make_cache(spec, 64), make_cache(spec, 64)
        _, q, k, v, _ = run(owner, builder, cache, step)
        metadata, *_, expected = run(alone, builder, own, step)
        output = torch.empty_like(q)
        sharer.impl.forward(sharer, q, k, v, cache, metadata, output)
        assert torch.equal(output, expected)


def test_profiling_without_metadata(current: Any) -> None:
    layer = make_layer()
    q, output = torch.randn(3, HEADS, DIM), torch.full((3, HEADS, DIM), float("nan"))
    layer.impl.forward(layer, q, q, q, torch.tensor([]), None, output)
    assert (output == 0).all()


def test_pages_have_room_for_summaries_only_where_layers_select(current: Any) -> None:
    layer = make_layer()
    spec = make_spec(layer, current)
    plain = KV_HEADS * PAGE * 2 * DIM * 4
    assert spec.page_size_bytes == plain + plain // 32
    sliding = make_layer(1, per_layer_sliding_window=48)
    window = make_spec(sliding, current)
    assert window.page_size_padded is None


def test_pages_keep_their_size_where_no_layer_selects(tmp_path: Any) -> None:
    settings = {"sparsek": {"mode": "dense"}}
    with building(make_config(tmp_path, additional_config=settings)) as dense:
        layer = make_layer()
        builder, spec = make_builder(layer, dense)
        assert spec.page_size_padded is None
        assert not layer.impl.policy.selects_blocks
        cache = make_cache(spec, 8)
        run(layer, builder, cache, make_step([70], [70], 8))


def test_a_cache_without_room_is_refused() -> None:
    from sparsek_backend.vllm_backend.sparsek.pages import view_pages

    cache = torch.zeros(4, KV_HEADS, PAGE, 2 * DIM)
    assert view_pages(cache, DIM, False).summary is None
    with pytest.raises(ValueError, match="kv_cache: expected room for"):
        view_pages(cache, DIM, True)


def test_old_vllm_pads_through_the_layer(current: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM before 0.32 has no ``customize_spec``: the layer's own method is wrapped."""
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.attention.backend import AttentionBackend

    from sparsek_backend.vllm_backend import compat

    monkeypatch.setattr(Attention, "get_kv_cache_spec", Attention.get_kv_cache_spec)
    monkeypatch.setattr(Attention, compat.HOOKED, None, raising=False)
    monkeypatch.delattr(Attention, compat.HOOKED)
    for later in ("customize_spec", "supported_kv_cache_layouts"):
        monkeypatch.delattr(AttentionBackend, later, raising=False)
    layer = make_layer()
    spec = layer.get_kv_cache_spec(current)
    plain = spec.unpadded_page_size_bytes
    assert spec.page_size_bytes == plain + plain // 32
    window = make_layer(1, per_layer_sliding_window=48).get_kv_cache_spec(current)
    assert (window.block_size, window.page_size_padded) == (PAGE, None)
    layer.attn_backend = SimpleNamespace(get_name=lambda: "TRITON_ATTN")
    assert layer.get_kv_cache_spec(current).page_size_padded is None
    monkeypatch.undo()


def test_old_cache_interface() -> None:
    from sparsek_backend.vllm_backend.sparsek.backend import SparseKBackend

    assert SparseKBackend.get_kv_cache_shape(7, 64, 8, 128) == (7, 8, 64, 256)
    order = SparseKBackend.get_kv_cache_stride_order()
    layered = SparseKBackend.get_kv_cache_stride_order(include_num_layers_dimension=True)
    assert order == (0, 1, 2, 3)
    assert sorted(layered) == [0, 1, 2, 3, 4]
    assert layered[0] != 0


def test_window_and_sinks_of_the_model(current: Any) -> None:
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    layer = make_layer(per_layer_sliding_window=48, sinks=sinks)
    builder, spec = make_builder(layer, current)
    window = SelectionPolicy(window_size=48, sel_block_size=64)
    assert layer.impl.policy == StepPolicy(window, window)
    cache = make_cache(spec, 32)
    metadata, q, k, v, output = run(layer, builder, cache, make_step([150, 33], [150, 33], 32))
    assert metadata.batch.num_decodes == 0
    offsets = [0, 150, 183]
    expected = sdpa_fallback(
        q,
        k,
        v,
        FallbackMask(window_size=48, sinks=sinks),
        reason="a test",
        cu_seqlens_q=offsets,
        cu_seqlens_k=offsets,
    )
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)


def test_quantised_output_is_refused(current: Any) -> None:
    layer = make_layer()
    q = torch.zeros(1, HEADS, DIM)
    with pytest.raises(NotImplementedError, match="output_scale"):
        layer.impl.forward(layer, q, q, q, q, None, q, output_scale=torch.ones(1))


def test_capturing_a_graph_is_short_and_not_counted(current: Any) -> None:
    from sparsek_backend.vllm_backend.stats import STATS

    layer = make_layer()
    builder, _ = make_builder(layer, current)
    before = STATS.steps, sum(STATS.context)
    step = make_step([512, 512], [3, 3], 40)
    metadata = builder.build_for_cudagraph_capture(step)
    assert (STATS.steps, sum(STATS.context)) == before
    assert metadata.batch.seq_lens.data_ptr() == step.seq_lens.data_ptr()
    assert step.seq_lens.tolist() == [3, 3]
    assert metadata.batch.max_seq_len == 512


def test_cuda_graphs_except_for_fallbacks_and_shared_pages(
    current: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.attention.backend import AttentionCGSupport

    from sparsek_backend.vllm_backend.sparsek.metadata import SparseKMetadataBuilder

    layer = make_layer()
    spec = make_spec(layer, current)
    support = SparseKMetadataBuilder.get_cudagraph_support
    assert support(current, spec) is AttentionCGSupport.UNIFORM_BATCH
    with monkeypatch.context() as patch:
        patch.setattr(current.parallel_config, "decode_context_parallel_size", 2)
        assert support(current, spec) is AttentionCGSupport.NEVER
    make_layer(1, logits_soft_cap=30.0)
    assert support(current, spec) is AttentionCGSupport.NEVER


def test_shared_pages_are_found_by_lengths_of_the_host(current: Any) -> None:
    """On a GPU: of prefills they are exact, and of decodes never read."""
    from sparsek_backend.vllm_backend.sparsek.shards import ContextRanks

    layer = make_layer()
    builder, spec = make_builder(layer, current)
    builder.on_host = False
    builder.context_ranks = ContextRanks(None, 1, 2)  # type: ignore[arg-type]
    step = make_step([90, 50, 200], [1, 50, 70], 32)
    step.seq_lens_cpu_upper_bound = torch.tensor([99, 50, 200])
    shards = builder.build(0, step).shards
    size = spec.block_size
    assert shards is not None
    assert shards.decodes.num_decodes == shards.decodes.num_requests == 1
    assert (shards.decodes.block_table[0, ::2] == -1).all()
    assert torch.equal(shards.decodes.block_table[0, 1::2], step.block_table_tensor[0])
    (part,) = shards.prefills
    assert part.batch.seq_lens_host == (50, 200)
    assert part.batch.first_row == 1
    assert len(part.pages) == -(-50 // (2 * size)) + -(-200 // (2 * size))


@pytest.mark.parametrize("known", [True, False], ids=["bounds", "none"])
def test_device_metadata_needs_no_device_lengths(current: Any, known: bool) -> None:
    """On a GPU nothing is read back: lengths come from the scheduler's upper bounds."""
    layer = make_layer()
    builder, _ = make_builder(layer, current)
    builder.on_host = False
    step = make_step([90, 50], [1, 50], 32)
    step.seq_lens_cpu_upper_bound = step.seq_lens.clone() if known else None
    step.seq_lens = SimpleNamespace(shape=(2,))
    metadata = builder.build(0, step)
    assert metadata.batch.seq_lens_host == ((90, 50) if known else None)  # exact of prefills
    assert metadata.batch.query_lens_host == (1, 50)
    assert metadata.batch.num_decodes == 1
    assert sum(metadata.context) >= 90 + 50 * 51 // 2
    if known:
        assert sum(metadata.context) == 90 + 50 * 51 // 2
    decodes = make_step([90, 50], [1, 1], 32)
    decodes.seq_lens_cpu_upper_bound = decodes.seq_lens.clone()
    assert builder.build(0, decodes).batch.seq_lens_host is None  # no kernel asks for them
