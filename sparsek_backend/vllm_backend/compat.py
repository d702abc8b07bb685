"""Every difference between the supported vLLM versions (0.26 - 0.33), told apart by feature.

Nothing of vLLM is imported at module level: the plugin imports this module in every process.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

HOOKED = "_sparsek_hooked"
"""Attribute of the vLLM classes whose methods are wrapped, so that they are wrapped once."""


def selected_backends(vllm_config: Any) -> tuple[Any, ...]:
    """Return every backend that the user named for this engine."""
    attention = vllm_config.attention_config
    per_kind: Mapping[str, Any] = getattr(attention, "backend_per_kind", None) or {}
    return (attention.backend, *per_kind.values())


def is_batch_invariant() -> bool:
    """Whether ``VLLM_BATCH_INVARIANT`` is set; of an engine, ``ResolvedConfig`` says so."""
    from vllm import envs

    return bool(envs.VLLM_BATCH_INVARIANT)


def tensor_rank() -> tuple[int, int]:
    """This process's tensor-parallel rank, and how many there are."""
    from vllm.distributed import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return 0, 1
    rank: int = parallel_state.get_tensor_model_parallel_rank()
    return rank, parallel_state.get_tensor_model_parallel_world_size()


def context_group() -> Any:
    """Return vLLM's group of decode context parallel ranks, of which this process is one."""
    from vllm.distributed import parallel_state

    return parallel_state.get_dcp_group()


def is_first_tensor_rank() -> bool:
    """Whether this process is the first of the tensor-parallel ranks, or the only one."""
    return tensor_rank()[0] == 0


def metric_labels(vllm_config: Any) -> dict[str, str]:
    """Return the labels of an engine's metrics, as vLLM's own have them."""
    served = vllm_config.model_config.served_model_name
    parallel = vllm_config.parallel_config
    index = getattr(parallel, "data_parallel_index", parallel.data_parallel_rank)
    return {
        "model_name": str(served[0] if isinstance(served, list) else served),
        "engine": str(index),
    }


def rotation_of(model: Any) -> Any:
    """Return :attr:`PagedBatch.rotation` of a model on a CPU, by the module its layers rotate with.

    vLLM keeps one module for equal arguments: called while the layers are built, this is theirs.
    Half of a head turned by a position has its cosines, the other half its sines.
    """
    import torch
    from vllm.model_executor.layers.rotary_embedding import get_rope

    config, size = model.hf_text_config, model.get_head_size()
    rotary = get_rope(
        size,
        max_position=config.max_position_embeddings,
        rope_parameters=config.rope_parameters,
    )
    device = next(rotary.buffers(), torch.empty(0)).device
    count = min(model.max_model_len, config.max_position_embeddings)
    positions = torch.arange(count, device=device)
    probe = torch.ones(count, size, dtype=torch.float32, device=device)
    probe[:, size // 2 :] = 0.0
    own = getattr(rotary, "cos_sin_cache", None)
    turned, _ = getattr(rotary, "forward_native", rotary.forward)(positions, probe, probe.clone())
    if own is not None:  # which the module has made as wide as the probe
        rotary.cos_sin_cache = own
    return turned.float().cpu()


def hook_kv_cache_spec(customize: Callable[[Any, Any, int], Any]) -> None:
    """Where backends have no ``customize_spec``, wrap the layer method that makes the spec.

    Args:
        customize: called with the layer, its spec and the engine's page size in tokens; returns
            the spec to use.
    """
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.attention.backend import AttentionBackend

    if hasattr(AttentionBackend, "customize_spec") or HOOKED in vars(Attention):
        return
    original = Attention.get_kv_cache_spec

    @functools.wraps(original)
    def get_kv_cache_spec(self: Any, vllm_config: Any) -> Any:
        spec = original(self, vllm_config)
        if spec is None:
            return None
        return customize(self, spec, vllm_config.cache_config.block_size)

    Attention.get_kv_cache_spec = get_kv_cache_spec
    setattr(Attention, HOOKED, True)


def head_major_layouts() -> Sequence[Any]:
    """Return the KV layouts (0.29 and later) whose pages hold one head's tokens contiguously."""
    from vllm.v1.kv_cache_interface import KVCacheLayout

    return (KVCacheLayout.LBHNC, KVCacheLayout.BLHNC)


def declares_content() -> bool:
    """Whether a KV cache's shape follows from its spec, what a token takes included (0.29, later).

    Everything in vLLM that moves or sizes pages then knows all bytes of a page.
    """
    from vllm.v1.attention.backend import AttentionBackend

    return hasattr(AttentionBackend, "supported_kv_cache_layouts")


def with_content(spec: Any, token_bytes: int) -> Any:
    """Return ``spec`` with ``token_bytes`` for each token and KV head, K and V included."""
    return replace(spec, state_content_bytes=token_bytes)


def content_bytes(spec: Any) -> int:
    """Return the bytes that a token takes for each KV head, padding of pages left out."""
    declared: int | None = getattr(spec, "state_content_bytes", None)
    return declared or 2 * spec.head_size * spec.dtype.itemsize


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


def host_seq_lens(common: Any, on_host: bool, exact: bool) -> Any:
    """Return the requests' lengths as a CPU tensor.

    Args:
        common: vLLM's ``CommonAttentionMetadata``.
        on_host: whether the device is the CPU, so that ``seq_lens`` itself is there.
        exact: whether to wait for the device where vLLM keeps no lengths on the host.

    Returns:
        ``[R]``; when ``on_host`` is false, an upper bound, which is exact for prefills where vLLM
        keeps lengths or ``exact`` is set.
    """
    if on_host:
        return common.seq_lens
    if common.seq_lens_cpu_upper_bound is not None:
        return common.seq_lens_cpu_upper_bound
    if exact:
        return common.seq_lens.cpu()
    counts = common.query_start_loc_cpu.diff()
    return counts.new_full(counts.shape, common.max_seq_len)


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
