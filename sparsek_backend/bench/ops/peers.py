"""Other implementations of sink + sliding-window attention, each at its best setting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from sparsek_backend.bench.ops.paged_inputs import Step
from sparsek_backend.bench.ops.sink_window_inputs import Inputs
from sparsek_backend.bench.registry import Outputs, Unavailable


@dataclass(frozen=True)
class Call:
    """A call that can be timed, and how its output becomes [B, N, Hq, D] for the gate."""

    run: Callable[[], Any]
    view: Callable[[torch.Tensor], torch.Tensor] = lambda out: out


MaskMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
MASK_LIMIT = 1 << 28
"""Most entries of an explicit attention mask that `sdpa_mask` is asked to build."""

_FLEX_TILES = ("BLOCK_M", "BLOCK_N", "BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2")


def _heads_inside(out: torch.Tensor) -> torch.Tensor:
    return out.transpose(1, 2)


def _refuse(inputs: Inputs) -> None:
    if inputs.sinks is not None:
        raise Unavailable("no learned sink logits")
    if inputs.packed:
        raise Unavailable("no packed batches")


def _sdpa(
    inputs: Inputs, backend: SDPBackend | None, mask: torch.Tensor | None, causal: bool
) -> Call:
    q, k, v = (t.transpose(1, 2) for t in (inputs.q, inputs.k, inputs.v))
    if mask is not None and inputs.group > 1:  # the masked backends take no grouped heads
        k, v = (t.repeat_interleave(inputs.group, dim=1) for t in (k, v))
    grouped = q.shape[1] != k.shape[1]
    call = partial(
        F.scaled_dot_product_attention, q, k, v,
        attn_mask=mask, is_causal=causal, enable_gqa=grouped,
    )  # fmt: skip
    return Call(call if backend is None else sdpa_kernel(backend)(call), _heads_inside)


def sdpa(inputs: Inputs, backend: SDPBackend | None = None) -> Call:
    """`scaled_dot_product_attention` with one backend, or as it comes (dense masks only)."""
    if backend is SDPBackend.CUDNN_ATTENTION and inputs.q.device.type != "cuda":
        raise Unavailable("cuDNN runs on CUDA GPUs only")
    _refuse(inputs)
    if inputs.rule.window_size is not None:
        raise Unavailable("no sink or window mask without an N x N tensor")
    if inputs.rule.causal and inputs.q.shape[1] != inputs.k.shape[1]:
        raise Unavailable("causal attention is top-left aligned")
    return _sdpa(inputs, backend, None, inputs.rule.causal)


sdpa_flash = partial(sdpa, backend=SDPBackend.FLASH_ATTENTION)
sdpa_cudnn = partial(sdpa, backend=SDPBackend.CUDNN_ATTENTION)


def sdpa_mask(inputs: Inputs) -> Call:
    """`scaled_dot_product_attention` with an explicit boolean mask, where that fits."""
    _refuse(inputs)
    if inputs.rule.window_size is None:
        raise Unavailable("dense masks are measured as sdpa_flash and sdpa_cudnn")
    queries, keys = inputs.q.shape[1], inputs.k.shape[1]
    if queries * keys > MASK_LIMIT:
        raise Unavailable(f"its {queries} x {keys} mask is too large")
    rows = torch.arange(queries, device=inputs.q.device) + (keys - queries)
    mask = inputs.rule.visible(rows, torch.arange(keys, device=inputs.q.device))
    is_cuda = inputs.q.device.type == "cuda"
    backend = SDPBackend.EFFICIENT_ATTENTION if is_cuda else SDPBackend.MATH
    return _sdpa(inputs, backend, mask, causal=False)


def flex(inputs: Inputs) -> Call:
    """FlexAttention, compiled for the shape, its block mask built beforehand."""
    rule = inputs.rule
    shift = inputs.k.shape[1] - inputs.q.shape[1]
    num_sink, window = rule.num_sink, rule.window_size

    def mask_mod(
        _b: torch.Tensor, _h: torch.Tensor, row: torch.Tensor, col: torch.Tensor
    ) -> torch.Tensor:
        at = row + shift
        seen = col <= at
        if window is not None:
            seen = seen & ((col > at - window) | (col < num_sink))
        return seen

    return flex_under(inputs, mask_mod if rule.causal else None)


def flex_under(
    inputs: Inputs, mask_mod: MaskMod | None, heads: int | None = None, block_size: int = 128
) -> Call:
    """FlexAttention under a mask, of which ``heads`` heads differ, with blocks of its own."""
    if inputs.q.device.type != "cuda":
        raise Unavailable("compiled FlexAttention is measured on CUDA GPUs only")
    _refuse(inputs)
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v = (t.transpose(1, 2) for t in (inputs.q, inputs.k, inputs.v))
    torch._dynamo.reset()
    block_mask = None
    if mask_mod is not None:
        build = torch.compile(create_block_mask, dynamic=False)
        block_mask = build(
            mask_mod, None, heads, q.shape[2], k.shape[2], device=q.device, BLOCK_SIZE=block_size
        )
    compiled = torch.compile(flex_attention, dynamic=False)
    options: Any = None
    if block_size < 128:  # its own tiles are larger than the blocks, which it refuses
        options = dict.fromkeys(_FLEX_TILES, block_size) | {"num_warps": 4}

    call = partial(
        compiled, q, k, v,
        block_mask=block_mask, enable_gqa=inputs.group > 1, kernel_options=options,
    )  # fmt: skip
    return Call(call, _heads_inside)


def fa3(inputs: Inputs) -> Call:
    """FlashAttention-3 as vLLM ships it: a window, no sink tokens, forward only."""
    flash_attn_varlen_func = load_fa3(inputs.q)
    rule = inputs.rule
    window = [-1, -1] if rule.window_size is None else [rule.window_size - 1, 0]
    q, k, v = (t.flatten(0, 1) for t in (inputs.q, inputs.k, inputs.v))
    sinks = None if inputs.sinks is None else inputs.sinks.to(q.dtype)
    call = partial(
        flash_attn_varlen_func,
        q,
        k,
        v,
        max_seqlen_q=max(inputs.query_lens),
        cu_seqlens_q=inputs.cu_q,
        max_seqlen_k=max(inputs.seq_lens),
        cu_seqlens_k=inputs.cu_k,
        causal=rule.causal,
        window_size=window,
        fa_version=3,
        s_aux=sinks,
    )
    return Call(call, lambda out: out.view_as(inputs.q))


def load_fa3(tensor: torch.Tensor) -> Callable[..., torch.Tensor]:
    """vLLM's `flash_attn_varlen_func`; `Unavailable` where version 3 does not run."""
    if tensor.device.type != "cuda":
        raise Unavailable("FlashAttention-3 runs on CUDA GPUs only")
    if torch.cuda.get_device_capability(tensor.device)[0] != 9:
        raise Unavailable("FlashAttention-3 needs compute capability 9.x")
    if tensor.dtype not in (torch.bfloat16, torch.float16):
        raise Unavailable(f"FlashAttention-3 takes fp16 and bf16, not {tensor.dtype}")
    try:
        from vllm.vllm_flash_attn import flash_attn_varlen_func
    except ImportError as error:
        raise Unavailable(f"vLLM's FlashAttention is not importable: {error}") from error
    call: Callable[..., torch.Tensor] = flash_attn_varlen_func
    return call


