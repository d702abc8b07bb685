"""One engine step as SPARSEK's layers read it: built once, used by all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType

from sparsek_backend.vllm_backend import compat
from sparsek_backend.vllm_backend.accounting import Accounting
from sparsek_backend.vllm_backend.engine import engine_of
from sparsek_backend.vllm_backend.keys import NO_KEYS, Keys
from sparsek_backend.vllm_backend.report import (
    EAGER_NORMS,
    NO_PROMPT_LENGTHS,
    describe_layers,
    describe_model_selection,
)
from sparsek_backend.vllm_backend.settings import check_page_size
from sparsek_backend.vllm_backend.step import Batch, Int64, StepBuilder, StepMetadata, build_batch
from sparsek_kernels.paged.policy import SelectionPolicy, StepPolicy

from .pages import bytes_behind
from .shards import ContextRanks, ShardedStep, check_interleave, shard_step
from .warmup import warm_up

logger = init_logger(f"vllm.{__name__}")  # under vLLM's handlers and level

Ranges = tuple[Sequence[tuple[int, int]], ...]


@dataclass(frozen=True)
class LayerKind:
    """What layers have in common that one log line describes."""

    policy: StepPolicy  # what they attend
    fallback_reason: str | None  # why they use the SDPA fallback, or ``None``
    flash_version: int | None  # vLLM's FlashAttention that serves dense prefills, or ``None``
    fp8_cache: bool  # whether K and V are stored as fp8


@dataclass
class SparseKMetadata(StepMetadata):
    """One step of one group of layers."""

    seq_lens: tuple[int, ...]  # keys of each request, on the host; an upper bound for decodes
    # offsets of each request's query tokens, on the host, for encoder-only models; ``None`` when
    # causal
    query_offsets: tuple[int, ...] | None
    # for each request, inclusive ranges of positions that attend each other in both directions;
    # ``None`` where no new token is in one.  The name is vLLM's, whose Gemma 4 clears it for layers
    # without a window.
    mm_prefix_range: Ranges | None
    shards: ShardedStep | None  # where the pages are, if several ranks hold them between them


class SparseKMetadataBuilder(StepBuilder):
    """Builds a step's metadata from vLLM's, without synchronising with the device."""

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.resolved, self.rotation = self.engine.resolved, self.engine.rotation_on(device)
        # Speculated tokens share a decode's tiles, which must hold one token where results may not
        # depend on the batch: there they are short prefills.
        self._init_reorder_batch_threshold(
            1, supports_spec_as_decode=not self.resolved.batch_invariant
        )
        self.layers = get_layers_from_vllm_config(vllm_config, Attention)
        self._bind_layers(kv_cache_spec, layer_names, vllm_config)
        self.longest = min(vllm_config.model_config.max_model_len, 1 << 18)
        self.everything = Accounting(StepPolicy.of(SelectionPolicy()), self.longest)
        self.page_size = kv_cache_spec.block_size
        self.splits_steps = vllm_config.parallel_config.use_ubatching
        self.captured_decodes = may_capture_decodes(vllm_config, device)
        self.context_ranks = _context_ranks(kv_cache_spec, vllm_config.parallel_config)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Return what can be captured: uniform batches.

        Nothing where layers fall back to SDPA, or where ranks hold the context between them: a step
        of these makes block tables of its own.
        """
        layers = get_layers_from_vllm_config(vllm_config, Attention)
        if any(getattr(layer.impl, "fallback_reason", None) for layer in layers.values()):
            return AttentionCGSupport.NEVER
        if vllm_config.parallel_config.decode_context_parallel_size > 1:
            return AttentionCGSupport.NEVER
        if engine_of(vllm_config).resolved.batch_invariant:
            return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        return cls._cudagraph_support

    def _bind_layers(self, spec: Any, layer_names: list[str], vllm_config: Any) -> None:
        """Fix what every layer attends."""
        if compat.is_full_attention(spec):
            check_page_size(self.resolved, spec.block_size)
        layers = get_layers_from_vllm_config(vllm_config, Attention, layer_names)
        kinds = {layer.impl.attn_type for layer in layers.values()}
        self.causal = AttentionType.ENCODER_ONLY not in kinds
        every_layer = vllm_config.compilation_config.static_forward_context
        groups: dict[LayerKind, list[int]] = {}
        for name, layer in layers.items():
            impl, index = layer.impl, self.indices[name]
            owner = every_layer[impl.kv_sharing_target_layer_name or name]
            whole = compat.attends_whole_context(layer, spec)
            policy = impl.bind(index, spec.block_size, whole, owner.impl, self.device)
            version = None if impl.flash is None else impl.flash.version
            kind = LayerKind(policy, impl.fallback_reason, version, impl.has_fp8_cache)
            groups.setdefault(kind, []).append(index)
        self._report_layers(groups, spec, vllm_config.model_config)
        if not self.on_host:
            decode_len = self.reorder_batch_threshold or 1
            warm_up(layers.values(), spec, vllm_config, self.device, decode_len, self.rotation)

    @cached_property
    def policies(self) -> set[StepPolicy]:
        """What the group's layers attend, to be asked for from a first step on."""
        return {self.layers[name].impl.policy for name in self.layer_names}

    @cached_property
    def exempts_last(self) -> bool:
        """Whether any of them attends the last tokens of prompts whole."""
        return any(policy.prefill.dense_last for policy in self.policies)

    @cached_property
    def asks_prompts(self) -> bool:
        """Whether any of them tells what is left of a prompt from an answer."""
        return any(policy.of_ends.dense_last for policy in self.policies)

    def _report_layers(self, groups: dict[LayerKind, list[int]], spec: Any, model: Any) -> None:
        """Log what each group of layers attends, and by which kernels."""
        resolved = self.resolved
        size, itemsize = spec.head_size, spec.dtype.itemsize
        behind = bytes_behind(size, itemsize) / (2 * size * itemsize)
        trained = resolved.infllm if resolved.config.mode != "infllm" else None
        if trained is not None and any(kind.policy.selects_blocks for kind in groups):
            logger.info_once(describe_model_selection(trained, resolved.config))
        for kind, members in groups.items():
            logger.info_once(
                describe_layers(
                    members,
                    kind.policy,
                    kind.fallback_reason,
                    spec.block_size,
                    self.device.type,
                    kind.flash_version,
                    mode=resolved.config.mode,
                    summary_share=behind if kind.policy.selects_blocks else 0.0,
                    fp8_cache=kind.fp8_cache,
                    batch_invariant=resolved.batch_invariant,
                )
            )
        if resolved.batch_invariant and model.enforce_eager:
            logger.warning_once(EAGER_NORMS)

    def assemble(self, common: Any) -> SparseKMetadata:
        """Translate vLLM's metadata.

        Raises:
            NotImplementedError: causality that differs between requests, or decoder layers that are
                not causal.
        """
        if common.causal is not self.causal:
            raise NotImplementedError(
                f"causal: expected {self.causal} for the whole batch, got {common.causal}; "
                "leave --attention-backend out"
            )
        batch = build_batch(
            common,
            self.reorder_batch_threshold or 1,
            self.on_host,
            gathers_prefills=self.context_ranks is not None,
            rotation=self.rotation,
            prompt_lengths=self._prompt_lengths(),
            captured_decodes=self.captured_decodes,
            lacking=self.lacking,
        )
        if self.exempts_last and batch.paged.num_prefills and batch.paged.prompt_left_host is None:
            logger.warning_once(NO_PROMPT_LENGTHS)
        ranges = _live_ranges(common, batch.seq_lens - batch.query_lens)
        attended, context = self._count(batch, ranges)
        return SparseKMetadata(
            batch=batch.paged,
            num_actual_tokens=common.num_actual_tokens,
            attended=attended,
            context=context,
            seq_lens=tuple(batch.seq_lens.tolist()),
            query_offsets=None if common.causal else tuple(batch.offsets.tolist()),
            mm_prefix_range=ranges,
            shards=None
            if self.context_ranks is None
            else shard_step(batch.paged, self.page_size, self.context_ranks),
        )

    def _prompt_lengths(self) -> Any:
        """The prompt lengths of the step's requests, where layers ask and no request is split."""
        return self.engine.prompt_lengths if self.asks_prompts and not self.splits_steps else None

    @cached_property
    def counted(self) -> list[tuple[Accounting, bool, int]]:
        """What layers attend, whether they heed bidirectional ranges, and how many do so.

        Where ranges keep to a window, as Gemma 4's do, vLLM clears them for layers without one.
        """
        everywhere = not any(map(keeps_ranges_to_window, self.layers.values()))
        own = [self.layers[name] for name in self.counted_layers if name in self.layers]
        kinds = Counter(
            (x.impl.policy, x.impl.sliding_window, keeps_ranges_to_window(x)) for x in own
        )
        return [
            (Accounting(policy, self.longest, window, clamped), everywhere or clamped, layers)
            for (policy, window, clamped), layers in kinds.items()
        ]

    def _count(self, batch: Batch, ranges: Ranges | None) -> tuple[Keys, Keys]:
        """Count attended and context keys over all layers of the group that attend its steps."""
        paged = batch.paged
        lens = (batch.seq_lens, batch.query_lens, paged.num_decodes, paged.prompt_left_host)
        attended = context = NO_KEYS
        causal = self.everything.count(*lens)
        both = self.everything.count(*lens, ranges) if ranges else causal
        for accounting, heeds, layers in self.counted:
            attended = attended.plus(accounting.count(*lens, ranges if heeds else None), layers)
            context = context.plus(both if heeds else causal, layers)
        return attended, context


