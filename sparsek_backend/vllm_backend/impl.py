"""The per-layer part: write new keys and values, attend.  One or a few kernel calls each."""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from sparsek_backend.config import ResolvedConfig
from sparsek_backend.nn.config import NSAConfig
from sparsek_kernels.fallback import paged_fallback, sdpa_fallback
from sparsek_kernels.paged.api import paged_attention, write_kv
from sparsek_kernels.paged.batch import PagedBatch
from sparsek_kernels.paged.policy import ScoreKind, SelectionPolicy

from . import compat
from .dense_prefill import FlashPrefill, Run
from .metadata import SparseKMetadata
from .pages import FP8_KV_CACHE, PageViews, summary_dtype, view_pages
from .settings import engine_config
from .stats import STATS


@dataclass
class _Engine:
    """The engine whose layers are being built in this process.

    Args:
        vllm_config: its configuration.
        resolved: its settings.
        selects_blocks: whether any layer selects blocks by score.
        rehearsed: whether a natively sparse layer has shown what memory a prefill takes.
    """

    vllm_config: weakref.ref[Any]
    resolved: ResolvedConfig
    selects_blocks: bool = False
    rehearsed: bool = False


_engine: _Engine | None = None


def _current_engine() -> _Engine:
    """Return the state shared by the layers of the engine that is being built."""
    global _engine
    vllm_config = get_current_vllm_config()
    if _engine is None or _engine.vllm_config() is not vllm_config:
        _engine = _Engine(weakref.ref(vllm_config), engine_config(vllm_config))
    return _engine


def engine_selects_blocks() -> bool:
    """Whether a layer of the engine last built in this process selects blocks by score."""
    return _engine is not None and _engine.selects_blocks


def engine_dtype() -> torch.dtype:
    """Return the dtype of the model of the engine last built in this process."""
    vllm_config = None if _engine is None else _engine.vllm_config()
    if vllm_config is None:
        return torch.get_default_dtype()
    dtype: torch.dtype = vllm_config.model_config.dtype
    return dtype


def engine_nsa() -> NSAConfig:
    """Return the ``nsa`` section of the model of the engine last built in this process.

    Raises:
        RuntimeError: that engine serves another kind of model.
    """
    if _engine is None or _engine.resolved.nsa is None:
        raise RuntimeError("nsa: expected an engine of a model with an nsa section")
    return _engine.resolved.nsa


