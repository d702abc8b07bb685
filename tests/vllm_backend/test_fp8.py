"""An fp8 KV cache: pages, scales, what is refused, and a layer's kernels against the oracle."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch

from sparsek_kernels.paged.pages import summary_bytes
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
)

pytestmark = pytest.mark.usefixtures("registered")

GPU = {"device_capability": (9, 0)}


@pytest.fixture(scope="module")
def vllm_config(registered: None, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_config(tmp_path_factory.mktemp("llama"), dtype="bfloat16")


@pytest.fixture
def current(vllm_config: Any) -> Iterator[Any]:
    with building(vllm_config) as config:
        yield config


def make_fp8_layer(config: Any, index: int = 0, **options: Any) -> Any:
    cache_config = dataclasses.replace(config.cache_config, cache_dtype="fp8")
    return make_layer(index, cache_config=cache_config, **options)


def scaled(layer: Any, k_scale: float, v_scale: float) -> Any:
    """Set the scales as loading a checkpoint does."""
    layer._k_scale_float, layer._v_scale_float = k_scale, v_scale
    return layer


def test_pages_of_an_fp8_cache_hold_the_same_records(current: Any) -> None:
    layer = make_fp8_layer(current)
    spec = make_spec(layer, current)
    plain = KV_HEADS * PAGE * 2 * DIM
    assert spec.dtype.itemsize == 1
    assert spec.page_size_bytes == plain + 6 * plain // 64


def test_views_of_fp8_pages(current: Any) -> None:
    from sparsek_backend.vllm_backend.sparsek.pages import view_pages

    spec = make_spec(make_fp8_layer(current), current)
    cache = make_cache(spec, 5)
    views = view_pages(cache, DIM, True)
    assert views.keys.dtype == views.values.dtype == torch.float8_e4m3fn
    assert views.summary is not None
    assert views.summary.dtype == torch.uint8
    assert views.summary.shape == (5, KV_HEADS, summary_bytes(PAGE, DIM))
    views.summary.fill_(7)
    for part in (views.keys, views.values):
        assert (part.view(torch.uint8) == 255).all()
    heads = cache.flatten(2)
    behind = heads[..., PAGE * 2 * DIM :].contiguous().view(torch.uint8)
    assert (behind[..., : summary_bytes(PAGE, DIM)] == 7).all()


def test_the_line_of_an_fp8_cache(current: Any) -> None:
    from sparsek_backend.vllm_backend.sparsek import metadata

    layer = make_fp8_layer(current)
    with mock.patch.object(metadata.logger, "info_once") as told:
        make_builder(layer, current)
    (line,) = told.call_args.args
    assert f"9.4 % summaries, pages of {PAGE} in fp8" in line


def test_scales_of_the_layer_reach_the_kernels(current: Any) -> None:
    from sparsek_backend.vllm_backend.sparsek import impl

    layer = scaled(make_fp8_layer(current), 0.5, 0.25)
    builder, spec = make_builder(layer, current)
    cache = make_cache(spec, 8)
    step = make_step([40], [40], 8)
    q = torch.zeros(40, HEADS, DIM, dtype=torch.bfloat16)
    k = torch.zeros(40, KV_HEADS, DIM, dtype=torch.bfloat16)
    with (
        mock.patch.object(impl, "write_kv") as write,
        mock.patch.object(impl, "attend_segment") as attend,
    ):
        layer.impl.do_kv_cache_update(layer, k, k, cache, step.slot_mapping)
        layer.impl.forward(layer, q, k, k, cache, builder.build(0, step), q.clone())
    written, operands = write.call_args.kwargs, attend.call_args.args[0]
    assert (written["k_scale"], written["v_scale"]) == (0.5, 0.25)
    assert (operands.k_scale, operands.v_scale) == (0.5, 0.25)
    assert layer.impl.flash is None


def test_scales_mean_nothing_to_other_caches(current: Any) -> None:
    layer = scaled(make_layer(), 0.5, 0.25)
    assert layer.impl._scales(layer) == (1.0, 1.0)


def reasons(**changes: Any) -> list[str]:
    from sparsek_backend.vllm_backend.sparsek.backend import SparseKBackend
    from tests.vllm_backend.test_startup import GOOD

    return SparseKBackend.validate_configuration(**{**GOOD, **changes})


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3"])
def test_served_on_a_gpu(name: str) -> None:
    assert reasons(kv_cache_dtype=name, **GPU) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kv_cache_dtype": "fp8"}, "on a CPU"),
        ({"kv_cache_dtype": "fp8", "device_capability": (8, 6)}, "compute capability 8.9"),
        ({"kv_cache_dtype": "fp8", "use_mm_prefix": True, **GPU}, "bidirectional prefixes"),
        ({"kv_cache_dtype": "fp8_e5m2", **GPU}, "kv_cache_dtype not supported"),
    ],
    ids=["cpu", "ampere", "prefix", "e5m2"],
)
def test_refused_with_a_remedy(changes: dict[str, Any], words: str) -> None:
    (reason,) = reasons(**changes)
    assert words in reason
    assert "remedy: --kv-cache-dtype auto" in reason


@pytest.mark.parametrize(
    ("options", "words"),
    [({"logits_soft_cap": 30.0}, "logits soft cap"), ({"alibi_slopes": [0.5] * HEADS}, "ALiBi")],
    ids=["soft-cap", "alibi"],
)
def test_fallbacks_refuse_fp8(current: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(NotImplementedError, match=rf"{words}.*--kv-cache-dtype auto"):
        make_fp8_layer(current, **options)


def test_scales_that_mean_nothing_are_refused(current: Any) -> None:
    layer = scaled(make_fp8_layer(current), 0.0, 1.0)
    with pytest.raises(ValueError, match=r"k_scale, v_scale: expected positive.*got 0.0 and 1.0"):
        layer.impl._scales(layer)


@contextmanager
def interpreted() -> Iterator[None]:
    """Let layers on a CPU launch the Triton kernels, which run in Triton's interpreter."""
    from sparsek_backend.vllm_backend.sparsek import impl
    from tests.kernels.launched import attend_launched, write_launched

    with (
        mock.patch.object(impl, "write_kv", write_launched),
        mock.patch.object(impl, "attend_segment", attend_launched),
    ):
        yield


