"""Every difference between the supported vLLM versions (0.26 - 0.33), told apart by feature.

Nothing of vLLM is imported at module level: the plugin imports this module in every process.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sparsek_backend.plugin import NSA_ARCHITECTURE

_HOOKED = "_sparsek_hooked"


def ensure_member(name: str, path: str, by_reference: Callable[[], Any]) -> Any:
    """Return the member ``name`` of vLLM's backend enum, adding it where it is missing.

    Args:
        name: the member's name, as after ``--attention-backend``.
        path: import path of the backend class.
        by_reference: importable function that returns the member; pickles refer to it.

    Returns:
        The enum member.
    """
    from vllm.v1.attention.backends import registry

    enum = registry.AttentionBackendEnum
    member = enum.__members__.get(name)
    if member is not None:
        return member
    if hasattr(enum, "register"):
        member = enum.register(name, path)
    else:
        member = object.__new__(enum)
        member._name_ = name
        member._value_ = path
        type.__setattr__(enum, name, member)
        enum._member_map_[name] = member
        enum._value2member_map_[path] = member
        enum._member_names_.append(name)
    registry.register_backend(member, path)
    member.__reduce_ex__ = lambda _protocol: (by_reference, ())
    return member


def hook_platform(name: str, path: str) -> None:
    """Let the current platform check and select our backend; other backends are untouched.

    Args:
        name: our member of the backend enum.
        path: import path of the backend class.
    """
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    platform = type(current_platform)
    if _HOOKED in vars(platform):
        return
    member = AttentionBackendEnum[name]
    configure = platform.check_and_update_config

    @functools.wraps(configure)
    def check_and_update_config(vllm_config: Any) -> None:
        configure(vllm_config)
        architectures = getattr(vllm_config.model_config, "architectures", ())
        if member in selected_backends(vllm_config) or NSA_ARCHITECTURE in architectures:
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
    setattr(platform, _HOOKED, True)


def selected_backends(vllm_config: Any) -> tuple[Any, ...]:
    """Return every backend that the user named for this engine."""
    attention = vllm_config.attention_config
    per_kind: Mapping[str, Any] = getattr(attention, "backend_per_kind", None) or {}
    return (attention.backend, *per_kind.values())


def is_batch_invariant() -> bool:
    """Whether ``VLLM_BATCH_INVARIANT`` is set; of an engine, ``ResolvedConfig`` says so."""
    from vllm import envs

    return bool(envs.VLLM_BATCH_INVARIANT)


def is_first_tensor_rank() -> bool:
    """Whether this process is the first of those that share its layers' heads, or the only one."""
    from vllm.distributed import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return True
    return bool(parallel_state.get_tensor_model_parallel_rank() == 0)


def register_model(architecture: str, path: str) -> None:
    """Let vLLM import ``path`` (``module:class``) for checkpoints of this architecture."""
    from vllm import ModelRegistry

    if architecture not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(architecture, path)


def hook_kv_cache_spec(customize: Callable[[Any, Any, int], Any]) -> None:
    """Where backends have no ``customize_spec``, wrap the layer method that makes the spec.

    Args:
        customize: called with the layer, its spec and the engine's page size in tokens; returns
            the spec to use.
    """
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.attention.backend import AttentionBackend

    if hasattr(AttentionBackend, "customize_spec") or _HOOKED in vars(Attention):
        return
    original = Attention.get_kv_cache_spec

    @functools.wraps(original)
    def get_kv_cache_spec(self: Any, vllm_config: Any) -> Any:
        spec = original(self, vllm_config)
        if spec is None:
            return None
        return customize(self, spec, vllm_config.cache_config.block_size)

    Attention.get_kv_cache_spec = get_kv_cache_spec
    setattr(Attention, _HOOKED, True)


def head_major_layouts() -> Sequence[Any]:
    """Return the KV layouts (0.32 and later) whose pages hold one head's tokens contiguously."""
    from vllm.v1.kv_cache_interface import KVCacheLayout

    return (KVCacheLayout.LBHNC, KVCacheLayout.BLHNC)


def pad_page(spec: Any, tail_bytes: int) -> Any:
    """Return ``spec`` with ``tail_bytes`` more in every page, which vLLM then accounts for."""
    return replace(spec, page_size_padded=spec.unpadded_page_size_bytes + tail_bytes)


def with_page_size(spec: Any, page_size: int) -> Any:
    """Return ``spec`` with pages of ``page_size`` tokens."""
    return replace(spec, block_size=page_size)


def is_full_attention(spec: Any) -> bool:
    """Whether a KV cache spec keeps every token of a sequence, and K and V apart."""
    from vllm.v1 import kv_cache_interface as interface

    return isinstance(spec, interface.FullAttentionSpec) and not isinstance(
        spec, interface.MLAAttentionSpec
    )


def host_seq_lens(common: Any, on_host: bool) -> Any:
    """Return the requests' lengths on the host without synchronising.

    Args:
        common: vLLM's ``CommonAttentionMetadata``.
        on_host: whether the device is the CPU, so that ``seq_lens`` itself is there.

    Returns:
        A CPU tensor; when ``on_host`` is false, an upper bound that is exact for prefills.
    """
    if on_host:
        return common.seq_lens
    bound = common.seq_lens_cpu_upper_bound
    if bound is not None:
        return bound
    counts = common.query_start_loc_cpu.diff()
    return counts.new_full(counts.shape, common.max_seq_len)


def prefill_seq_lens(common: Any) -> Any:
    """Return the requests' lengths as a CPU tensor that is exact for prefills.

    Waits for the device where vLLM keeps no such lengths on the host.
    """
    bound = common.seq_lens_cpu_upper_bound
    return common.seq_lens.cpu() if bound is None else bound


def flash_attention(head_size: int, has_sinks: bool) -> tuple[Callable[..., Any], int] | None:
    """Return vLLM's FlashAttention function and version for a layer, or ``None`` without one.

    Args:
        head_size: the layer's head dimension.
        has_sinks: whether the layer has learned sink logits.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return None
    try:
        from vllm.v1.attention.backends import fa_utils, flash_attn
    except ImportError:  # a build of vLLM without its FlashAttention extension
        return None
    if not flash_attn.FlashAttentionBackend.supports_head_size(head_size):
        return None
    known = inspect.signature(fa_utils.get_flash_attn_version).parameters
    wanted = {"head_size": head_size, "has_sinks": has_sinks}
    version = fa_utils.get_flash_attn_version(
        **{name: value for name, value in wanted.items() if name in known}
    )
    if version is None or (has_sinks and not fa_utils.flash_attn_supports_sinks()):
        return None
    return fa_utils.flash_attn_varlen_func, int(version)
