"""Every difference between the supported vLLM versions, told apart by feature.

The extra ``vllm`` of ``pyproject.toml`` says which versions these are.  Nothing of vLLM is imported
at module level: the plugin imports this module in every process.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

HOOKED = "_sparsek_hooked"
"""Attribute of the vLLM classes whose methods are wrapped, so that they are wrapped once."""


DECLARES_CONTENT_FROM = "0.29"
"""The first version in which :func:`declares_content` holds."""


def add_member(enum: Any, name: str, path: str) -> Any:
    """Return a new member of vLLM's backend enum, which has a method for that from 0.32 on."""
    if hasattr(enum, "register"):
        return enum.register(name, path)
    member = object.__new__(enum)
    member._name_ = name
    member._value_ = path
    type.__setattr__(enum, name, member)
    enum._member_map_[name] = member
    enum._value2member_map_[path] = member
    enum._member_names_.append(name)
    return member


def selected_backends(vllm_config: Any) -> tuple[Any, ...]:
    """Return every backend that the user named for this engine."""
    attention = vllm_config.attention_config
    per_kind: Mapping[str, Any] = getattr(attention, "backend_per_kind", None) or {}
    return (attention.backend, *per_kind.values())


def current_config() -> Any:
    """Return the configuration that vLLM has set as the current one, or ``None``."""
    from vllm.config import get_current_vllm_config_or_none

    return get_current_vllm_config_or_none()


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