DEVICES = [
    pytest.param("cuda", marks=pytest.mark.gpu),
    pytest.param(
        "cpu",
        marks=pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the layers itself"),
    ),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sliding", [None, 48], ids=["block_topk", "sliding"])
def test_a_layer_against_the_oracle(
    device: str, sliding: int | None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The oracle reads what is stored, and is scaled before and behind."""
    prompts, new, last = ([299, 220], 400, 64) if device == "cuda" else ([299, 140], 130, 0)
    config = make_config(
        tmp_path_factory.mktemp("llama"),
        additional_config={"sparsek": {**SETTINGS, "dense_last": last}},
    )
    with building(config), interpreted() if device == "cpu" else nullcontext():
        options = {} if sliding is None else {"per_layer_sliding_window": sliding}
        layer = scaled(make_fp8_layer(config, **options), 0.02, 0.03)
        builder, spec = make_builder(layer, config, device)
        cache = make_cache(spec, 64, device)
        generator = torch.Generator(device).manual_seed(3)

        def random(tokens: int, heads: int) -> torch.Tensor:
            return torch.randn(tokens, heads, DIM, device=device, generator=generator)

        def take(step: Any) -> tuple[Any, torch.Tensor, torch.Tensor]:
            tokens = step.num_actual_tokens
            q, k, v = random(tokens, HEADS), random(tokens, KV_HEADS), random(tokens, KV_HEADS)
            output = torch.full_like(q, float("nan"))
            metadata = builder.build(0, step)
            layer.impl.do_kv_cache_update(layer, k, v, cache, step.slot_mapping)
            layer.impl.forward(layer, q, k, v, cache, metadata, output)
            return metadata.batch, q, output

        take(make_step(prompts, prompts, 64, device))
        lengths = [*(length + 1 for length in prompts), new]
        batch, q, output = take(make_step(lengths, [1, 1, new], 64, device))
        policy = layer.impl.policy
    assert policy.selects_blocks == (sliding is None)
    assert not policy.decode.sees_all(lengths[0] - 1)
    keys, values = (stored.float() for stored in keys_and_values(cache.cpu()))
    host = dataclasses.replace(
        batch,
        block_table=batch.block_table.cpu(),
        seq_lens=batch.seq_lens.cpu(),
        cu_seqlens_q=batch.cu_seqlens_q.cpu(),
    )

    stored = (q.cpu().double() * 0.02, keys, values, host, policy)
    expected = 0.03 * paged_attention_reference(*stored)
    assert (output.double().cpu() - expected).abs().max() <= 1e-4
