"""SPARSEK for the layers of natively sparse models, which name this class themselves."""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backend import AttentionBackend

from sparsek_backend.vllm_backend import compat
from sparsek_backend.vllm_backend.engine import latest_engine
from sparsek_backend.vllm_backend.layout import HeadMajorPages
from sparsek_backend.vllm_backend.settings import nsa_section

from .impl import NSAImpl
from .metadata import NSAMetadataBuilder
from .pages import tail_elements


class NSABackend(HeadMajorPages, AttentionBackend):
    """vLLM's view of natively sparse layers.

    Batch invariance is not supported, which is the default: prefills and decodes go through kernels
    that round differently.
    """

    @staticmethod
    def get_impl_cls() -> type[NSAImpl]:
        """Return the per-layer implementation."""
        return NSAImpl

    @staticmethod
    def get_builder_cls() -> type[NSAMetadataBuilder]:
        """Return the builder of the per-step metadata."""
        return NSAMetadataBuilder

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Enlarge every page by its compressed keys and values."""
        engine = latest_engine()
        if engine is None:
            raise RuntimeError("customize_spec: expected layers of this backend in an engine")
        config = nsa_section(engine.resolved)
        elements = tail_elements(config, spec.num_kv_heads, spec.block_size, spec.head_size)
        return compat.pad_page(spec, elements * spec.dtype.itemsize)
