"""One engine step, as the paged kernels and the counters take it."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
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

from sparsek_kernels.paged.batch import PagedBatch
from sparsek_kernels.paged.cpu.native import build

from . import compat
from .engine import engine_of
from .keys import Keys
from .metrics import EngineMetrics
from .settings import lacking_tokens, served_layers
from .stats import STATS

logger = init_logger(f"vllm.{__name__}")  # under vLLM's handlers and level

Int64 = np.typing.NDArray[np.int64]


@dataclass(frozen=True)
class Batch:
    """The requests of one engine step, on the device and on the host."""

    paged: PagedBatch  # the requests and their pages; padding requests have length 0
    offsets: Int64  # ``[R + 1]`` offsets of each request's query tokens
    seq_lens: Int64  # ``[R]`` keys of each request; an upper bound for decodes

    @property
    def query_lens(self) -> Int64:
        """``[R]`` query tokens of each request."""
        return np.diff(self.offsets)


def build_batch(
    common: Any,
    decode_query_len: int,
    on_host: bool,
    gathers_prefills: bool = False,
    rotation: torch.Tensor | None = None,
    prompt_lengths: Any = None,
    captured_decodes: bool = False,
    lacking: int = 0,
) -> Batch:
    """Translate vLLM's ``CommonAttentionMetadata``.

    Args:
        decode_query_len: most query tokens of a decode.
        on_host: whether the device is the CPU.
        gathers_prefills: whether kernels gather each prefill's K and V, for which the host must
            know its exact length.
        rotation: :attr:`PagedBatch.rotation`.
        prompt_lengths: of the requests, on the host, where they are known; made-up requests at the
            end may have none.
        captured_decodes: whether a CUDA graph may hold a step of decodes.  Its launches are those
            of decodes, so a prompt's last tokens are no exception there.
        lacking: tokens by which vLLM's lengths on the host may fall short of those on the device.
    """
    num_decodes, num_prefills, num_decode_tokens, _ = split_decodes_and_prefills(
        common, decode_threshold=decode_query_len
    )
    offsets = common.query_start_loc_cpu[: common.num_reqs + 1].numpy().astype(np.int64)
    counts = np.diff(offsets)
    behind = counts[num_decodes:]  # drafts too, where another backend has a say in the order
    drafts = decode_query_len > 1 and bool(((behind > 0) & (behind <= decode_query_len)).any())
    exact = not (drafts or lacking) and common.seq_lens_cpu_upper_bound is not None
    wait = gathers_prefills and num_prefills > 0 and not exact
    found, known = compat.host_seq_lens(common, on_host, wait)
    lens = found[: common.num_reqs].numpy().astype(np.int64)
    if on_host or wait:
        exact = True
    else:
        lens += lacking
    left = None
    if prompt_lengths is not None and known and (num_prefills or not captured_decodes):
        own = np.asarray(prompt_lengths, dtype=np.int64)[: common.num_reqs]
        left = -lens
        left[: len(own)] += own
        if gathers_prefills:  # then decodes have kernels that know no ends
            left[:num_decodes] = -lens[:num_decodes]
    paged = PagedBatch(
        block_table=common.block_table_tensor,
        seq_lens=common.seq_lens,
        cu_seqlens_q=common.query_start_loc,
        num_decodes=num_decodes,
        num_decode_tokens=num_decode_tokens,
        decode_query_len=decode_query_len,
        max_query_len=common.max_query_len,
        max_seq_len=common.max_seq_len,
        seq_lens_host=tuple(lens.tolist()) if on_host or (exact and num_prefills) else None,
        query_lens_host=tuple(counts.tolist()),
        prompt_left_host=None if left is None else tuple(left.tolist()),
        rotation=rotation,
    )
    return Batch(paged, offsets, lens)


@dataclass
class StepMetadata(AttentionMetadata):
    """One step of one group of layers.

    Nothing changes it once it is built; it is not frozen because vLLM's fast prefill
    (``--kv-sharing-fast-prefill``) derives a class from it that sets the fields one by one.
    """

    batch: PagedBatch  # the requests and their pages
    num_actual_tokens: int  # query tokens without padding
    attended: Keys  # of the step's queries, summed over the group's layers
    context: Keys  # what dense attention would attend


def layer_index(vllm_config: Any, first: int, name: str) -> int:
    """Return the index of a layer by its name, and by that of its model's first layer.

    Drafts that read the model's states are built with its configuration.  Most number their layers
    behind the model's.  MTP modules named ``mtp`` begin at 0.
    """
    apart = first or (served_layers(vllm_config) if name.startswith("mtp.") else 0)
    return apart + int(extract_layer_index(name))


class StepBuilder(AttentionMetadataBuilder[Any]):
    """Builds a step's metadata from vLLM's, and counts what the step attends."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    reorder_batch_threshold: int | None = 1

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.on_host = device.type == "cpu"
        self.engine = engine = engine_of(vllm_config)
        if not compat.shares_steps_with_drafts(vllm_config):
            engine.groups.append(layer_names)
        layers = get_layers_from_vllm_config(vllm_config, Attention, layer_names)
        self.indices = {
            name: layer_index(vllm_config, x.impl.first_layer, name) for name, x in layers.items()
        }
        # of steps of a draft alone
        self.lacking = lacking_tokens(vllm_config, min(self.indices.values(), default=0))
        if self.on_host:
            build.library()  # built before the first request
        self.metrics = None
        if compat.is_first_tensor_rank():  # the others attend the same keys
            self.metrics = EngineMetrics(engine.labels, engine.resolved.config)

    @cached_property
    def counted_layers(self) -> list[str]:
        """The layers that attend the steps of this group, to be asked for from a first step on.

        vLLM builds the served model's steps for the layers of its draft too.  A draft's layer
        attends the steps of its own group alone, which is the last group made that has it.
        """
        groups, own = self.engine.groups[::-1], self.layer_names
        return [x for x in own if next((y for y in groups if x in y), own) is own]

    @abstractmethod
    def assemble(self, common: Any) -> Any:
        """Translate vLLM's ``CommonAttentionMetadata``; counts nothing."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Any:
        """Build the metadata of one step.

        Args:
            common_prefix_len: ignored; shared prefixes are ordinary pages.
            fast_build: ignored.
        """
        metadata = self.assemble(common_attn_metadata)
        counted = metadata.attended, metadata.context
        line = STATS.record_step(*counted, log=self.metrics is not None)
        if self.metrics is not None:
            self.metrics.record_step(*counted, *STATS.take_seconds())
        if line:
            logger.info(line)
        return metadata

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        """Build the metadata of a made-up step that is captured: short contexts, not counted."""
        metadata = self.assemble(common_attn_metadata)
        metadata.batch.seq_lens.fill_(common_attn_metadata.max_query_len)
        return metadata
