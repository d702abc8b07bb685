"""SparseK as an xFormers operator pair: ``memory_efficient_attention(..., op=(FwOp, BwOp))``.

The bias decides the path: bands run on ``sink_flash_attention``, patterns on
``block_sparse_attention``, decoding over padded or paged keys on the paged kernels, tensor biases
and dropout in torch (:mod:`dense`).  Anything else is
refused through ``not_supported_reasons``.  CPU tensors take the same way through the kernels'
torch path.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import torch

from sparsek_backend.xformers_op.biases import BlockSparseMask, SinkWindowMask
from sparsek_backend.xformers_op.compat import (
    AttentionBwOpBase,
    AttentionFwOpBase,
    Context,
    Gradients,
    Inputs,
    accept_grouped_gradients,
    register_names,
)
from sparsek_backend.xformers_op.dense import (
    biased_attention_bwd,
    biased_attention_fwd,
    sdpa_with_bias,
    visible_keys,
)
from sparsek_backend.xformers_op.native import native_backward, native_forward
from sparsek_backend.xformers_op.paged import page_size_of, paged_forward
from sparsek_backend.xformers_op.plan import (
    BACKWARD_TYPES,
    FORWARD_TYPES,
    Interval,
    MaskPlan,
    Terms,
    bias_reasons,
    plan_of,
)
from sparsek_kernels.checks import FLOAT_DTYPES, MAX_HEAD_DIM
from sparsek_kernels.fallback import count_fallback

_OWN_TYPES = (SinkWindowMask, BlockSparseMask, torch.nn.Parameter)


def _xformers_types(types: tuple[type, ...]) -> tuple[type, ...]:
    return tuple(kind for kind in types if kind not in _OWN_TYPES)


def _reasons(op: Any, inp: Inputs, types: tuple[type, ...]) -> list[str]:
    """Why ``op`` cannot take these inputs; empty when it can."""
    q, k, v = inp.query, inp.key, inp.value
    if type(inp) is not Inputs:
        return [f"inputs are {type(inp).__name__} (quantised keys are not supported)"]
    found: list[str] = list(
        op.shape_not_supported_reasons(Mq=q.shape[1], Mkv=k.shape[1], K=q.shape[-1], Kv=v.shape[-1])
    )
    if q.device.type not in op.SUPPORTED_DEVICES:
        found.append(f"device={q.device.type} (supported: {op.SUPPORTED_DEVICES})")
    elif q.device.type == "cuda" and torch.version.hip is None:
        capability = torch.cuda.get_device_capability(q.device)
        if capability < op.CUDA_MINIMUM_COMPUTE_CAPABILITY:
            found.append(f"compute capability {capability} < {op.CUDA_MINIMUM_COMPUTE_CAPABILITY}")
    if not q.dtype == k.dtype == v.dtype or q.dtype not in op.SUPPORTED_DTYPES:
        found.append(
            f"dtypes {q.dtype}, {k.dtype}, {v.dtype} "
            f"(expected one of {sorted(map(str, op.SUPPORTED_DTYPES))} for all three)"
        )
    if inp.output_dtype is not None and inp.output_dtype is not q.dtype:
        found.append(f"output_dtype={inp.output_dtype} differs from the inputs' {q.dtype}")
    if getattr(inp, "quantize_pv_to_fp8", False) or getattr(inp, "quantize_qk_to_fp8", False):
        found.append("FP8 quantisation was asked for")
    if inp.scale is not None and not (math.isfinite(inp.scale) and inp.scale > 0.0):
        found.append(f"scale={inp.scale} (expected a finite number > 0)")
    if type(inp.attn_bias) not in types:
        found.append(f"attn_bias type is {type(inp.attn_bias)}")
    else:
        found += bias_reasons(inp)
    return found


def _fallback_reason(inp: Inputs, plan: MaskPlan) -> str | None:
    """The reason why torch serves these inputs, or None where a kernel does."""
    if inp.p != 0.0:
        return "xFormers attention with dropout"
    if plan.bias is not None:
        return "xFormers attention with a tensor bias"
    if plan.outruns_window:
        return "an xFormers local mask with more queries than keys"
    return None


def runs_kernels(inp: Inputs) -> bool:
    """Whether these supported inputs run on SparseK's kernels (else in torch operations)."""
    return _fallback_reason(inp, plan_of(inp.attn_bias)) is None


