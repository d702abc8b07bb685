"""The steps of natively sparse layers."""

from __future__ import annotations

from typing import Any

import torch
from vllm.logger import init_logger

from sparsek_backend.vllm_backend.accounting import Positions, nsa_attended, query_positions
from sparsek_backend.vllm_backend.keys import Keys
from sparsek_backend.vllm_backend.report import describe_nsa_layers
from sparsek_backend.vllm_backend.settings import check_page_size, nsa_section
from sparsek_backend.vllm_backend.step import StepBuilder, StepMetadata, build_batch

from .pages import tail_elements

logger = init_logger(f"vllm.{__name__}")  # under vLLM's handlers and level


class NSAMetadataBuilder(StepBuilder):
    """Builds the metadata of layers that all follow the model's ``nsa`` section."""

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        resolved = self.engine.resolved
        self.config = nsa_section(resolved)
        spec = kv_cache_spec
        check_page_size(resolved, spec.block_size)
        tail = tail_elements(self.config, spec.num_kv_heads, spec.block_size, spec.head_size)
        share = tail / (spec.num_kv_heads * spec.block_size * 2 * spec.head_size)
        indices = list(self.indices.values())
        logger.info_once(
            describe_nsa_layers(indices, self.config, spec.block_size, device.type, share)
        )

    def assemble(self, common: Any) -> StepMetadata:
        """Translate vLLM's metadata; compressed keys count as attended."""
        batch = build_batch(
            common,
            self.reorder_batch_threshold or 1,
            self.on_host,
            gathers_prefills=True,
            lacking=self.lacking,
        )
        position = query_positions(batch.seq_lens, batch.query_lens)
        decodes, layers = batch.paged.num_decode_tokens, len(self.counted_layers)

        def keys(each: Positions) -> Keys:
            total = (each[decodes:].sum(), each[:decodes].sum())
            return Keys(*(int(part) * layers for part in total))

        return StepMetadata(
            batch=batch.paged,
            num_actual_tokens=common.num_actual_tokens,
            attended=keys(nsa_attended(self.config, position)),
            context=keys(position + 1),
        )