class SparseKImpl(AttentionImpl):
    """Attention of one layer.  Holds no state of any request: all of that is in the pages."""

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
        if self.has_fp8_cache and self.fallback_reason is not None:
            raise NotImplementedError(
                f"SPARSEK: {self.fallback_reason} is served by torch SDPA, which reads no fp8 KV "
                "cache; use --kv-cache-dtype auto"
            )
        self._engine = _current_engine()
        self.batch_invariant = self._engine.resolved.batch_invariant
        if self.batch_invariant and self.fallback_reason is not None:
            raise NotImplementedError(
                f"SPARSEK: {self.fallback_reason} is served by torch SDPA, which rounds by the "
                "batch's shape; unset VLLM_BATCH_INVARIANT"
            )
        self.policy = self.own_policy()
        self.summaries: ScoreKind | None = None  # of the layer's pages; decided with the policy
        self.flash = self._find_flash()
        self.dtype = engine_dtype()
        compat.hook_kv_cache_spec(_customize_layer_spec)
        if self.may_select and self._engine.resolved.config.mode == "block_topk":
            self._engine.selects_blocks = True
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

        Where results must not depend on the batch, prefills and decodes share one kernel instead.
        """
        if self.batch_invariant or self.has_fp8_cache:
            return None
        if self.fallback_reason is not None or torch.get_default_dtype() == torch.float32:
            return None
        found = compat.flash_attention(self.head_size, self.sinks is not None)
        return None if found is None else FlashPrefill(*found)

    def own_policy(self) -> SelectionPolicy:
        """Return what the model itself lets this layer attend."""
        if self.sliding_window is None:
            return SelectionPolicy()
        return SelectionPolicy(num_sink=0, window_size=self.sliding_window)

    def bind(self, layer_index: int, page_size: int, full_attention: bool) -> SelectionPolicy:
        """Fix the layer's policy, once its place in the model and its pages are known.

        Args:
            layer_index: position of the layer in the model.
            page_size: tokens in one KV page.
            full_attention: whether the layer's pages keep every token.

        Returns:
            The policy of every later :meth:`forward`.
        """
        policy = self.own_policy()
        if self.may_select and full_attention:
            policy = self._engine.resolved.config.policy_for(layer_index)
        if not policy.selects_blocks:
            size = policy.sel_block_size
            if page_size % size and size % page_size:
                policy = replace(policy, sel_block_size=math.gcd(page_size, size))
        if self.batch_invariant:
            policy = policy.per_token()
        self.policy = policy
        if policy.selects_blocks:
            self._owner().keep_summaries(policy.score_kind)
            self.keep_summaries(policy.score_kind)
        return policy

    def keep_summaries(self, kind: ScoreKind) -> None:
        """Read and write block summaries in the layer's pages from now on.

        A layer that attends everything does so where a layer that selects shares its pages.
        """
        self.summaries = kind
        self._pages = self._pages_key = None

    def _owner(self) -> SparseKImpl:
        """Return the layer that writes the pages which this one reads."""
        name = self.kv_sharing_target_layer_name
        vllm_config = self._engine.vllm_config()
        if name is None or vllm_config is None:
            return self
        owner = vllm_config.compilation_config.static_forward_context[name].impl
        if not isinstance(owner, SparseKImpl):
            raise NotImplementedError(
                f"SPARSEK: a layer that selects blocks shares the KV cache of {name}, which "
                "another backend fills without summaries; select SPARSEK for layers of every kind"
            )
        return owner

    @property
    def kernel_key(self) -> tuple[Any, ...]:
        """What decides which kernels serve a layer; layers with equal keys share them."""
        shape = (self.num_heads, self.num_kv_heads, self.head_size)
        return (self.policy, *shape, self.kv_cache_dtype, self.sinks is None, self.fallback_reason)

    def rehearse(self, layer: Any, kv_cache: torch.Tensor, batch: PagedBatch) -> None:
        """Attend a made-up prefill of zeros, so that its kernels are compiled; counts nothing.

        Args:
            layer: the layer, which has the scales of an fp8 cache.
            kv_cache: ``[pages, Hkv, page_size, 2 * D]``.
            batch: the step.
        """
        summaries = summary_dtype(kv_cache.dtype, self.dtype)
        pages = view_pages(kv_cache, None if self.summaries is None else summaries)
        shape = (batch.num_prefill_tokens, self.num_heads, self.head_size)
        query = torch.zeros(shape, dtype=self.dtype, device=kv_cache.device)
        scales = self._scales(layer)
        run = Run.whole(batch)
        if self.flash is not None:  # the last queries are left to it
            run = replace(run, policy=replace(self.policy, dense_last=0))
        self._attend_run(run, query, pages, scales, torch.empty_like(query))

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
            key, value: ``[T, Hkv, D]``, padding rows allowed at the end.
            kv_cache: ``[pages, Hkv, page_size, 2 * D]``.
            slot_mapping: ``[T]`` int64, -1 for padding.
        """
        if self.attn_type == AttentionType.ENCODER_ONLY:
            return
        pages = self._views(kv_cache)
        k_scale, v_scale = self._scales(layer)
        write_kv(
            key,
            value,
            pages.keys,
            pages.values,
            pages.summary,
            slot_mapping,
            score_kind=self.summaries or self.policy.score_kind,
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
            query: ``[T, Hq, D]``; key, value: ``[T, Hkv, D]``.
            kv_cache: ``[pages, Hkv, page_size, 2 * D]``.
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
        tokens = attn_metadata.num_actual_tokens
        query, out = query[:tokens], output[:tokens]
        if self.attn_type == AttentionType.ENCODER_ONLY:
            self._forward_encoder(query, key[:tokens], value[:tokens], attn_metadata, out)
            return output
        pages = self._views(kv_cache)
        reason = self.fallback_reason or attn_metadata.fallback_reason
        if reason is None:
            scales = self._scales(layer)
            for run in attn_metadata.runs(self.policy):
                self._attend_run(run, query, pages, scales, out)
            return output
        paged_fallback(
            query,
            pages.keys,
            pages.values,
            attn_metadata.batch,
            causal=True,
            softmax_scale=self.scale,
            window_size=self.sliding_window,
            alibi_slopes=self.alibi_slopes,
            logits_soft_cap=self.logits_soft_cap,
            sinks=self.sinks,
            bidirectional_ranges=attn_metadata.bidirectional_ranges,
            reason=reason,
            out=out,
        )
        return output

    def _scales(self, layer: Any) -> tuple[float, float]:
        """Return what the layer's cached K and V are multiples of; the cache is fp8 or it is 1."""
        if not self.has_fp8_cache:
            return 1.0, 1.0
        k_scale, v_scale = float(layer._k_scale_float), float(layer._v_scale_float)
        if not (k_scale > 0.0 and v_scale > 0.0):
            raise ValueError(
                f"k_scale, v_scale: expected positive numbers, got {k_scale} and {v_scale}; "
                "correct the checkpoint's, or use --kv-cache-dtype auto"
            )
        return k_scale, v_scale

    def _attend_run(
        self,
        run: Run,
        query: torch.Tensor,
        pages: PageViews,
        scales: tuple[float, float],
        out: torch.Tensor,
    ) -> None:
        if run.rows is not None:
            query, out = query[run.rows], out[run.rows]
        if run.dense and self.flash is not None:
            self.flash(
                query,
                pages.keys,
                pages.values,
                run,
                softmax_scale=self.scale,
                sinks=self.sinks,
                out=out,
            )
            return
        paged_attention(
            query,
            pages.keys,
            pages.values,
            run.batch,
            self.policy if run.policy is None else run.policy,
            softmax_scale=self.scale,
            k_summary=pages.summary,
            sinks=self.sinks,
            out=out,
            k_scale=scales[0],
            v_scale=scales[1],
            batch_invariant=self.batch_invariant,
        )

    def _forward_encoder(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: SparseKMetadata,
        out: torch.Tensor,
    ) -> None:
        offsets = metadata.query_offsets
        if offsets is None:
            raise ValueError("causal: expected False for encoder-only attention, got True")
        sdpa_fallback(
            query,
            key,
            value,
            cu_seqlens_q=offsets,
            cu_seqlens_k=offsets,
            causal=False,
            softmax_scale=self.scale,
            window_size=self.sliding_window,
            alibi_slopes=self.alibi_slopes,
            logits_soft_cap=self.logits_soft_cap,
            sinks=self.sinks,
            reason="encoder-only attention",
            out=out,
        )

    def _views(self, kv_cache: torch.Tensor) -> PageViews:
        """Return the cache's views, made once for each cache tensor."""
        key = (kv_cache.data_ptr(), kv_cache.shape)
        if self._pages is None or self._pages_key != key:
            summaries = summary_dtype(kv_cache.dtype, self.dtype)
            self._pages = view_pages(kv_cache, None if self.summaries is None else summaries)
            self._pages_key = key
        return self._pages


def refuse_quantised_output(
    output_scale: torch.Tensor | None, output_block_scale: torch.Tensor | None
) -> None:
    """Refuse what vLLM passes where it fuses attention with the quantisation of its output.

    Raises:
        NotImplementedError: a scale was given.
    """
    if output_scale is not None or output_block_scale is not None:
        raise NotImplementedError(
            "output_scale: fused output quantisation is not supported; disable the "
            "attention-quantisation fusion pass"
        )


def _customize_layer_spec(layer: Any, spec: Any, page_size: int) -> Any:
    """Fit one of our layers' specs to padded pages (vLLM without ``customize_spec``).

    That vLLM starts window layers from its smallest page and pads it to the largest one of the
    model, which would waste most of each page: they get pages of as many tokens as the others.
    """
    if not isinstance(getattr(layer, "impl", None), SparseKImpl):
        return spec
    if engine_selects_blocks() and not compat.is_full_attention(spec):
        spec = compat.with_page_size(spec, page_size)
    return layer.attn_backend.customize_spec(spec)
