"""Layers of natively sparse models: their backend, pages, metadata and attention.

K and V of the three branches are heads of one cache (one K and V with ``shared_kv``).  Compressed
keys and values live behind them in the page in which their block ends, in bytes that vLLM accounts
for; see :mod:`sparsek_kernels.nsa.paged`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from vllm.config import get_current_vllm_config, get_layers_from_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.utils import extract_layer_index

from sparsek_backend.nn.config import NSAConfig
from sparsek_kernels.nsa.paged.api import compress_new_blocks, nsa_paged_attention, rehearse_prefill
from sparsek_kernels.nsa.paged.cache import Compression, NSAPages
from sparsek_kernels.paged.api import write_kv
from sparsek_kernels.paged.policy import SelectionPolicy

from . import compat
from .accounting import nsa_attended, query_positions
from .backend import SparseKBackend
from .impl import SparseKImpl, engine_nsa, refuse_quantised_output
from .metadata import Int64, SparseKMetadata, SparseKMetadataBuilder
from .report import describe_nsa_layers
from .settings import check_page_size
from .stats import STATS

logger = init_logger(f"vllm.{__name__}")  # under vLLM's handlers and level


def tail_elements(config: NSAConfig, num_kv_heads: int, page_size: int, head_dim: int) -> int:
    """Elements of the compressed rows behind a page's K and V.

    Args:
        num_kv_heads: heads of the cache, those of all branches.
    """
    heads = num_kv_heads // config.num_branches
    return heads * -(-page_size // config.cmp_stride) * 2 * head_dim


def view_nsa_pages(kv_cache: torch.Tensor, config: NSAConfig) -> NSAPages:
    """Views of a layer's cache ``[pages, branches * Hkv, page_size, 2 * D]``.

    Raises:
        ValueError: the pages have no room for the compressed rows.
    """
    pages, heads, page_size, width = kv_cache.shape
    used = heads * page_size * width
    tail = tail_elements(config, heads, page_size, width // 2)
    stride = kv_cache.stride(0)
    if stride < used + tail:
        raise ValueError(
            f"kv_cache: expected pages of at least {used + tail} elements, so that compressed "
            f"keys and values fit behind K and V, got a page stride of {stride}"
        )
    branch_heads = heads // config.num_branches
    shape = (pages, branch_heads, page_size // config.cmp_stride, width)
    compressed = kv_cache.as_strided(
        shape, (stride, shape[2] * width, width, 1), kv_cache.storage_offset() + used
    )
    branches = kv_cache.split(branch_heads, dim=1)
    branches = branches * 3 if config.shared_kv else branches
    views = [x for part in (*branches, compressed) for x in part.split(width // 2, dim=-1)]
    return NSAPages(*views)


class NSAImpl(SparseKImpl):
    """Attention of one layer: ``3 * Hq`` query heads in, the three branches' outputs out."""

    def __init__(self, *args: Any, make_compression: Callable[[], Compression], **kw: Any) -> None:
        super().__init__(*args, **kw)
        self.config = engine_nsa()
        self._make_compression = make_compression
        self._compression: Compression | None = None
        self._max_model_len: int = get_current_vllm_config().model_config.max_model_len
        self._nsa_pages: NSAPages | None = None
        self._nsa_key: tuple[int, tuple[int, ...]] | None = None

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Take the compression's weights, and what can be computed from them once."""
        self._compression = self._make_compression()
        _ = self._compression.constants

    @property
    def compression(self) -> Compression:
        """The layer's compression, with loaded weights."""
        if self._compression is None:
            self.process_weights_after_loading(self.dtype)
        if self._compression is None:
            raise RuntimeError("compression: expected loaded weights")
        return self._compression

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write new tokens ``[T, branches * Hkv, D]`` into their pages."""
        keys, values = kv_cache.split(self.head_size, dim=-1)
        write_kv(key, value, keys, values, None, slot_mapping)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: SparseKMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compress what the step's tokens complete, and attend.

        Args:
            query: ``[T, 3 * Hq, D]``, the queries three times.
            output: ``[T, 3 * Hq, D]``, written: compressed, selected and sliding attention.

        Raises:
            NotImplementedError: quantised output was asked for.
        """
        refuse_quantised_output(output_scale, output_block_scale)
        if attn_metadata is None:
            self._rehearse(query)
            return output.zero_()
        STATS.forward_calls += 1
        tokens, heads = attn_metadata.num_actual_tokens, self.num_heads // 3
        pages, batch, spec = self._view(kv_cache), attn_metadata.batch, self.config.spec
        compress_new_blocks(pages, batch, spec, self.compression)
        nsa_paged_attention(
            query[:tokens, :heads],
            pages,
            batch,
            spec,
            window_size=self.config.window_size,
            softmax_scale=self.scale,
            out=output[:tokens].unflatten(1, (3, heads)),
        )
        return output

    def _rehearse(self, query: torch.Tensor) -> None:
        """While vLLM measures memory: what gathering and attending a longest sequence takes."""
        if self._engine.rehearsed or not query.is_cuda:
            return
        self._engine.rehearsed = True
        heads = self.num_kv_heads // self.config.num_branches
        rehearse_prefill(
            query[:, : self.num_heads // 3], heads, self._max_model_len, self.config.spec
        )

    def _view(self, kv_cache: torch.Tensor) -> NSAPages:
        """Return the cache's views, made once for each cache tensor."""
        key = (kv_cache.data_ptr(), tuple(kv_cache.shape))
        if self._nsa_pages is None or self._nsa_key != key:
            self._nsa_pages = view_nsa_pages(kv_cache, self.config)
            self._nsa_key = key
        return self._nsa_pages


class NSAMetadataBuilder(SparseKMetadataBuilder):
    """The steps of layers that all follow the model's ``nsa`` section."""

    def _bind_layers(
        self, spec: Any, layer_names: list[str], vllm_config: Any
    ) -> Counter[SelectionPolicy]:
        """Tell what the layers do; none of them follows a selection policy."""
        check_page_size(self.resolved, spec.block_size)
        self.config = engine_nsa()
        layers = get_layers_from_vllm_config(vllm_config, Attention, layer_names)
        self.num_layers = len(layers)
        tail = tail_elements(self.config, spec.num_kv_heads, spec.block_size, spec.head_size)
        share = tail / (spec.num_kv_heads * spec.block_size * 2 * spec.head_size)
        indices = [extract_layer_index(name) for name in layers]
        logger.info_once(
            describe_nsa_layers(indices, self.config, spec.block_size, self.device.type, share)
        )
        return Counter()

    def _assemble(self, common: Any) -> SparseKMetadata:
        """Translate vLLM's metadata; prefills are gathered, so the host needs their lengths."""
        metadata = super()._assemble(common)
        if self.on_host or not metadata.batch.num_prefills:
            return metadata
        lengths = compat.prefill_seq_lens(common)[: common.num_reqs]
        return replace(
            metadata, batch=replace(metadata.batch, seq_lens_host=tuple(lengths.tolist()))
        )

    def _count(self, seq_lens: Int64, query_lens: Int64, num_decodes: int) -> tuple[int, int]:
        """Count attended keys, compressed ones included, and context keys over all layers."""
        position = query_positions(seq_lens, query_lens)
        attended = int(nsa_attended(self.config, position).sum())
        return attended * self.num_layers, int((position + 1).sum()) * self.num_layers


class NSABackend(SparseKBackend):
    """SPARSEK for the layers of natively sparse models, which name this class themselves."""

    @staticmethod
    def get_impl_cls() -> type[NSAImpl]:
        """Return the per-layer implementation."""
        return NSAImpl

    @staticmethod
    def get_builder_cls() -> type[NSAMetadataBuilder]:
        """Return the builder of the per-step metadata."""
        return NSAMetadataBuilder

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """False: prefills and decodes go through kernels that round differently."""
        return False

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Enlarge every page by its compressed keys and values."""
        elements = tail_elements(engine_nsa(), spec.num_kv_heads, spec.block_size, spec.head_size)
        return compat.pad_page(spec, elements * spec.dtype.itemsize)
