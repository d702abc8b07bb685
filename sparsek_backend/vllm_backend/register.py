"""Entries in the registries and hooks of the vLLM that is installed.

vLLM, and everything that needs it, is imported by the functions alone: processes that never select
SPARSEK import neither its backend nor its checks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from .compat import HOOKED, add_member, selected_backends
from .names import NSA_ARCHITECTURE


def ensure_member(name: str, path: str, by_reference: Callable[[], Any]) -> Any:
    """Return the member ``name`` of vLLM's backend enum, adding it where it is missing.

    Args:
        by_reference: importable function that returns the member; pickles refer to it.
    """
    from vllm.v1.attention.backends import registry

    enum = registry.AttentionBackendEnum
    member = enum.__members__.get(name)
    if member is not None:
        return member
    member = add_member(enum, name, path)
    registry.register_backend(member, path)
    member.__reduce_ex__ = lambda _protocol: (by_reference, ())
    return member


def hook_platform(name: str, path: str) -> None:
    """Let the current platform check and select our backend; other backends are untouched."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    platform = type(current_platform)
    if HOOKED in vars(platform):
        return
    member = AttentionBackendEnum[name]
    configure = platform.check_and_update_config

    @functools.wraps(configure)
    def check_and_update_config(vllm_config: Any) -> None:
        configure(vllm_config)
        architectures = getattr(vllm_config.model_config, "architectures", ())
        # A draft model's configuration may name the target model and another backend.
        is_nsa = NSA_ARCHITECTURE in architectures and vllm_config.speculative_config is None
        if member in selected_backends(vllm_config) or is_nsa:
            from .validate import check_engine

            check_engine(vllm_config)

    platform.check_and_update_config = staticmethod(check_and_update_config)
    if current_platform.is_cpu():
        select = platform.get_attn_backend_cls

        @functools.wraps(select)
        def get_attn_backend_cls(
            selected_backend: Any, attn_selector_config: Any, *args: Any, **kwargs: Any
        ) -> str:
            if selected_backend is not member:
                chosen: str = select(selected_backend, attn_selector_config, *args, **kwargs)
                return chosen
            from .validate import refuse_if_invalid

            refuse_if_invalid(attn_selector_config._asdict())
            return path

        platform.get_attn_backend_cls = staticmethod(get_attn_backend_cls)
    setattr(platform, HOOKED, True)


def register_model(architecture: str, path: str) -> None:
    """Let vLLM import ``path`` (``module:class``) for checkpoints of this architecture."""
    from vllm import ModelRegistry

    if architecture not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(architecture, path)
