"""What moves a page moves its summaries: they are part of what vLLM says a token takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sparsek_backend.vllm_backend import compat
from sparsek_backend.vllm_backend.sparsek import pages
from sparsek_backend.vllm_backend.sparsek.pages import bytes_behind, page_rows, view_pages
from tests.vllm_backend.layers import (
    KV_HEADS,
    building,
    make_builder,
    make_cache,
    make_config,
    make_layer,
    make_spec,
    make_step,
    run,
)

pytestmark = pytest.mark.usefixtures("registered")


@pytest.fixture
def current(tmp_path: Path) -> Iterator[Any]:
    with building(make_config(tmp_path)) as config:
        yield config


def parts(layer: Any, cache: torch.Tensor) -> list[torch.Tensor]:
    """K, V and summaries of a layer's cache, page by page."""
    pages = layer.impl._pages.view(cache)
    return [pages.keys, pages.values, pages.summary]


@pytest.mark.parametrize("alone", [True, False], ids=["own storage", "shared storage"])
def test_vllms_copy_of_a_block_carries_its_summary(current: Any, alone: bool) -> None:
    from vllm.v1.worker import utils

    if not hasattr(utils, "copy_kv_cache_blocks_inplace"):
        pytest.skip("this vLLM copies no blocks")
    layer = make_layer()
    builder, spec = make_builder(layer, current)
    pages = 16
    cache = make_cache(spec, pages)
    if not alone:  # two layers in one allocation, as in vLLM's own
        cache = torch.cat([cache, cache])[pages:]
    run(layer, builder, cache, make_step([200], [200], pages))
    source, target = pages - 2, 1
    before = [part[source].clone() for part in parts(layer, cache)]
    assert not any(part.isnan().any() for part in before)
    utils.copy_kv_cache_blocks_inplace([cache], pages, [(source, target)])
    for part, expected in zip(parts(layer, cache), before, strict=True):
        assert torch.equal(part[target], expected)


@pytest.mark.parametrize("page_size", [16, 64, 128, 544])
def test_a_token_takes_as_much_on_every_page(current: Any, page_size: int) -> None:
    """vLLM asks about a page of one token to size the pages of recurrent layers."""
    from sparsek_backend.vllm_backend.sparsek.backend import SparseKBackend
    from sparsek_backend.vllm_backend.sparsek.pages import bytes_behind
    from sparsek_kernels.paged import summary_bytes

    layer = make_layer()
    plain = replace(layer.get_kv_cache_spec(current), block_size=page_size)
    page = SparseKBackend.customize_spec(plain)
    token = SparseKBackend.customize_spec(replace(plain, block_size=1))
    assert page.page_size_bytes == page_size * token.page_size_bytes
    room = page.page_size_bytes - plain.page_size_bytes
    assert room == KV_HEADS * page_size * bytes_behind(plain.head_size, 4)
    assert room >= KV_HEADS * summary_bytes(page_size, plain.head_size)
    assert compat.content_bytes(page) % page.dtype.itemsize == 0


@pytest.mark.parametrize(
    ("dtype", "most"),
    [(torch.float32, 0.032), (torch.bfloat16, 0.063), (torch.float16, 0.063), (torch.uint8, 0.094)],
    ids=["fp32", "bf16", "fp16", "fp8"],
)
@pytest.mark.parametrize("head_size", [64, 80, 128, 256])
@pytest.mark.parametrize("page_size", [16, 64, 128])
def test_what_vllm_counts_for_summaries(
    current: Any, page_size: int, head_size: int, dtype: torch.dtype, most: float
) -> None:
    """4.7 % of K and V of 128 channels, whole rows of these for others; twice as much with fp8."""
    from sparsek_backend.vllm_backend.sparsek.backend import SparseKBackend

    spec = make_layer().get_kv_cache_spec(current)
    sizes = {"block_size": page_size, "head_size": head_size, "head_size_v": head_size}
    plain = replace(spec, dtype=dtype, state_content_bytes=None, **sizes)
    behind = SparseKBackend.customize_spec(plain).page_size_bytes - plain.page_size_bytes
    assert 0 < behind <= most * plain.page_size_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
