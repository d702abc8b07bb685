"""What one engine step means for attention: built once, read by every layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from vllm.config import get_layers_from_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from sparsek_kernels.paged import native_decode
from sparsek_kernels.paged.batch import PagedBatch
from sparsek_kernels.paged.policy import CELL_SIZE, SelectionPolicy

from . import compat
from .accounting import attended_by_requests
from .dense_prefill import Run, split_runs
from .orphans import end_with_server
from .pages import summary_dtype
from .report import EAGER_NORMS, describe_layers, describe_model_selection
from .startup import check_page_size, engine_config
from .stats import STATS
from .warmup import warm_up_prefills

logger = init_logger(f"vllm.{__name__}")  # under vLLM's handlers and level

Int64 = np.typing.NDArray[np.int64]
Ranges = tuple[Sequence[tuple[int, int]], ...]


@dataclass(frozen=True)
class SparseKMetadata(AttentionMetadata):
    """One step of one group of layers.

    Args:
        batch: the requests and their pages; padding requests have length 0.
        num_actual_tokens: query tokens without padding.
        slot_mapping: ``[T]`` int64, where each new token is stored, -1 for padding.
        causal: false for encoder-only models.
        query_offsets: offsets of each request's query tokens, on the host; ``None`` when causal.
        bidirectional_ranges: for each request, inclusive ranges of positions that attend each
            other in both directions; ``None`` where no new token is in one.
        attended_tokens: keys attended, summed over the step's queries and the group's layers.
        context_tokens: keys that dense attention would attend.
        split: for each policy, the step's decodes and runs of dense and sparse prefills; empty
            where one call serves them all.
    """

    batch: PagedBatch
    num_actual_tokens: int
    slot_mapping: torch.Tensor
    causal: bool
    query_offsets: tuple[int, ...] | None
    bidirectional_ranges: Ranges | None
    attended_tokens: int
    context_tokens: int
    split: Mapping[SelectionPolicy, tuple[Run, ...]] = field(default_factory=dict)

    def runs(self, policy: SelectionPolicy) -> tuple[Run, ...]:
        """Return the parts of the step that layers with ``policy`` attend one by one."""
        return self.split.get(policy) or (Run.whole(self.batch),)

    @property
    def attended_share(self) -> float:
        """Attended keys over context keys of this step, 1.0 for an empty one."""
        return self.attended_tokens / self.context_tokens if self.context_tokens else 1.0

    @property
    def fallback_reason(self) -> str | None:
        """Why this step's mask needs the SDPA fallback, or ``None``."""
        return "bidirectional prefix" if self.bidirectional_ranges else None


