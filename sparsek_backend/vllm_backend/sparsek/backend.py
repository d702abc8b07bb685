"""The backend class: what SPARSEK supports, and what a user can do about the rest."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionBackend, AttentionType, MultipleOf

from sparsek_backend.vllm_backend import compat
from sparsek_backend.vllm_backend.engine import engine_in_use, latest_engine
from sparsek_backend.vllm_backend.layout import HeadMajorPages
from sparsek_kernels.paged.policy import SEGMENT

from .impl import SparseKImpl
from .metadata import SparseKMetadataBuilder
from .pages import FP8_KV_CACHE, with_summaries

LEAVE = "leave --attention-backend out"
REMEDIES: dict[str, tuple[Any, str]] = {
    "head_size": (64, "use a model whose head size is a multiple of 8 from 32 to 256"),
    "kv_cache_dtype": ("auto", "--kv-cache-dtype auto"),
    "dtype": (torch.float16, "--dtype bfloat16, float16 or float32"),
    "block_size": (None, "--block-size 64, or a multiple of it"),
    "use_mla": (False, f"{LEAVE}: vLLM's MLA backends serve this model"),
    "use_sparse": (False, f"{LEAVE}: the model brings its own sparse attention"),
    "attn_type": (AttentionType.DECODER, f"{LEAVE}: only self-attention is served"),
    "use_per_head_quant_scales": (False, "use a checkpoint without per-head KV scales"),
    "use_non_causal": (False, LEAVE),
    "use_rswa": (False, LEAVE),
    "use_mm_prefix": (False, LEAVE),
    "use_kv_connector": (
        False,
        "remove --kv-transfer-config and --kv-offloading-size, or take vLLM "
        f"{compat.DECLARES_CONTENT_FROM} or later: before, block summaries do not travel with K "
        "and V",
    ),
    "use_pcp": (False, "--prefill-context-parallel-size 1"),
    "use_dcp": (False, "--decode-context-parallel-size 1"),
    "use_batch_invariant": (False, "unset VLLM_BATCH_INVARIANT, which needs a GPU"),
    "use_adaptive_verification": (
        False,
        "leave enable_adaptive_verification out of --speculative-config",
    ),
    "device_capability": (
        None,
        "use an NVIDIA GPU of compute capability 8.0 or later, or the CPU build of vLLM",
    ),
}
"""Arguments of ``validate_configuration``: a value that is served, and what a user can do."""


class SparseKBackend(HeadMajorPages, AttentionBackend):
    """vLLM's view of SparseK."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16", *FP8_KV_CACHE]

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Return the page sizes: where records choose, multiples of their 64 tokens."""
        engine = engine_in_use()
        if engine is None or not (engine.selects_blocks and engine.resolved.config.by_records):
            return HeadMajorPages.get_supported_kernel_block_sizes(kv_cache_spec)
        return [MultipleOf(SEGMENT)]

    @staticmethod
    def get_impl_cls() -> type[SparseKImpl]:
        """Return the per-layer implementation."""
        return SparseKImpl

    @staticmethod
    def get_builder_cls() -> type[SparseKMetadataBuilder]:
        """Return the builder of the per-step metadata."""
        return SparseKMetadataBuilder

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
        """Whether the kernels run on a GPU (``None`` on CPU); AMD's numbers are not NVIDIA's."""
        from vllm.platforms import current_platform

        return capability is None or (
            tuple(capability) >= (8, 0) and not current_platform.is_rocm()
        )

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """False: a step is planned by the host's query lengths."""
        return False

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
        """True where vLLM knows all bytes of a page; ``validate`` checks the connector's name."""
        return compat.declares_content()

    @classmethod
    def supports_dcp(cls) -> bool:
        """Ranks that hold whole pages in turn; ``validate`` checks what goes with it."""
        return True

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
        model = str(dtype).removeprefix("torch.")
        if kv_cache_dtype in ("float16", "bfloat16") and kv_cache_dtype != model:
            return f"{kv_cache_dtype} kv_cache_dtype not supported with {model} weights"
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

        Value and remedy are of the first argument that, changed alone, takes the reason away.
        """
        reasons_for = super().validate_configuration

        def explained(reason: str) -> str:
            for name, (served, text) in REMEDIES.items():
                changed = {**selection, name: served}
                if name in selection and reason not in reasons_for(**changed):
                    value = selection[name]
                    said = isinstance(value, bool) or str(value) in reason
                    return f"{reason}{'' if said else f', got {value}'} (remedy: {text})"
            return f"{reason} (remedy: {LEAVE})"

        return [explained(reason) for reason in reasons_for(**selection)]

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Enlarge every page of a full-attention layer by its summaries, where layers select."""
        engine = latest_engine()
        if engine is None or not engine.selects_blocks:
            return spec
        as_whole = engine.equal_pages and compat.is_part(spec)
        return with_summaries(spec) if as_whole or compat.is_full_attention(spec) else spec