@pytest.mark.parametrize("head_size", [40, 80, 128])
def test_views_of_declared_content(current: Any, dtype: torch.dtype, head_size: int) -> None:
    """K, V and summaries of all heads share no byte, in any dtype and head size."""
    from sparsek_backend.vllm_backend.sparsek.pages import view_pages, with_summaries

    make_layer()
    spec = make_spec(make_layer(1), current)
    spec = replace(spec, dtype=dtype, head_size=head_size, head_size_v=head_size)
    spec = with_summaries(replace(spec, state_content_bytes=None))
    content = compat.content_bytes(spec) // dtype.itemsize
    cache = torch.zeros(3, KV_HEADS, spec.block_size, content, dtype=dtype)
    views = view_pages(cache, head_size, True)
    assert views.summary is not None
    found = [views.keys, views.values, views.summary]
    for value, part in enumerate(found, 1):
        part.copy_(torch.full_like(part, value, dtype=torch.float32))
    for value, part in enumerate(found, 1):
        assert (part.float() == value).all()


@pytest.mark.parametrize("mode", ["block_topk", "dense"])
def test_layers_that_choose_by_records_ask_for_pages_of_whole_segments(
    mode: str, tmp_path: Path
) -> None:
    """Where several backends share a page size, vLLM takes one that all of them support."""
    from sparsek_backend.vllm_backend.sparsek.backend import SparseKBackend

    def smallest() -> int:
        (size,) = SparseKBackend.get_supported_kernel_block_sizes()
        return int(size.base)

    options = {"additional_config": {"sparsek": {"mode": mode}}}
    with building(make_config(tmp_path, **options)):
        make_layer(0, per_layer_sliding_window=48)
        assert smallest() == 16
        make_layer(1)
        assert smallest() == (64 if mode == "block_topk" else 16)
    assert smallest() == 16  # of no engine


def test_pages_of_hybrids_nest_with_blocks() -> None:
    """vLLM raises a page to the size of a recurrent state; multiples of a page go on to nest."""
    from sparsek_backend.config import ConfigError, resolve_config
    from sparsek_backend.vllm_backend.settings import check_page_size

    resolved = resolve_config(None, {})
    for page in (64, 576, 1088):
        check_page_size(resolved, page)
    with pytest.raises(ConfigError, match=r"sel_block_size.*KV page of 528 tokens, got 64"):
        check_page_size(resolved, 528)


@pytest.mark.parametrize("summaries", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_a_pages_row_is_the_whole_page(padded: bool, summaries: bool) -> None:
    """Rows of some pages, laid out as the cache, are a cache of these pages: in every version."""
    pages, heads, tokens, dim = 6, 2, 64, 32
    behind = bytes_behind(dim, 2) // 2 if summaries else 0
    content = 2 * dim if padded else 2 * dim + behind
    page = heads * tokens * (2 * dim + behind)
    raw = torch.randn(2 * pages * page).to(torch.bfloat16)  # pages of two layers by turns
    strides = (2 * page, tokens * content, content, 1)
    cache = raw.as_strided((pages, heads, tokens, content), strides)
    chosen = torch.tensor([4, 1, 3])
    rows = page_rows(cache, dim, summaries)[chosen]
    assert rows.shape == (3, page)
    found = view_pages(
        rows.as_strided((3, heads, tokens, content), (page, *strides[1:])), dim, summaries
    )
    whole = view_pages(cache, dim, summaries)
    assert torch.equal(found.keys, whole.keys[chosen])
    assert torch.equal(found.values, whole.values[chosen])
    assert (found.summary is not None) == summaries
    if found.summary is not None and whole.summary is not None:
        assert torch.equal(found.summary, whole.summary[chosen])


def test_views_of_pages_are_of_the_cache_that_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def locate(*tensors: Any) -> None:
        asked.append(tensors)

    monkeypatch.setattr(pages, "locate_pages", locate)
    reader, cache = pages.PageReader(32), torch.zeros(4, 2, 64, 64)
    views = reader.cached(cache)
    for _ in range(2):
        assert reader.cached(cache) is views
        assert views.located is None
    assert asked == [(views.keys, views.values, None)]
    turned = cache.as_strided(cache.shape, (cache.stride(0), 64, 128, 1))
    for other in (torch.zeros_like(cache), turned, cache[:2], cache.view(torch.int32)):
        found = reader.cached(other)
        assert found is not views
        assert (found.keys.data_ptr(), found.keys.dtype) == (other.data_ptr(), other.dtype)
        assert found.keys.stride()[:3] == other.stride()[:3]