def _fold(inp: Inputs, share_kv: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value as ``[B, tokens, heads, dim]``.

    With ``share_kv`` keys that are expanded over the query heads (MQA, GQA) keep one head per
    group; a gradient needs them expanded.
    """
    q, k, v = inp.query, inp.key, inp.value
    if q.dim() == 5:
        shared = share_kv and k.stride(3) == 0 and v.stride(3) == 0
        k, v = (x[:, :, :, 0] if shared else x.flatten(2, 3) for x in (k, v))
        return q.flatten(2, 3), k, v
    if share_kv and q.shape[2] > 1 and k.stride(2) == 0 and v.stride(2) == 0:
        k, v = k[:, :, :1], v[:, :, :1]
    return q, k, v


def _fold_bias(plan: MaskPlan) -> torch.Tensor | None:
    """The additive tensor as ``[B, H, N, M]``."""
    bias = plan.bias
    return bias.flatten(1, 2) if bias is not None and bias.dim() == 5 else bias


def _pieces(plan: MaskPlan, num_q: int, num_k: int) -> Iterator[tuple[slice, slice, Terms]]:
    """Queries and keys of each sequence for the torch path, and the terms of its band."""
    pairs: Iterable[tuple[Interval, Interval]] = [((0, num_q), (0, num_k))]
    if plan.segments is not None:
        queries, keys = plan.segments.query_intervals(), plan.segments.key_intervals()
        pairs = zip(queries, keys, strict=True)
    for (q_lo, q_hi), (k_lo, k_hi) in pairs:
        terms = plan.band.terms(q_hi - q_lo, k_hi - k_lo)
        yield slice(q_lo, q_hi), slice(k_lo, k_hi), terms


def _dense_forward(
    inp: Inputs, plan: MaskPlan, needs_lse: bool
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Output, log-sum-exp and random seed of the torch path."""
    q, k, v = _fold(inp, share_kv=False)
    bias, scale = _fold_bias(plan), inp.scale_float
    seed = torch.randint(1 << 62, (), dtype=torch.int64) if inp.p != 0.0 else None
    pieces = list(_pieces(plan, q.shape[1], k.shape[1]))
    if not needs_lse and seed is None and bias is not None and k.shape[1]:
        causal, shift, window, sinks = pieces[0][2]
        seen = None
        if causal:
            seen = visible_keys(0, q.shape[1], k.shape[1], shift, window, sinks, q.device)
        return sdpa_with_bias(q, k, v, bias, seen, scale), None, None
    out = q.new_zeros(*q.shape[:3], v.shape[3])
    lse = q.new_zeros((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
    for index, (rows, keys, terms) in enumerate(pieces):
        out[:, rows], lse[:, :, rows] = biased_attention_fwd(
            q[:, rows], k[:, keys], v[:, keys], bias, seed, index, *terms, inp.p, scale
        )
    return out, lse, seed


def _dense_backward(
    inp: Inputs, plan: MaskPlan, grad: torch.Tensor, seed: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    q, k, v = _fold(inp, share_kv=False)
    bias = _fold_bias(plan)
    dout = grad.reshape(*q.shape[:3], v.shape[3])
    bias_grad = isinstance(inp.attn_bias, torch.Tensor) and inp.attn_bias.requires_grad
    dq = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    dk, dv = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))
    dbias = None
    for index, (rows, keys, terms) in enumerate(_pieces(plan, q.shape[1], k.shape[1])):
        dq[:, rows], dk[:, keys], dv[:, keys], dbias = biased_attention_bwd(
            dout[:, rows], q[:, rows], k[:, keys], v[:, keys], bias, seed, index, *terms,
            inp.p, inp.scale_float, bias_grad,
        )  # fmt: skip
    return dq, dk, dv, dbias.view(inp.attn_bias.shape) if bias_grad and dbias is not None else None


class _Limits:
    """What both operators take, as xFormers asks for it."""

    SUPPORTED_DEVICES: ClassVar = {"cuda", "cpu"}
    CUDA_MINIMUM_COMPUTE_CAPABILITY = (8, 0)
    SUPPORTED_DTYPES: ClassVar = set(FLOAT_DTYPES)
    SUPPORTED_MAX_K = MAX_HEAD_DIM
    SUPPORTED_MIN_K = 1
    SUPPORTS_DROPOUT = True
    SUPPORTS_CUSTOM_SCALE = True
    SUPPORTS_DIFFERENT_VALUE_EMBED = True
    SUPPORTS_BMGHK = True
    VARLEN_LSE_PACKED = True
    BIAS_TYPES: ClassVar[tuple[type, ...]] = ()

    @classmethod
    def not_supported_reasons(cls, d: Inputs) -> list[str]:
        """Why these inputs are refused; empty when they are supported."""
        return _reasons(cls, d, cls.BIAS_TYPES)


class FwOp(_Limits, AttentionFwOpBase):  # type: ignore[misc]
    """Forward operator on SparseK's kernels.

    Natively: no bias; causal masks aligned to either corner; causal local masks; the
    block-diagonal family; padded, gappy and paged keys (forward only); :class:`SinkWindowMask`,
    :class:`BlockSparseMask`.
    In torch, logged once and counted: tensor biases, dropout.  Inputs are BMK, BMHK or BMGHK,
    fp16, bf16 or fp32, on CUDA or the CPU.

    ``SUPPORTED_ATTN_BIAS_TYPES`` lists xFormers' own types; ``SinkWindowMask``, ``BlockSparseMask``
    and ``torch.nn.Parameter`` are accepted beside them.
    """

    OPERATOR = torch.ops.sparsek.sink_flash_fwd
    SUPPORTED_ATTN_BIAS_TYPES = _xformers_types(FORWARD_TYPES)
    BIAS_TYPES = FORWARD_TYPES
    SUPPORTS_PARTIAL = True
    NAME = "sparsekF"

    @classmethod
    def apply(cls, inp: Inputs, needs_gradient: bool) -> tuple[torch.Tensor, Context | None]:
        """Output shaped as the query (``value``'s head dim) and, for a gradient, its context.

        The context's ``lse`` is the natural logarithm of the softmax denominator, ``[B, H, M]``
        or ``[B, G, H, M]``, packed along M for packed sequences, fp32.

        Raises:
            NotImplementedError: a bias that wants a gradient, to which xFormers passes none.
        """
        tracked = isinstance(inp.attn_bias, torch.Tensor) and inp.attn_bias.requires_grad
        if tracked and not needs_gradient and torch.is_grad_enabled():
            raise NotImplementedError(
                "attn_bias: xFormers passes no gradient to a bias where query, key and value have "
                "none; let one of them require a gradient, or detach the bias"
            )
        with torch.no_grad():
            out, lse, seed = cls._run(inp, needs_gradient)
        out = out.reshape(*inp.query.shape[:-1], inp.value.shape[-1])
        if inp.is_partial:
            out = out.to(inp.get_output_dtype())
        if not needs_gradient or lse is None:
            return out, None
        if inp.query.dim() == 5:
            lse = lse.unflatten(1, inp.query.shape[2:4])
        backward = BwOp if type(inp.attn_bias) in BACKWARD_TYPES else None
        return out, Context(out=out, lse=lse, op_bw=backward, rng_state=seed)

    @classmethod
    def _run(
        cls, inp: Inputs, needs_lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        plan = plan_of(inp.attn_bias)
        reason = _fallback_reason(inp, plan)
        if reason is not None:
            if not torch.compiler.is_compiling():
                count_fallback(reason)
            return _dense_forward(inp, plan, needs_lse)
        q, k, v = _fold(inp, share_kv=True)
        if not needs_lse and plan.segments is not None:
            page_size = page_size_of(plan, q, k, v)
            if page_size is not None:
                segments = plan.segments
                out = paged_forward(q, k, v, plan, segments, page_size, inp.scale_float)
                return out, None, None
        out, lse = native_forward(q, k, v, plan, inp.scale_float)
        return out, lse, None


class BwOp(_Limits, AttentionBwOpBase):  # type: ignore[misc]
    """Backward operator of :class:`FwOp`: gradients of q, k, v and of a tensor bias."""

    OPERATOR = torch.ops.sparsek.sink_flash_bwd
    SUPPORTED_ATTN_BIAS_TYPES = _xformers_types(BACKWARD_TYPES)
    BIAS_TYPES = BACKWARD_TYPES
    SUPPORTS_ATTN_BIAS_GRAD = True
    NAME = "sparsekB"

    @classmethod
    def apply(cls, ctx: Context, inp: Inputs, grad: torch.Tensor) -> Gradients:
        """Gradients shaped as the inputs, for the upstream gradient ``grad`` of the output.

        Raises:
            NotImplementedError: the bias is for decoding; such biases have no gradient.
        """
        if type(inp.attn_bias) not in BACKWARD_TYPES:
            raise NotImplementedError(
                f"attn_bias: {type(inp.attn_bias).__name__} has no gradient "
                "(padded, gappy and paged keys are for decoding); use a BlockDiagonal mask"
            )
        plan = plan_of(inp.attn_bias)
        q, k, v = _fold(inp, share_kv=False)
        dbias = None
        with torch.no_grad():
            if _fallback_reason(inp, plan) is None:
                lse = ctx.lse.flatten(1, -2)[..., : q.shape[1]]
                out = ctx.out.reshape(*q.shape[:3], v.shape[3]).to(q.dtype)
                dq, dk, dv = native_backward(
                    grad.reshape(out.shape), q, k, v, out, lse, plan, inp.scale_float
                )
            else:
                dq, dk, dv, dbias = _dense_backward(inp, plan, grad, ctx.rng_state)
        return Gradients(
            dq=dq.reshape(inp.query.shape),
            dk=dk.reshape(inp.key.shape),
            dv=dv.reshape(inp.value.shape),
            db=dbias,
        )


register_names(FwOp, BwOp)
accept_grouped_gradients()
