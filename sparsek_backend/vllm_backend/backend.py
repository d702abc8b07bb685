"""The backend class: what SPARSEK supports, and how its KV pages are laid out."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionBackend, AttentionType, MultipleOf

from sparsek_backend.plugin import BACKEND_NAME

from . import compat
from .impl import SparseKImpl, engine_dtype, engine_selects_blocks
from .metadata import SparseKMetadataBuilder
from .pages import FP8_KV_CACHE, summary_bytes

LEAVE = "leave --attention-backend out"
REMEDIES: dict[str, tuple[Any, str]] = {
    "head_size": (64, "use a model whose head size is a multiple of 8 from 32 to 256"),
    "kv_cache_dtype": ("auto", "--kv-cache-dtype auto"),
    "dtype": (torch.float16, "--dtype bfloat16, float16 or float32"),
    "block_size": (None, "--block-size 64, or another multiple of 16"),
    "use_mla": (False, f"{LEAVE}: vLLM's MLA backends serve this model"),
    "use_sparse": (False, f"{LEAVE}: the model brings its own sparse attention"),
    "attn_type": (AttentionType.DECODER, f"{LEAVE}: only self-attention is served"),
    "use_per_head_quant_scales": (False, "use a checkpoint without per-head KV scales"),
    "use_non_causal": (False, LEAVE),
    "use_rswa": (False, LEAVE),
    "use_mm_prefix": (False, LEAVE),
    "use_kv_connector": (
        False,
        "remove --kv-transfer-config and --kv-offloading-size: block summaries do not travel with "
        "K and V",
    ),
    "use_pcp": (False, "--prefill-context-parallel-size 1"),
    "use_dcp": (False, "--decode-context-parallel-size 1"),
    "use_batch_invariant": (False, "unset VLLM_BATCH_INVARIANT, which needs a GPU"),
    "device_capability": (
        None,
        "use a GPU of compute capability 8.0 or later, or the CPU build of vLLM",
    ),
}
"""Arguments of ``validate_configuration``: a value that is served, and what a user can do."""

PREFERRED_PAGE_SIZE = 64
"""Tokens: one selected block is one page, so that a block's K and V are contiguous per head."""


class SparseKBackend(AttentionBackend):
    """vLLM's view of SparseK.  Both generations of the KV-cache interface are answered here."""

    accept_output_buffer: bool = True
    forward_includes_kv_cache_update: bool = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [
        torch.float16,
        torch.bfloat16,
        torch.float32,
    ]
    supported_kv_cache_dtypes: ClassVar[list[str]] = [
        "auto",
        "float16",
        "bfloat16",
        *FP8_KV_CACHE,
    ]

    @staticmethod
    def get_name() -> str:
        """Return the name after ``--attention-backend``."""
        return BACKEND_NAME

    @staticmethod
    def get_impl_cls() -> type[SparseKImpl]:
        """Return the per-layer implementation."""
        return SparseKImpl

    @staticmethod
    def get_builder_cls() -> type[SparseKMetadataBuilder]:
        """Return the builder of the per-step metadata."""
        return SparseKMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Return the page sizes: any multiple of 16 tokens."""
        return [MultipleOf(16)]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """Return the page size to use when the user names none."""
        if default_block_size % PREFERRED_PAGE_SIZE == 0:
            return default_block_size
        return PREFERRED_PAGE_SIZE

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Whether a head dimension can be served."""
        return 32 <= head_size <= 256 and head_size % 8 == 0

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """Decoders, and encoder-only models through the SDPA fallback; no cross-attention."""
        return attn_type in (AttentionType.DECODER, AttentionType.ENCODER_ONLY)

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """Whether the kernels run on a GPU (``None`` on CPU)."""
        return capability is None or tuple(capability) >= (8, 0)

    @classmethod
    def supports_sink(cls) -> bool:
        """Learned sink logits."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """A model's own sliding window."""
        return True

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        """Bidirectional prefixes, through the SDPA fallback."""
        return True

    @classmethod
    def supports_kv_connector(cls) -> bool:
        """False: connectors move K and V, and would leave the pages' summaries behind."""
        return False

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """On a GPU; on a CPU, matrix products (vLLM's as ours) round by the batch's shape."""
        from vllm.platforms import current_platform

        return not current_platform.is_cpu()

    @classmethod
    def is_sparse(cls) -> bool:
        """False: to vLLM, sparse means an MLA model's own indexer."""
        return False

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: Any,
    ) -> str | None:
        """Return why settings that are served alone are not together; ``None`` if they are."""
        if use_mm_prefix and compat.is_batch_invariant():
            return "batch invariance not supported with bidirectional prefixes"
        if kv_cache_dtype not in FP8_KV_CACHE:
            return None
        if device_capability is None:
            return "fp8 kv_cache_dtype not supported on a CPU"
        if tuple(device_capability) < (8, 9):
            return "fp8 kv_cache_dtype needs compute capability 8.9"
        if use_mm_prefix:
            return "fp8 kv_cache_dtype not supported with bidirectional prefixes"
        return None

    @classmethod
    def validate_configuration(cls, **selection: Any) -> list[str]:
        """Return why a configuration cannot be served, each reason with its remedy.

        The remedy belongs to the first argument that, changed alone, takes the reason away.
        """
        reasons_for = super().validate_configuration

        def remedy(reason: str) -> str:
            for name, (served, text) in REMEDIES.items():
                changed = {**selection, name: served}
                if name in selection and reason not in reasons_for(**changed):
                    return text
            return LEAVE

        return [f"{reason} (remedy: {remedy(reason)})" for reason in reasons_for(**selection)]

    # KV cache, vLLM 0.32 and later: logical [pages, Hkv, page_size, 2 * D].

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        """Return layouts in which one head's tokens of a page are contiguous."""
        return tuple(compat.head_major_layouts())

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Enlarge every page of a full-attention layer by its summaries, where layers select."""
        if not (compat.is_full_attention(spec) and engine_selects_blocks()):
            return spec
        return compat.pad_page(spec, summary_bytes(spec, engine_dtype()))

    # KV cache, vLLM before 0.32.

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        """Return the logical shape of a layer's cache."""
        return (num_blocks, num_kv_heads, block_size, 2 * head_size)

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """Return the physical order: pages outermost, then heads, so that pages can be padded."""
        return (1, 0, 2, 3, 4) if include_num_layers_dimension else (0, 1, 2, 3)

    @classmethod
    def get_required_kv_cache_layout(cls) -> str:
        """Return vLLM's name for head-major pages."""
        return "HND"

    @staticmethod
    def use_cascade_attention(*args: Any, **kwargs: Any) -> bool:
        """Never: shared prefixes are ordinary pages here."""
        return False