def keeps_ranges_to_window(layer: Any) -> bool:
    """Whether a layer's bidirectional ranges reach no further back than its window (Gemma 4)."""
    return bool(getattr(layer, "mm_prefix_clamp_sliding_window", False))


def take_memory(vllm_config: Any | None, device: torch.device) -> None:
    """While vLLM measures memory: bind the layers and run the steps that need every kernel.

    Their scratch stays, and so is no part of what vLLM then gives to the pages.  Where layers have
    a window vLLM has not settled their pages yet: theirs is little, and comes later.

    Args:
        vllm_config: of an engine that is still there, else ``None``.
    """
    groups: dict[Any, list[str]] = {}
    layers = get_layers_from_vllm_config(vllm_config, Attention) if vllm_config else {}
    for name, layer in layers.items():
        if layer.attn_backend.get_builder_cls() is SparseKMetadataBuilder:
            spec = layer.get_kv_cache_spec(vllm_config)
            if spec is not None and compat.is_full_attention(spec):
                groups.setdefault(layer.attn_backend.customize_spec(spec), []).append(name)
    for spec, names in groups.items():
        SparseKMetadataBuilder(spec, names, vllm_config, device)


def may_capture_decodes(vllm_config: Any, device: torch.device) -> bool:
    """Whether CUDA graphs may hold whole steps of decodes."""
    graphs = vllm_config.compilation_config.cudagraph_mode
    return device.type == "cuda" and bool(graphs.has_full_cudagraphs())


def _context_ranks(spec: Any, parallel: Any) -> ContextRanks | None:
    """The ranks that hold the pages of a KV cache between them, or ``None`` without such."""
    if parallel.decode_context_parallel_size == 1:
        return None
    check_interleave(parallel.cp_kv_cache_interleave_size, spec.block_size)
    group = compat.context_group()
    return ContextRanks(group.device_group, group.rank_in_group, group.world_size)


def _live_ranges(common: Any, first_position: Int64) -> Ranges | None:
    """Return the bidirectional ranges of each request with a new token in any, if there is one.

    Args:
        first_position: ``[R]`` position of each request's first new token.
    """
    live = {
        request: found
        for request, found in (getattr(common, "mm_req_doc_ranges", None) or {}).items()
        if any(high >= first_position[request] for low, high in found if low < high)
    }
    if not live:
        return None
    return tuple(live.get(request, ()) for request in range(common.num_reqs))
