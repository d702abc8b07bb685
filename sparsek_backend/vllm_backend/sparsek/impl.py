"""The per-layer part: write new keys and values, then choose and attend each segment of a step."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from sparsek_backend.vllm_backend import checks
from sparsek_backend.vllm_backend.engine import current_engine
from sparsek_backend.vllm_backend.settings import first_layer
from sparsek_backend.vllm_backend.stats import STATS
from sparsek_kernels.paged.api import attend_segment, check_segment, write_index, write_kv
from sparsek_kernels.paged.attend import attend
from sparsek_kernels.paged.batch import PagedBatch
from sparsek_kernels.paged.checks import fit_both
from sparsek_kernels.paged.operands import PagedOperands
from sparsek_kernels.paged.plan import Segment, each_segment, plan_step, plan_tokens
from sparsek_kernels.paged.policy import StepPolicy

from . import fallback
from .flash import find_flash
from .metadata import SparseKMetadata, keeps_ranges_to_window, take_memory
from .pages import FP8_KV_CACHE, PageReader, PageViews
from .probe import PROBE
from .selection import LayerSite, select_by_model, select_by_settings
from .shards import attend_shards


class SparseKImpl(AttentionImpl):
    """Attention of one layer.  Holds no state of any request: all of that is in the pages."""

    can_return_lse_for_decode: bool = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        **options: Any,
    ) -> None:
        checks.refuse_options(options)
        if attn_type not in (AttentionType.DECODER, AttentionType.ENCODER_ONLY):
            raise NotImplementedError(
                f"SPARSEK: attention type {attn_type} is not served; leave --attention-backend out"
            )
        if sinks is not None and sinks.shape[0] != num_heads:
            raise ValueError(f"sinks: expected {num_heads} logits, got {sinks.shape[0]}")
        self.num_heads, self.head_size = num_heads, head_size
        self.scale = float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype, self.has_fp8_cache = kv_cache_dtype, kv_cache_dtype in FP8_KV_CACHE
        self.attn_type, self.sliding_window = attn_type, sliding_window
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.alibi_slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes)
        self.logits_soft_cap, self.sinks = logits_soft_cap or None, sinks
        self._engine = engine = current_engine()
        config = get_current_vllm_config()
        self._vllm_config = weakref.ref(config)
        self.first_layer = first_layer(config)  # of its model, whose layers may be a draft's
        self.batch_invariant = engine.resolved.batch_invariant
        self._time_selection = engine.resolved.config.time_selection
        self.dtype = engine.dtype
        checks.refuse_sdpa(self.fallback_reason, self.has_fp8_cache, self.batch_invariant)
        if self.may_select and engine.resolved.config.selects_blocks:
            engine.selects_blocks = True
        self.own = select_by_model(sliding_window)  # what this layer attends
        self.kept = self.own  # what the pages that it writes are chosen by
        self.flash = find_flash(self)
        self._pages = PageReader(head_size)

    @property
    def fallback_reason(self) -> str | None:
        """Why this layer's mask needs the SDPA fallback, or ``None``."""
        if self.attn_type == AttentionType.ENCODER_ONLY:
            return "encoder-only attention"
        if self.alibi_slopes is not None:
            return "ALiBi"
        if self.logits_soft_cap is not None:
            return "logits soft cap"
        return None

    @property
    def policy(self) -> StepPolicy:
        """What the layer's prompts and decoded tokens attend."""
        return self.own.policy

    @property
    def may_select(self) -> bool:
        """Whether the settings decide what this layer attends, rather than the model."""
        return self.sliding_window is None and self.fallback_reason is None

    def bind(
        self,
        layer_index: int,
        page_size: int,
        full_attention: bool,
        owner: Any,
        device: torch.device,
    ) -> StepPolicy:
        """Fix what the layer attends, once its place in the model and its pages are known.

        Args:
            full_attention: whether the model lets the layer attend every token.
            owner: the implementation that writes the pages, of this layer or of the one whose KV
                cache it shares.

        Raises:
            NotImplementedError: the layer selects blocks, and another backend writes its pages, or
                its heads have another size than those whose positions are undone.
        """
        if self.may_select and full_attention:
            site = LayerSite(layer_index, self.num_kv_heads, owner is self, device)
            self.own = select_by_settings(self._engine, site)
        policy = fit_both(self.policy, page_size)
        self.own = replace(self.own, policy=policy)
        if policy.selects_blocks:
            writes = isinstance(owner, SparseKImpl)
            checks.refuse_choosing(layer_index, self.head_size, self._engine.rotation, writes)
        # An owner that attends everything writes summaries too.
        for layer in (self, owner) if policy.selects_blocks else ():
            layer.kept = self.own
            index = self.own.indexers
            layer._pages = PageReader(self.head_size, index.reads_pages, index.page_bytes)
        return policy

    @property
    def kernel_key(self) -> tuple[Any, ...]:
        """A key by which layers share kernels: shape, rule, cache dtype and mask of the layer."""
        shape = (self.num_heads, self.num_kv_heads, self.head_size)
        rule = (self.own.policy, *(index and index.key for index in self.own.indexers))
        return (*rule, *shape, self.kv_cache_dtype, self.sinks is None, self.fallback_reason)

    def dummy_run(
        self, layer: Any, kv_cache: torch.Tensor, batch: PagedBatch, policy: StepPolicy
    ) -> None:
        """Write and attend a made-up step of zeros, so that its kernels are compiled.

        It counts nothing, and no slot is written.

        Args:
            layer: the layer, which has the scales of an fp8 cache.
            kv_cache: ``[pages, Hkv, page_size, C]``.
        """
        ranks = self.dcp_world_size  # a rank attends for the heads of all of them
        shape = (sum(batch.query_lens), self.num_heads * ranks, self.head_size)
        query = torch.zeros(shape, dtype=self.dtype, device=kv_cache.device)
        operands = self._operands(layer, query, self._pages.view(kv_cache), torch.empty_like(query))
        if self.sinks is not None:
            operands = replace(operands, sinks=self.sinks.repeat(ranks))
        if self.kv_sharing_target_layer_name is None:
            key, value = query.new_zeros(2, shape[0], self.num_kv_heads, self.head_size)
            slots = torch.full(shape[:1], -1, device=kv_cache.device)
            self.do_kv_cache_update(layer, key, value, kv_cache, slots)
        self._write_index(operands, batch)
        for mine, segment in each_segment(operands, self._segments(operands, batch, policy)):
            if self.flash is None or not self.flash.serves(segment):
                self._attend(mine, segment)

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write new tokens into their pages and keep the pages' summaries current.

        Args:
            key: ``[T, Hkv, D]``, padding rows allowed at the end.
            value: ``[T, Hkv, D]``.
            kv_cache: ``[pages, Hkv, page_size, C]``.
            slot_mapping: ``[T]`` int64, -1 for padding.
        """
        if self.attn_type == AttentionType.ENCODER_ONLY:
            return
        pages = self._pages.cached(kv_cache)
        k_scale, v_scale = self._scales(layer)
        write_kv(
            key,
            value,
            pages.keys,
            pages.values,
            pages.summary if self.kept.indexers.written_with_keys else None,
            slot_mapping,
            k_scale=k_scale,
            v_scale=v_scale,
            pages=pages.located,
        )

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
        """Attend the new tokens of a step; the keys of decoders are in the cache already.

        Args:
            query: ``[T, Hq, D]``.
            key: ``[T, Hkv, D]``, which encoders attend.
            value: ``[T, Hkv, D]``, which encoders attend.
            kv_cache: ``[pages, Hkv, page_size, C]``.
            attn_metadata: the step, or ``None`` while vLLM profiles.
            output: ``[T, Hq, D]``, written.

        Raises:
            NotImplementedError: quantised output was asked for.
        """
        checks.refuse_quantised_output(output_scale, output_block_scale)
        if attn_metadata is None:
            if query.is_cuda and not self._engine.dummy_run_done:
                self._engine.dummy_run_done = True
                take_memory(self._vllm_config(), query.device)
            return output.zero_()
        STATS.forward_calls += 1
        tokens = slice(attn_metadata.num_actual_tokens)
        whole = tokens.stop == query.shape[0]  # a slice takes microseconds
        query, out = (query, output) if whole else (query[tokens], output[tokens])
        if self.attn_type == AttentionType.ENCODER_ONLY:
            fallback.attend_encoder(self, (query, key[tokens], value[tokens]), attn_metadata, out)
            return output
        operands = self._operands(layer, query, self._pages.cached(kv_cache), out)
        shards, batch = attn_metadata.shards, attn_metadata.batch
        self._write_index(operands, shards.batch if shards else batch)
        if shards is not None:
            attend_shards(operands, kv_cache, shards, self.own, self._pages)
        elif self.fallback_reason is None:
            segments = self._segments(operands, batch, self.policy, attn_metadata.seq_lens)
            for mine, segment in each_segment(operands, segments):
                self._attend(mine, segment)
        if self.fallback_reason or attn_metadata.mm_prefix_range:
            fallback.attend_pages(self, operands, attn_metadata, keeps_ranges_to_window(layer))
        return output

    def _operands(
        self, layer: Any, query: torch.Tensor, pages: PageViews, out: torch.Tensor
    ) -> PagedOperands:
        """The tensors of one step, as the kernels take them."""
        rest = (self.scale, pages.summary, self.sinks, *self._scales(layer))
        return PagedOperands(query, pages.keys, pages.values, out, *rest, pages=pages.located)

    def _segments(
        self, operands: PagedOperands, batch: PagedBatch, policy: StepPolicy, seq_lens: Any = None
    ) -> Iterable[Segment]:
        """The step's segments, made once for all layers that attend by one policy."""
        if not self.batch_invariant:
            return plan_step(batch, policy, seq_lens)
        tokens, heads = operands.q.shape[:2]
        return plan_tokens(batch, policy.decode, heads, tokens, operands.page_size)

    def _attend(self, operands: PagedOperands, segment: Segment) -> None:
        """Choose and attend: dense prefills by FlashAttention, all else by the paged kernels."""
        if self.flash is not None and self.flash.serves(segment):
            self.flash(operands, segment)
            return
        index = self.own.indexers.of(segment)
        timed = index is not None and not segment.decodes and self._time_selection
        if index is None or not (timed and PROBE.is_due(operands.q.device)):
            attend_segment(operands, segment, index)
            return
        check_segment(operands, segment, index)
        halves = partial(index.select, operands, segment), partial(attend, operands, segment)
        PROBE.run(*halves, operands.q.device)

    def _scales(self, layer: Any) -> tuple[float, float]:
        """``(k_scale, v_scale)`` of an fp8 cache, else ``(1.0, 1.0)``."""
        return checks.fp8_scales(layer) if self.has_fp8_cache else (1.0, 1.0)

    def _write_index(self, operands: PagedOperands, batch: PagedBatch) -> None:
        """Write what an indexer keeps in the pages of a step, where ``write_kv`` does not.

        Where the step has a rotation, that undoes the keys' positions, which are known here only.
        """
        index, rule = self.kept.indexers.written_once, self.kept.policy
        if index is not None and self.kv_sharing_target_layer_name is None:
            policy = rule.decode if rule.decode.selects_blocks else rule.prefill
            write_index(operands.k_cache, operands.v_cache, operands.summary, batch, policy, index)
