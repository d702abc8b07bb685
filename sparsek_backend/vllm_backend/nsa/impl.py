"""Attention of one natively sparse layer: write K and V, compress, attend by three branches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import AttentionImpl

from sparsek_backend.vllm_backend.checks import refuse_quantised_output
from sparsek_backend.vllm_backend.engine import current_engine
from sparsek_backend.vllm_backend.settings import first_layer, nsa_section
from sparsek_backend.vllm_backend.stats import STATS
from sparsek_backend.vllm_backend.step import StepMetadata
from sparsek_kernels.nsa.paged.api import dummy_run, nsa_paged_attention
from sparsek_kernels.nsa.paged.cache import Compression, NSAPages
from sparsek_kernels.paged.api import write_kv

from .pages import view_nsa_pages


class NSAImpl(AttentionImpl):
    """Attention of one layer: ``Hq`` query heads in, the three branches' outputs out."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: None,
        sliding_window: None,
        kv_cache_dtype: str,
        logits_soft_cap: None,
        attn_type: str,
        kv_sharing_target_layer_name: None,
        *,
        make_compression: Callable[[], Compression],
    ) -> None:
        """Take what vLLM passes to every implementation.

        Args:
            num_heads: three times the query heads: vLLM wants a multiple of the cache's heads.
            num_kv_heads: heads of the cache, all branches together.
            alibi_slopes: unused, and so are the other features of dense attention.
            kv_cache_dtype: the model's own, checked while the engine is configured.
        """
        self.num_heads = num_heads // 3
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self._engine = current_engine()
        self.config = nsa_section(self._engine.resolved)
        self._make_compression = make_compression
        self._compression: Compression | None = None
        config = get_current_vllm_config()
        self.first_layer = first_layer(config)  # of its model, which may be a draft
        self._max_model_len: int = config.model_config.max_model_len
        self._pages: NSAPages | None = None
        self._pages_key: tuple[int, tuple[int, ...]] | None = None

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Take the compression's weights, and what can be computed from them once."""
        before, made = self._compression, self._make_compression()
        if before is None:
            _ = made.constants
        else:
            made.keep_addresses(before)
        self._compression = made

    def renew_weights(self) -> None:
        """Take weights that were loaded anew while the engine runs, as in training."""
        if self._compression is not None:
            self.process_weights_after_loading(self._engine.dtype)

    @property
    def compression(self) -> Compression:
        """The layer's compression, with loaded weights."""
        if self._compression is None:
            self.process_weights_after_loading(self._engine.dtype)
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
        attn_metadata: StepMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compress the blocks that the step's tokens complete, and attend.

        Args:
            query: ``[T, Hq, D]``.
            output: ``[3 * T, Hq, D]``, written: of each token its compressed, selected and sliding
                attention.

        Raises:
            NotImplementedError: quantised output was asked for.
        """
        refuse_quantised_output(output_scale, output_block_scale)
        if attn_metadata is None:
            self._dummy_run(query)
            return output.zero_()
        STATS.forward_calls += 1
        tokens = slice(attn_metadata.num_actual_tokens)
        pages, batch, spec = self._view(kv_cache), attn_metadata.batch, self.config.spec
        nsa_paged_attention(
            query[tokens],
            pages,
            batch,
            spec,
            self.compression,
            window_size=self.config.window_size,
            softmax_scale=self.scale,
            out=output.unflatten(0, (-1, 3))[tokens],
        )
        return output

    def _dummy_run(self, query: torch.Tensor) -> None:
        """While vLLM measures memory: gather and attend a sequence of the longest length."""
        if self._engine.dummy_run_done or not query.is_cuda:
            return
        self._engine.dummy_run_done = True
        heads = self.num_kv_heads // self.config.num_branches
        dummy_run(query, heads, self._max_model_len, self.config.spec)

    def _view(self, kv_cache: torch.Tensor) -> NSAPages:
        """Return the cache's views, made once for each cache tensor."""
        key = (kv_cache.data_ptr(), tuple(kv_cache.shape))
        if self._pages is None or self._pages_key != key:
            self._pages, self._pages_key = view_nsa_pages(kv_cache, self.config), key
        return self._pages