def fa3_paged(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, steps: Sequence[Step]
) -> Callable[[], Outputs]:
    """FlashAttention-3 of ``q [T, Hq, D]`` over pages ``[P, Hkv, page_size, D]``, step by step."""
    flash_attn_varlen_func = load_fa3(q)
    out = torch.empty_like(q)
    k, v = k_cache.transpose(1, 2), v_cache.transpose(1, 2)

    def call() -> Outputs:
        for batch, rows in steps:
            flash_attn_varlen_func(
                q[rows],
                k,
                v,
                max_seqlen_q=batch.max_query_len,
                cu_seqlens_q=batch.cu_seqlens_q,
                max_seqlen_k=batch.max_seq_len,
                seqused_k=batch.seq_lens,
                block_table=batch.block_table,
                causal=True,
                fa_version=3,
                out=out[rows],
            )
        return (out,)

    return call


def cpu_attn_paged(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, steps: Sequence[Step]
) -> Callable[[], Outputs]:
    """vLLM's CPU_ATTN of ``q [T, Hq, D]`` over pages ``[P, Hkv, page_size, D]``, step by step.

    It attends a copy of the pages in the order of bytes that it writes itself.
    """
    if q.device.type != "cpu":
        raise Unavailable("CPU_ATTN runs on CPUs only")
    try:
        from vllm import _custom_ops as ops
        from vllm import envs
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
    except ImportError as error:
        raise Unavailable(f"vLLM's CPU_ATTN is not importable: {error}") from error
    if not hasattr(torch.ops._C, "cpu_attn_reshape_and_cache"):
        raise Unavailable("this vLLM is not built for CPUs")
    pages, kv_heads, page_size, dim = k_cache.shape
    isa = _get_attn_isa(q.dtype, page_size, dim)
    k, v = torch.empty(pages, kv_heads, 2 * page_size, dim, dtype=q.dtype).chunk(2, dim=2)
    written = [cache.transpose(1, 2).flatten(0, 1) for cache in (k_cache, v_cache)]
    ops.cpu_attn_reshape_and_cache(*written, k, v, torch.arange(pages * page_size), isa)
    plans = [
        ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(batch.seq_lens),
            num_heads=q.shape[1],
            num_kv_heads=kv_heads,
            head_dim=dim,
            seq_lens=batch.seq_lens,
            dtype=q.dtype,
            query_start_loc=batch.cu_seqlens_q,
            causal=True,
            sliding_window_size=-1,
            isa=isa,
            enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
        )
        for batch, _ in steps
    ]
    out = torch.empty_like(q)

    def call() -> Outputs:
        for (batch, rows), plan in zip(steps, plans, strict=True):
            ops.cpu_attention_with_kv_cache(
                query=q[rows],
                key_cache=k,
                value_cache=v,
                output=out[rows],
                query_start_loc=batch.cu_seqlens_q,
                seq_lens=batch.seq_lens,
                scale=dim**-0.5,
                causal=True,
                alibi_slopes=None,
                sliding_window=-1,
                block_table=batch.block_table,
                softcap=0.0,
                scheduler_metadata=plan,
                s_aux=None,
            )
        return (out,)

    return call
