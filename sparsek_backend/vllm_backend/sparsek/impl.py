"""The per-layer part: write new keys and values, split the step, attend each segment."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from sparsek_backend.vllm_backend import compat
from sparsek_backend.vllm_backend.checks import fp8_scales, refuse_quantised_output, refuse_sdpa
from sparsek_backend.vllm_backend.engine import current_engine
from sparsek_backend.vllm_backend.stats import STATS
from sparsek_kernels.fallback import FallbackMask, paged_fallback, sdpa_fallback
from sparsek_kernels.paged.api import (
    paged_attention,
    select_blocks,
    write_gate_keys,
    write_kv,
    write_means,
)
from sparsek_kernels.paged.batch import PagedBatch
from sparsek_kernels.paged.checks import fit_pages
from sparsek_kernels.paged.infllm.means import keeps_means
from sparsek_kernels.paged.lists import block_lists
from sparsek_kernels.paged.plan import Segment, segments
from sparsek_kernels.paged.policy import SelectionPolicy
from sparsek_kernels.paged.seer.gates import Gates

from .flash import FlashPrefill
from .metadata import SparseKMetadata
from .pages import FP8_KV_CACHE, PageViews, page_rows, view_pages
from .probe import PROBE
from .shards import ShardedStep, attend_decodes, attend_prefills


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
        use_alibi_sqrt: bool = False,
    ) -> None:
        if attn_type not in (AttentionType.DECODER, AttentionType.ENCODER_ONLY):
            raise NotImplementedError(
                f"SPARSEK: attention type {attn_type} is not served; leave --attention-backend out"
            )
        if use_alibi_sqrt:
            raise NotImplementedError(
                "SPARSEK: ALiBi with square-root distances is not served; "
                "leave --attention-backend out"
            )
        if sinks is not None and sinks.shape[0] != num_heads:
            raise ValueError(f"sinks: expected {num_heads} logits, got {sinks.shape[0]}")
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.has_fp8_cache = kv_cache_dtype in FP8_KV_CACHE
        self.attn_type = attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sliding_window = sliding_window
        self.alibi_slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes)
        self.logits_soft_cap = logits_soft_cap or None
        self.sinks = sinks
        engine = current_engine()
        self._settings = engine.resolved.config
        self.batch_invariant = engine.resolved.batch_invariant
        self.dtype = engine.dtype
        refuse_sdpa(self.fallback_reason, self.has_fp8_cache, self.batch_invariant)
        if self.may_select and self._settings.selects_blocks:
            engine.selects_blocks = True
        self._pattern, self._gate_file = engine.pattern, engine.gates
        self.policy = self.model_policy()
        self.flash = self._find_flash()
        self.summaries = False  # in the layer's pages; decided with the policy
        self.means = False  # or gate keys, as those summaries: written once a step
        self.gates: Gates | None = None  # of this rank's KV heads, in mode seer
        self.lists: torch.Tensor | None = None  # which blocks prefills attend in mode pattern
        self._pages: PageViews | None = None
        self._pages_key: tuple[int, tuple[int, ...]] | None = None

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
    def may_select(self) -> bool:
        """Whether the settings decide what this layer attends, rather than the model."""
        return self.sliding_window is None and self.fallback_reason is None

    def _find_flash(self) -> FlashPrefill | None:
        """FlashAttention for dense prefills; over an fp8 cache it would round the queries too.

        Ranks that hold the context between them attend every prefill by the paged kernels.
        Where results must not depend on the batch, prefills and decodes share one kernel instead.
        """
        if self.batch_invariant or self.has_fp8_cache or self.dcp_world_size > 1:
            return None
        if self.fallback_reason is not None or torch.get_default_dtype() == torch.float32:
            return None
        found = compat.flash_attention(self.head_size, self.sinks is not None)
        return None if found is None else FlashPrefill(*found)

    def model_policy(self) -> SelectionPolicy:
        """Return what the model itself lets this layer attend."""
        if self.sliding_window is None:
            return SelectionPolicy()
        return SelectionPolicy(num_sink=0, window_size=self.sliding_window)

    def bind(
        self,
        layer_index: int,
        page_size: int,
        full_attention: bool,
        owner: Any,
        device: torch.device,
    ) -> SelectionPolicy:
        """Fix the layer's policy, once its place in the model and its pages are known.

        Args:
            layer_index: position of the layer in the model.
            page_size: tokens in one KV page.
            full_attention: whether the layer's pages keep every token.
            owner: the implementation that writes the pages: this one, or the one of the layer whose
                KV cache this layer shares.
            device: where the layer runs.

        Returns:
            The layer's policy.

        Raises:
            NotImplementedError: the layer selects blocks, and another backend writes its pages.
        """
        policy = self.model_policy()
        if self.may_select and full_attention:
            policy = self._settings.policy_for(layer_index)
        policy = fit_pages(policy, page_size)
        if self.batch_invariant:
            policy = policy.per_token()
        self.policy = policy
        if policy.selects_blocks:
            if not isinstance(owner, SparseKImpl):
                raise NotImplementedError(
                    "SPARSEK: a layer that selects blocks shares the KV cache of another backend's "
                    "layer, which writes no block summaries; select SPARSEK for every layer"
                )
            if self._pattern is not None and layer_index in self._pattern.entries:
                entries = self._pattern.entries[layer_index]
                own = entries[self._own_heads(len(entries))]
                self.lists = block_lists(own, policy).to(device)
            once_a_step = keeps_means(policy, device)
            if policy.ranking == "seer" and self._gate_file is not None:
                own_heads = self._own_heads(self._gate_file.num_kv_heads)
                self.gates = self._gate_file.layer(layer_index, own_heads, owner is self, device)
                once_a_step = True
            for layer in (self, owner):  # an owner that attends everything writes summaries too
                layer.summaries, layer.means = True, once_a_step
                layer._pages = layer._pages_key = None
        return policy

    def _own_heads(self, total: int) -> slice:
        """Which of a layer's ``total`` KV heads this rank has; ranks beyond them share one."""
        rank, ranks = compat.tensor_rank()
        first = rank * total // ranks
        return slice(first, first + self.num_kv_heads)

    @property
    def kernel_key(self) -> tuple[Any, ...]:
        """A key by which layers share kernels: shape, rule, cache dtype and mask of the layer."""
        shape = (self.num_heads, self.num_kv_heads, self.head_size)
        kind = (self.sinks is None, self.lists is None, self.fallback_reason)
        return (self.policy, *shape, self.kv_cache_dtype, *kind)

    def dummy_run(self, layer: Any, kv_cache: torch.Tensor, batch: PagedBatch) -> None:
        """Attend a made-up step of zeros, so that its kernels are compiled; counts nothing.

        Args:
            layer: the layer, which has the scales of an fp8 cache.
            kv_cache: ``[pages, Hkv, page_size, C]``.
            batch: the step, of decodes or of prefills.
        """
        heads = self.num_heads * self.dcp_world_size  # a rank attends for all of them
        shape = (sum(batch.query_lens), heads, self.head_size)
        query = torch.zeros(shape, dtype=self.dtype, device=kv_cache.device)
        policy = self.decode_policy if batch.num_decodes else self.policy
        if self.flash is not None:  # which takes the last queries
            policy = replace(policy, dense_last=0)
        pages, out = self._view(kv_cache), torch.empty_like(query)
        self._store_means(pages, batch)
        sinks = None if self.sinks is None else self.sinks.repeat(self.dcp_world_size)
        scales = self._scales(layer)
        self._attend(Segment(batch, policy), query, pages, scales, sinks, out)

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
        pages = self._cached_view(kv_cache)
        k_scale, v_scale = self._scales(layer)
        write_kv(
            key,
            value,
            pages.keys,
            pages.values,
            None if self.means else pages.summary,
            slot_mapping,
            k_scale=k_scale,
            v_scale=v_scale,
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

        Returns:
            ``output``.

        Raises:
            NotImplementedError: quantised output was asked for.
        """
        refuse_quantised_output(output_scale, output_block_scale)
        if attn_metadata is None:
            return output.zero_()
        STATS.forward_calls += 1
        tokens = slice(attn_metadata.num_actual_tokens)
        query, out = query[tokens], output[tokens]
        if self.means:
            self._store_means(self._cached_view(kv_cache), attn_metadata.batch)
        if self.attn_type == AttentionType.ENCODER_ONLY:
            self._attend_encoder(query, key[tokens], value[tokens], attn_metadata, out)
        elif reason := self.fallback_reason or attn_metadata.fallback_reason:
            self._attend_by_sdpa(query, kv_cache, attn_metadata, reason, out)
        elif attn_metadata.shards is not None:
            self._attend_shards(query, kv_cache, attn_metadata.shards, out)
        else:
            pages, scales = self._cached_view(kv_cache), self._scales(layer)
            for segment in self._split(attn_metadata):
                self._attend(segment, query, pages, scales, self.sinks, out)
        return output

    @property
    def decode_policy(self) -> SelectionPolicy:
        """The policy of decodes: the layer's own, or everything where prefills alone select."""
        if self._settings.dense_decode and self.policy.selects_blocks:
            return SelectionPolicy(sel_block_size=self.policy.sel_block_size)
        return self.policy

    def _split(self, step: SparseKMetadata) -> tuple[Segment, ...]:
        """The step whole, or split into what FlashAttention and what the paged kernels attend."""
        decodes = self.decode_policy
        dense_decode = step.batch.num_decodes > 0 and decodes is not self.policy
        if not dense_decode and (self.flash is None or not step.batch.num_prefills):
            return (Segment(step.batch, self.policy),)
        parts = segments(step.batch, self.policy, step.seq_lens)
        if dense_decode:  # the first part is the decodes
            parts = (replace(parts[0], policy=decodes), *parts[1:])
        return parts

    def _attend(
        self,
        segment: Segment,
        query: torch.Tensor,
        pages: PageViews,
        scales: tuple[float, float],
        sinks: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        query, out = query[segment.rows], out[segment.rows]
        if self.flash is not None and self.flash.serves(segment):
            self.flash(
                query,
                pages.keys,
                pages.values,
                segment,
                softmax_scale=self.scale,
                sinks=sinks,
                out=out,
            )
            return
        batch, policy = segment.batch, segment.policy
        lists = self.lists if policy.selects_blocks else None
        gates = self.gates if policy.selects_blocks else None
        attend = partial(
            paged_attention,
            query,
            pages.keys,
            pages.values,
            batch,
            policy,
            softmax_scale=self.scale,
            k_summary=pages.summary,
            sinks=sinks,
            out=out,
            k_scale=scales[0],
            v_scale=scales[1],
            batch_invariant=self.batch_invariant,
            lists=lists,
            gates=gates,
        )
        if not (batch.num_prefills and policy.selects_blocks and PROBE.is_due(query.device)):
            attend()
            return
        select = partial(
            select_blocks,
            query,
            pages.keys,
            batch,
            policy,
            k_summary=pages.summary,
            softmax_scale=self.scale,
            k_scale=scales[0],
            lists=lists,
            gates=gates,
        )
        PROBE.run(select, attend, query.device)

    def _attend_shards(
        self, query: torch.Tensor, kv_cache: torch.Tensor, step: ShardedStep, out: torch.Tensor
    ) -> None:
        query = step.ranks.gather_heads(query)
        if step.decodes.num_decodes:
            attend_decodes(
                query,
                self._cached_view(kv_cache),
                step,
                self.decode_policy,
                softmax_scale=self.scale,
                sinks=self.sinks,
                out=out,
            )
        rows = page_rows(kv_cache, self.head_size, self.summaries)
        for part in step.prefills:
            attend_prefills(
                query,
                self._view(part.gather(kv_cache, rows, step.ranks)),
                part.batch,
                step.ranks,
                self.policy,
                softmax_scale=self.scale,
                sinks=self.sinks,
                lists=self.lists if self.policy.selects_blocks else None,
                out=out,
            )

    def _attend_by_sdpa(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        step: SparseKMetadata,
        reason: str,
        out: torch.Tensor,
    ) -> None:
        pages = self._cached_view(kv_cache)
        paged_fallback(
            query,
            pages.keys,
            pages.values,
            step.batch,
            self._fallback_mask(causal=True),
            bidirectional_ranges=step.bidirectional_ranges,
            reason=reason,
            out=out,
        )

    def _attend_encoder(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        step: SparseKMetadata,
        out: torch.Tensor,
    ) -> None:
        offsets = step.query_offsets
        if offsets is None:
            raise ValueError("causal: expected False for encoder-only attention, got True")
        sdpa_fallback(
            query,
            key,
            value,
            self._fallback_mask(causal=False),
            cu_seqlens_q=offsets,
            cu_seqlens_k=offsets,
            reason="encoder-only attention",
            out=out,
        )

    def _fallback_mask(self, causal: bool) -> FallbackMask:
        """The layer's mask and logits, as the SDPA fallback takes them."""
        return FallbackMask(
            causal=causal,
            softmax_scale=self.scale,
            window_size=self.sliding_window,
            alibi_slopes=self.alibi_slopes,
            logits_soft_cap=self.logits_soft_cap,
            sinks=self.sinks,
        )

    def _scales(self, layer: Any) -> tuple[float, float]:
        """``(k_scale, v_scale)`` of an fp8 cache, else ``(1.0, 1.0)``."""
        return fp8_scales(layer) if self.has_fp8_cache else (1.0, 1.0)

    def _store_means(self, pages: PageViews, batch: PagedBatch) -> None:
        """Keep means of cells, or keys of blocks, that a step completes in pages of this layer.

        They are of keys without positions where the step has a rotation, so that they cannot be
        written with the keys, which vLLM hands over without positions of theirs.
        """
        if not self.means or pages.summary is None or self.kv_sharing_target_layer_name is not None:
            return
        if self.gates is not None:
            write_gate_keys(pages.keys, pages.summary, batch, self.policy, self.gates)
        else:
            write_means(pages.keys, pages.summary, batch)

    def _view(self, kv_cache: torch.Tensor) -> PageViews:
        """Views of a cache: K, V and, where the layer's pages keep them, summaries."""
        return view_pages(kv_cache, self.head_size, self.summaries)

    def _cached_view(self, kv_cache: torch.Tensor) -> PageViews:
        """:meth:`_view` of the layer's own cache, made once for each cache tensor."""
        key = (kv_cache.data_ptr(), kv_cache.shape)
        if self._pages is None or self._pages_key != key:
            self._pages, self._pages_key = self._view(kv_cache), key
        return self._pages