class SparseKMetadataBuilder(AttentionMetadataBuilder[SparseKMetadata]):
    """Builds a step's metadata from vLLM's, without synchronising with the device."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    reorder_batch_threshold: int | None = 1

    def __init__(
        self,
        kv_cache_spec: Any,
        layer_names: list[str],
        vllm_config: Any,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.resolved = engine_config(vllm_config)
        # Speculated tokens share a decode's tiles, which must hold one token where results may not
        # depend on the batch: there they are short prefills.
        self._init_reorder_batch_threshold(
            1, supports_spec_as_decode=not self.resolved.batch_invariant
        )
        self.on_host = device.type == "cpu"
        if self.on_host:
            native_decode.library()  # built before the first request
        self.has_flash = False
        self.tells = compat.is_first_tensor_rank()
        end_with_server()
        self.policies = self._bind_layers(kv_cache_spec, layer_names, vllm_config)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Return what can be captured: uniform batches, nothing where layers fall back to SDPA."""
        layers = get_layers_from_vllm_config(vllm_config, Attention)
        if any(getattr(layer.impl, "fallback_reason", None) for layer in layers.values()):
            return AttentionCGSupport.NEVER
        if engine_config(vllm_config).batch_invariant:
            return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        return cls._cudagraph_support

    def _bind_layers(
        self, spec: Any, layer_names: list[str], vllm_config: Any
    ) -> Counter[SelectionPolicy]:
        """Fix every layer's policy; returns how many layers follow each."""
        resolved = self.resolved
        full_attention = compat.is_full_attention(spec)
        if full_attention:
            check_page_size(resolved, spec.block_size)
        layers = get_layers_from_vllm_config(vllm_config, Attention, layer_names)
        indices: dict[tuple[SelectionPolicy, str | None, int | None, bool], list[int]] = {}
        policies: Counter[SelectionPolicy] = Counter()
        for name, layer in layers.items():
            index = extract_layer_index(name)
            policy = layer.impl.bind(index, spec.block_size, full_attention)
            policies[policy] += 1
            version = None if layer.impl.flash is None else layer.impl.flash.version
            self.has_flash |= version is not None
            key = (policy, layer.impl.fallback_reason, version, layer.impl.has_fp8_cache)
            indices.setdefault(key, []).append(index)
        summaries = summary_dtype(spec.dtype, vllm_config.model_config.dtype)
        share = summaries.itemsize / (2 * CELL_SIZE * spec.dtype.itemsize)
        if resolved.infllm is not None and any(policy.selects_blocks for policy in policies):
            logger.info_once(describe_model_selection(resolved.infllm, resolved.config))
        for (policy, reason, version, fp8_cache), members in indices.items():
            logger.info_once(
                describe_layers(
                    members,
                    policy,
                    reason,
                    spec.block_size,
                    self.device.type,
                    version,
                    summary_share=share,
                    fp8_cache=fp8_cache,
                    batch_invariant=resolved.batch_invariant,
                )
            )
        if resolved.batch_invariant and vllm_config.model_config.enforce_eager:
            logger.warning_once(EAGER_NORMS)
        if not self.on_host:
            warm_up_prefills(layers.values(), spec, vllm_config, self.device)
        return policies

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: Any,
        fast_build: bool = False,
    ) -> SparseKMetadata:
        """Build the metadata of one step.

        Args:
            common_prefix_len: ignored; shared prefixes are ordinary pages.
            common_attn_metadata: vLLM's ``CommonAttentionMetadata``.
            fast_build: ignored.

        Raises:
            NotImplementedError: causality that differs between requests.
        """
        metadata = self._assemble(common_attn_metadata)
        line = STATS.record_step(metadata.attended_tokens, metadata.context_tokens, tell=self.tells)
        if line:
            logger.info(line)
        return metadata

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> SparseKMetadata:
        """Build the metadata of a made-up step that is captured: short contexts, not counted."""
        metadata = self._assemble(common_attn_metadata)
        metadata.batch.seq_lens.fill_(common_attn_metadata.max_query_len)
        return metadata

    def _assemble(self, common: Any) -> SparseKMetadata:
        """Translate vLLM's ``CommonAttentionMetadata``."""
        if not isinstance(common.causal, bool):
            raise NotImplementedError(
                "causal: expected one value for the whole batch, got a tensor; "
                "leave --attention-backend out"
            )
        threshold = self.reorder_batch_threshold or 1
        num_decodes, _, num_decode_tokens, _ = split_decodes_and_prefills(
            common, decode_threshold=threshold
        )
        offsets = common.query_start_loc_cpu[: common.num_reqs + 1].numpy().astype(np.int64)
        query_lens = np.diff(offsets)
        seq_lens = compat.host_seq_lens(common, self.on_host)[: common.num_reqs]
        seq_lens = seq_lens.numpy().astype(np.int64)
        attended, context = self._count(seq_lens, query_lens, num_decodes)
        batch = PagedBatch(
            block_table=common.block_table_tensor,
            seq_lens=common.seq_lens,
            cu_seqlens_q=common.query_start_loc,
            num_decodes=num_decodes,
            num_decode_tokens=num_decode_tokens,
            decode_query_len=threshold,
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
            seq_lens_host=tuple(seq_lens.tolist()) if self.on_host else None,
            query_lens_host=tuple(query_lens.tolist()),
        )
        split = {}
        dense_decode = self.resolved.config.dense_decode
        if dense_decode or (self.has_flash and batch.num_prefills):
            lens, counts = seq_lens.tolist(), query_lens.tolist()
            split = {
                policy: split_runs(batch, policy, lens, counts, dense_decode=dense_decode)
                for policy in self.policies
            }
        return SparseKMetadata(
            batch=batch,
            num_actual_tokens=common.num_actual_tokens,
            slot_mapping=common.slot_mapping,
            causal=common.causal,
            query_offsets=None if common.causal else tuple(offsets.tolist()),
            bidirectional_ranges=_live_ranges(common, seq_lens - query_lens),
            attended_tokens=attended,
            context_tokens=context,
            split=split,
        )

    def _count(self, seq_lens: Int64, query_lens: Int64, num_decodes: int) -> tuple[int, int]:
        """Count attended and context keys over all layers of the group."""
        dense_decode = self.resolved.config.dense_decode
        attended = sum(
            layers
            * attended_by_requests(
                policy, seq_lens, query_lens, num_decodes, dense_decode=dense_decode
            )
            for policy, layers in self.policies.items()
        )
        dense = attended_by_requests(SelectionPolicy(), seq_lens, query_lens, num_decodes)
        return attended, dense * self.policies.total()


def _live_ranges(common: Any, first_position: Int64) -> Ranges | None:
    """Return each request's bidirectional ranges, if a new token of the step is in any.

    Args:
        common: vLLM's metadata; its ranges are keyed by request.
        first_position: ``[R]`` position of each request's first new token.
    """
    ranges = getattr(common, "mm_req_doc_ranges", None)
    if not ranges:
        return None
    live = any(
        high >= first_position[request]
        for request, found in ranges.items()
        for low, high in found
        if low < high
    )
    if not live:
        return None
    return tuple(ranges.get(request, ()) for request in range(common.num_reqs))