def shares_steps_with_drafts(vllm_config: Any) -> bool:
    """Whether a draft's layers attend steps of the served model's, beside steps of their own.

    In vLLM's second model runner drafts that read the model's states do so (EAGLE, MTP of one
    module).  MTP of several modules does not, nor do drafts of all tokens at once (DFlash, DSpark).
    """
    drafts = vllm_config.speculative_config
    if not drafts or not vllm_config.use_v2_model_runner:
        return False
    apart = ("uses_draft_model", "use_multi_module_mtp", "use_dflash", "use_dspark")
    return not any(getattr(drafts, name, bool)() for name in apart)


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
        size, max_position=config.max_position_embeddings, rope_parameters=config.rope_parameters
    )
    device = next(rotary.buffers(), torch.empty(0)).device
    own = getattr(rotary, "cos_sin_cache", None)  # longer than that where RoPE is scaled
    known = config.max_position_embeddings if own is None else own.shape[0]
    positions = torch.arange(min(model.max_model_len, known), device=device)
    probe = torch.ones(len(positions), size, dtype=torch.float32, device=device)
    probe[:, size // 2 :] = 0.0
    turned, _ = getattr(rotary, "forward_native", rotary.forward)(positions, probe, probe.clone())
    if own is not None:  # which the module has made as wide as the probe
        rotary.cos_sin_cache = own
    return turned.float().cpu()


def hook_kv_cache_spec(backend_name: str, selects_blocks: Callable[[], bool]) -> None:
    """Call backends' ``customize_spec`` where vLLM does not (before 0.32), by the layers' method.

    That vLLM starts window layers from its smallest page and pads it to the largest one of the
    model, which would waste most of each page: they get pages of as many tokens as the others.
    """
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.attention.backend import AttentionBackend

    if hasattr(AttentionBackend, "customize_spec") or HOOKED in vars(Attention):
        return
    original = Attention.get_kv_cache_spec

    @functools.wraps(original)
    def get_kv_cache_spec(self: Any, vllm_config: Any) -> Any:
        spec = original(self, vllm_config)
        if spec is None or self.attn_backend.get_name() != backend_name:
            return spec
        if selects_blocks() and not is_full_attention(spec):
            spec = replace(spec, block_size=vllm_config.cache_config.block_size)
        return self.attn_backend.customize_spec(spec)

    Attention.get_kv_cache_spec = get_kv_cache_spec
    setattr(Attention, HOOKED, True)


_PROMPT_LENGTHS: dict[str, dict[str, Callable[..., Any]]] = {
    "vllm.v1.worker.gpu_model_runner": {
        "_build_attention_metadata": lambda own, *_: own.input_batch.num_prompt_tokens
    },
    "vllm.v1.worker.gpu.model_runner": {
        "prepare_attn": lambda own, batch: own.req_states.prompt_len.np[batch.idx_mapping_np],
        "prepare_dummy_attn": lambda *_: (),
    },
}
"""By the module of a model runner, methods that it calls before the metadata of a step are built,
and where it has the lengths of the step's prompts."""


def hook_prompt_lengths(keep: Callable[[Any, Any], None]) -> None:
    """Call ``keep`` with the prompt lengths of each step, which vLLM's metadata does not have.

    A model runner knows them, on the host, when it prepares a step.  vLLM has two runners; a
    process has imported its own by the time that layers are built.

    Args:
        keep: takes the runner's configuration, and the prompt lengths of the step's requests in
            their order: ``None`` where this version keeps them elsewhere, none of made-up requests.
    """

    def hook(runner: Any, name: str, lengths: Callable[..., Any]) -> None:
        original = getattr(runner, name)

        @functools.wraps(original)
        def prepare(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                found = lengths(self, *args)
            except (AttributeError, TypeError):  # a version that is not known
                found = None
            keep(self.vllm_config, found)
            return original(self, *args, **kwargs)

        setattr(runner, name, prepare)

    for module, methods in _PROMPT_LENGTHS.items():
        runner = getattr(sys.modules.get(module), "GPUModelRunner", None)
        if runner is None or HOOKED in vars(runner):
            continue
        for name, lengths in methods.items():
            if hasattr(runner, name):
                hook(runner, name, lengths)
        setattr(runner, HOOKED, True)


class HeadMajorLayout:
    """The layout of a KV cache whose pages hold one head's tokens contiguously.

    From 0.29 a backend names vLLM's own layouts, which are logically ``[pages, Hkv, page_size, C]``
    with ``C`` elements for a token.  Before, it states a shape and the order of its dimensions.
    """

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        """Return vLLM's layouts in which one head's tokens of a page are contiguous."""
        from vllm.v1.kv_cache_interface import KVCacheLayout

        return (KVCacheLayout.LBHNC, KVCacheLayout.BLHNC)

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


def declares_content() -> bool:
    """Whether a KV cache's shape follows from its spec, what a token takes included.

    Everything in vLLM that moves or sizes pages then knows all bytes of a page.
    """
    from vllm.v1.attention.backend import AttentionBackend

    return hasattr(AttentionBackend, "supported_kv_cache_layouts")


def with_bytes_behind(spec: Any, behind: int) -> Any:
    """Return ``spec`` with ``behind`` bytes more for each token and KV head.

    Where specs state their content, a head's bytes follow that head's K and V, so that whatever
    moves a page or one head of it moves them too.  Before, all of them are at the page's end.
    """
    if not declares_content():
        return pad_page(spec, spec.num_kv_heads * spec.block_size * behind)
    return replace(spec, state_content_bytes=2 * spec.head_size * spec.dtype.itemsize + behind)


def page_elements(kv_cache: torch.Tensor, head_size: int, behind: int) -> int:
    """Return the elements of a page, ``behind`` K and V of each token and KV head included."""
    _, heads, page_size, content = kv_cache.shape
    if content == 2 * head_size:  # they are in the padding at the page's end
        content += behind
    return heads * page_size * content


def place_behind(kv_cache: torch.Tensor, head_size: int, wanted: int) -> tuple[int, int, int]:
    """Return where a page's elements behind K and V are, of which each head wants some.

    Returns:
        Elements that there are for each head, where the first head's begin in a page, and from one
        head's to the next one's.
    """
    _, heads, page_size, content = kv_cache.shape
    page_stride, head_stride = kv_cache.stride()[:2]
    used = page_size * 2 * head_size  # by one head's K and V
    if content > 2 * head_size:
        return page_size * content - used, used, head_stride
    return page_stride // heads - used, heads * used, wanted


def content_bytes(spec: Any) -> int:
    """Return the bytes that a token takes for each KV head, padding of pages left out."""
    declared: int | None = getattr(spec, "state_content_bytes", None)
    return declared or 2 * spec.head_size * spec.dtype.itemsize


def pad_page(spec: Any, tail_bytes: int) -> Any:
    """Return ``spec`` with ``tail_bytes`` more in every page, which vLLM then accounts for."""
    return replace(spec, page_size_padded=spec.unpadded_page_size_bytes + tail_bytes)


def is_full_attention(spec: Any) -> bool:
    """Whether a KV cache spec keeps every token of a sequence, and K and V apart."""
    from vllm.v1 import kv_cache_interface as interface

    return (
        isinstance(spec, interface.FullAttentionSpec)
        and not isinstance(spec, interface.MLAAttentionSpec)
        and getattr(spec, "tokens_per_state", 1) == 1
    )


def is_part(spec: Any) -> bool:
    """Whether a KV cache spec is of a layer that attends a window or a chunk, K and V apart."""
    from vllm.v1 import kv_cache_interface as interface

    parts = interface.SlidingWindowSpec, interface.ChunkedLocalAttentionSpec
    latent = getattr(interface, "SlidingWindowMLASpec", ())
    return isinstance(spec, parts) and not isinstance(spec, latent)


def attends_whole_context(layer: Any, spec: Any) -> bool:
    """Whether a layer without a window attends every token of a sequence.

    Chunks of chunked attention (Llama 4) are requests of their own to it.  Without the hybrid KV
    manager its pages keep every token, and one spec may cover chunked and whole layers.
    """
    from vllm.model_executor.layers.attention import ChunkedLocalAttention

    return is_full_attention(spec) and not isinstance(layer, ChunkedLocalAttention)


def host_seq_lens(common: Any, on_host: bool, wait: bool) -> tuple[Any, bool]:
    """Return the requests' lengths, ``[R]`` on the CPU, and whether vLLM knows them one by one.

    Where neither ``on_host`` nor ``wait`` they may be upper bounds: vLLM may schedule a step before
    it knows how many drafts of the step before were accepted.  Of prompts they are exact.

    Args:
        wait: whether to wait for the device.
    """
    if on_host:
        return common.seq_lens, True
    if wait:
        return common.seq_lens.cpu(), True
    if common.seq_lens_cpu_upper_bound is not None:
        return common.seq_lens_cpu_upper_bound, True
    counts = common.query_start_loc_cpu.diff()
    return counts.new_full(counts.shape, common.max_seq_len), False


def flash_attention(head_size: int, has_sinks: bool) -> tuple[Callable[..., Any], int] | None:
    """Return vLLM's FlashAttention function and version for a layer, or ``None`` without one."""
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
