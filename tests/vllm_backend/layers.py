"""One attention layer as vLLM builds it, its cache, and steps through it, without an engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.vllm_backend.tiny_models import make_tiny_model

PAGE, HEADS, KV_HEADS, DIM = 64, 4, 2, 32
SETTINGS = {
    "dense_below": 0,
    "num_sink": 16,
    "window_size": 32,
    "sel_block_size": 32,
    "top_k": 2,
    "decode_tokens": 64,
    "query_tile": 32,
}


def make_config(folder: Path, **options: Any) -> Any:
    """The configuration of an engine of a tiny model."""
    from vllm.engine.arg_utils import EngineArgs

    model: Path = make_tiny_model("llama", folder)
    options = {"additional_config": {"sparsek": SETTINGS}, "dtype": "float32", **options}
    return EngineArgs(
        model=str(model), attention_backend="SPARSEK", block_size=PAGE, **options
    ).create_engine_config()


@contextmanager
def building(config: Any) -> Iterator[Any]:
    """As while vLLM builds a model; its layers are forgotten afterwards."""
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(config):
        yield config
    config.compilation_config.static_forward_context.clear()


def make_layer(index: int = 0, head_size: int = DIM, **options: Any) -> Any:
    """vLLM's own attention layer, as a model builds it."""
    from vllm.model_executor.layers.attention import Attention

    from sparsek_backend.vllm_backend.sparsek.backend import SparseKBackend

    return Attention(
        HEADS,
        head_size,
        head_size**-0.5,
        num_kv_heads=KV_HEADS,
        prefix=f"model.layers.{index}.attn",
        attn_backend=SparseKBackend,
        **options,
    )


def make_spec(layer: Any, config: Any) -> Any:
    from vllm.v1.worker import utils

    spec = layer.get_kv_cache_spec(config)
    if hasattr(utils, "customize_attention_spec"):  # vLLM 0.32 and later
        spec = utils.customize_attention_spec(layer.attn_backend, spec)
    # Before, window layers started from vLLM's smallest page.
    return spec if spec.block_size == PAGE else replace(spec, block_size=PAGE)


def make_builder(layer: Any, config: Any, device: str = "cpu") -> Any:
    from sparsek_backend.vllm_backend.sparsek.metadata import SparseKMetadataBuilder

    spec = make_spec(layer, config)
    return SparseKMetadataBuilder(spec, [layer.layer_name], config, torch.device(device)), spec


def make_cache(spec: Any, pages: int, device: str = "cpu") -> torch.Tensor:
    """A layer's cache as vLLM lays it out, every value NaN in any format."""
    from sparsek_backend.vllm_backend import compat

    itemsize = spec.dtype.itemsize
    stride, content = spec.page_size_bytes // itemsize, compat.content_bytes(spec) // itemsize
    raw = torch.full((pages * spec.page_size_bytes,), 255, dtype=torch.uint8, device=device)
    shape = (pages, KV_HEADS, PAGE, content)
    return raw.view(spec.dtype).as_strided(shape, (stride, PAGE * content, content, 1))


def keys_and_values(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V ``[pages, Hkv, page_size, D]`` of a cache."""
    from sparsek_backend.vllm_backend.sparsek.pages import view_pages

    pages = view_pages(cache, DIM, False)
    return pages.keys, pages.values


def make_step(
    seq_lens: list[int], query_lens: list[int], pages: int, device: str = "cpu", **fields: Any
) -> Any:
    """vLLM's metadata of a step whose pages are taken from the end of the pool."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    offsets = torch.tensor([0, *query_lens]).cumsum(0).int()
    free = iter(range(pages - 1, 0, -1))
    table = torch.zeros(len(seq_lens), pages, dtype=torch.int32)
    slots = []
    for row, (length, new) in enumerate(zip(seq_lens, query_lens, strict=True)):
        for page in range(-(-length // PAGE)):
            table[row, page] = next(free)
        positions = torch.arange(length - new, length)
        slots.append(table[row, positions // PAGE].long() * PAGE + positions % PAGE)
    lengths = torch.tensor(seq_lens, dtype=torch.int32)
    if device != "cpu":
        fields["seq_lens_cpu_upper_bound"] = lengths
    return CommonAttentionMetadata(
        query_start_loc=offsets.to(device),
        query_start_loc_cpu=offsets,
        seq_lens=lengths.to(device),
        num_reqs=len(seq_lens),
        num_actual_tokens=sum(query_lens),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        block_table_tensor=table.to(device),
        slot_mapping=torch.cat(slots).to(device),
        **fields,
    )


def write(layer: Any, cache: torch.Tensor, step: Any, seed: int = 0) -> list[torch.Tensor]:
    """Write K and V of a step as vLLM does, with padding rows; returns q, k and v."""
    generator = torch.Generator().manual_seed(seed)
    padded = step.num_actual_tokens + 3
    device = cache.device
    q, k, v = (
        torch.randn(padded, heads, DIM, generator=generator).to(device)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    slots = torch.cat([step.slot_mapping, torch.full((3,), -1, device=device)])
    layer.impl.do_kv_cache_update(layer, k, v, cache, slots)
    return [q, k, v]


def run(layer: Any, builder: Any, cache: torch.Tensor, step: Any, seed: int = 0) -> Any:
    """Write and attend as vLLM does, with padding rows; returns metadata, q, k, v and output."""
    metadata = builder.build(0, step)
    q, k, v = write(layer, cache, step, seed)
    output = torch.full_like(q, float("nan"))
    assert layer.impl.forward(layer, q, k, v, cache, metadata, output) is output
    real = step.num_actual_tokens
    assert output[real:].isnan().all()
    return metadata, q[:real], k[:real], v[:real], output[:real]
