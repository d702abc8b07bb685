"""KV connectors: K, V and summaries come back bit for bit after store, eviction and load."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from tests.vllm_backend.engines import (
    counted_forwards,
    engine,
    generate,
    layers,
    model_runner,
    pages_of_request,
    requires_cpu_vllm,
    shuffle_free_pages,
    tokens,
)
from tests.vllm_backend.tiny_models import VOCABULARY, make_tiny_model

pytestmark = [pytest.mark.engine, requires_cpu_vllm, pytest.mark.usefixtures("registered")]

PAGE, LENGTH = 64, 500
SPARSE = {
    "dense_below": 0,
    "num_sink": 16,
    "window_size": 64,
    "sel_block_size": 32,
    "top_k": 3,
    "decode_tokens": 96,
    "query_tile": 1,
}


@pytest.fixture(scope="module")
def llm(registered: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """An engine that keeps KV pages in files."""
    from vllm.config import KVTransferConfig

    transfer = KVTransferConfig(
        kv_connector="ExampleConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"shared_storage_path": str(tmp_path_factory.mktemp("pages"))},
    )
    with engine(
        make_tiny_model("llama", tmp_path_factory.mktemp("llama")),
        "SPARSEK",
        SPARSE,
        max_model_len=600,
        max_num_batched_tokens=600,
        block_size=PAGE,
        num_gpu_blocks_override=20,
        skip_tokenizer_init=True,
        kv_transfer_config=transfer,
    ) as llm:
        yield llm


def random_prompt(seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    found: list[int] = torch.randint(3, VOCABULARY, (LENGTH,), generator=generator).tolist()
    return found


def test_pages_in_files(llm: Any) -> None:
    prompt = random_prompt(5)
    answer, stored = pages_of_request(llm, prompt)
    shuffle_free_pages(llm, seed=1)
    for layer in layers(llm):
        layer.kv_cache.fill_(float("nan"))
    with counted_forwards() as calls:
        again, loaded = pages_of_request(llm, prompt)
    assert set(calls) == {"SPARSEK"}
    assert again.num_cached_tokens == (LENGTH - 1) // PAGE * PAGE
    for before, after in zip(stored, loaded, strict=True):
        assert torch.equal(before, after)
    assert tokens([again]) == tokens([answer])


def test_offloaded_pages_are_whole(llm: Any) -> None:
    """OffloadingConnector moves the bytes that it derives from specs: all of a page's."""
    offloading = pytest.importorskip(
        "vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker"
    )
    runner = model_runner(llm)
    caches = {layer.layer_name: layer.kv_cache for layer in layers(llm)}
    for layer in layers(llm):
        layer.kv_cache.copy_(torch.randn_like(layer.kv_cache))
    taken = []
    worker = SimpleNamespace(
        vllm_config=runner.vllm_config,
        kv_cache_config=runner.kv_cache_config,
        _init_worker=taken.append,
    )
    offloading.OffloadingConnectorWorker.register_kv_caches(worker, caches)
    (found,) = taken
    before = {name: cache.clone() for name, cache in caches.items()}
    source, target = 3, 7
    (references,) = found.group_data_refs
    for reference in references:
        pages = found.tensors[reference.tensor_idx].tensor
        pages[target, : reference.page_size_bytes] = pages[source, : reference.page_size_bytes]
    for layer in layers(llm):
        old = layer.impl._pages.view(before[layer.layer_name])
        new = layer.impl._pages.view(layer.kv_cache)
        for part in ("keys", "values", "summary"):
            assert torch.equal(getattr(new, part)[target], getattr(old, part)[source])
            rest = [page for page in range(len(new.keys)) if page != target]
            assert torch.equal(getattr(new, part)[rest], getattr(old, part)[rest])


def test_a_full_disk_is_an_error_of_the_request(llm: Any) -> None:
    """Last test of this engine, which the error ends; a server ends with its engine."""
    prompt = random_prompt(6)
    full = OSError(errno.ENOSPC, "No space left on device")
    with (
        mock.patch("safetensors.torch.save_file", side_effect=full) as saved,
        pytest.raises(OSError, match="No space left on device"),
    ):
        generate(llm, [prompt], together=False)
    assert saved.call_count == 1
