"""Public functions of native sparse attention (arXiv 2502.11089): checks, then operators.

Shapes: B sequences of M tokens, N <= M queries that are the last N tokens, Hq query heads, Hkv
KV heads (Hq a multiple of Hkv), head size D, C compressed blocks, S blocks per query.  With
``cu_seqlens`` (``[sequences + 1]`` int32) the sequences are packed: B = 1 and N = M.  CUDA tensors
in fp16, bf16 and fp32 run Triton kernels; CPU tensors, and fp64 anywhere, run torch operations.
"""

from __future__ import annotations

import torch

from sparsek_kernels.checks import DTYPES, check_int, check_query, check_scale, check_tensor
from sparsek_kernels.common.device import plain
from sparsek_kernels.nsa import ops
from sparsek_kernels.nsa.checks import check_indices, check_lengths, check_pair, check_sequences
from sparsek_kernels.nsa.compress.mlp import PhiWeights, phi_compress
from sparsek_kernels.nsa.sequences import compressed_rows
from sparsek_kernels.nsa.spec import NSASpec
from sparsek_kernels.sink_window.api import sink_flash_attention


def check_phi(name: str, weights: PhiWeights, x: torch.Tensor, spec: NSASpec) -> None:
    """Check the weights of the learnable map for tokens ``x [B, M, Hkv, D]``."""
    if not isinstance(weights, PhiWeights):
        raise TypeError(f"{name}: expected PhiWeights, got {type(weights).__name__}")
    dim, block = x.shape[3], spec.cmp_block_size
    hidden = weights.w1.shape[-1]
    shapes: dict[str, tuple[int | str, ...]] = {
        "position": (block, dim),
        "w1": (block * dim, hidden),
        "b1": (hidden,),
        "w2": (hidden, dim),
        "b2": (dim,),
    }
    for field, shape in shapes.items():
        check_tensor(f"{name}.{field}", getattr(weights, field), shape, (x.dtype,), x.device)


def nsa_compress(
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    phi_k: PhiWeights | None = None,
    phi_v: PhiWeights | None = None,
    cmp_block_size: int = 32,
    cmp_stride: int = 16,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One key and one value for each block of ``cmp_block_size`` tokens; differentiable.

    Block ``c`` covers tokens ``c * cmp_stride`` to ``c * cmp_stride + cmp_block_size - 1`` of its
    sequence; blocks that a sequence does not fill are left out.

    Args:
        k: ``[B, M, Hkv, D]``, fp16, bf16, fp32 or fp64, any strides.
        v: values, with the shape and dtype of ``k``.
        phi_k: weights of the learnable map for keys; the mean of the block when ``None``.
        phi_v: weights of the learnable map for values; the mean of the block when ``None``.
        cmp_block_size: tokens of a block, a multiple of ``cmp_stride``.
        cmp_stride: tokens from one block to the next.
        cu_seqlens: ``[sequences + 1]`` int32 offsets of packed sequences.

    Returns:
        ``k_cmp`` and ``v_cmp``, ``[B, C, Hkv, D]``.  Fixed lengths: C is the number of blocks.
        Packed: the blocks of all sequences one after another
        (:func:`sparsek_kernels.nsa.sequences.compressed_cu_seqlens` gives the offsets), then
        zeros up to ``C = M // cmp_stride``, a bound that needs no look at the device.

    Raises:
        TypeError: an argument of a wrong type or dtype.
        ValueError: a wrong shape, device or value; the message names the argument.

    Source:
        arXiv 2502.11089, equation 7.
    """
    spec = NSASpec(cmp_block_size, cmp_stride, sel_block_size=cmp_block_size)
    k = check_tensor("k", k, ("B", "M", "Hkv", "D"), DTYPES)
    v = check_tensor("v", v, tuple(k.shape), (k.dtype,), k.device)
    if cu_seqlens is not None:
        if k.shape[0] != 1:
            raise ValueError(f"k: expected batch size 1 with cu_seqlens, got {k.shape[0]}")
        check_sequences(cu_seqlens, k.shape[1], k.device)
    pool = ops.mean_pool_directly if plain(k, v, cu_seqlens) else ops.mean_pool
    if phi_k is None and phi_v is None:
        k_cmp, v_cmp = pool([k, v], cu_seqlens, spec.as_list())
        return k_cmp, v_cmp
    found: list[torch.Tensor] = []
    for name, x, phi in (("phi_k", k, phi_k), ("phi_v", v, phi_v)):
        if phi is None:
            found += pool([x], cu_seqlens, spec.as_list())
        else:
            check_phi(name, phi, x, spec)
            found.append(phi_compress(x, phi, cu_seqlens, spec))
    return found[0], found[1]


def _check_compressed(
    q: torch.Tensor,
    k_cmp: torch.Tensor,
    v_cmp: torch.Tensor,
    spec: NSASpec,
    seq_len: int | None,
    cu_seqlens: torch.Tensor | None,
    heads: int | str = "Hkv",
) -> int:
    """Check compressed tensors against the sequence length that they come from; return it."""
    length = q.shape[1] if seq_len is None else seq_len
    check_lengths(q, length, cu_seqlens)
    rows = compressed_rows(cu_seqlens, length, spec.cmp_block_size, spec.cmp_stride)
    check_pair(k_cmp, v_cmp, q, "_cmp", rows, heads)
    return length


def compressed_attention(
    q: torch.Tensor,
    k_cmp: torch.Tensor,
    v_cmp: torch.Tensor,
    *,
    cmp_block_size: int = 32,
    cmp_stride: int = 16,
    seq_len: int | None = None,
    softmax_scale: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over compressed blocks that end at or before the query; differentiable.

    Args:
        q: ``[B, N, Hq, D]``.
        k_cmp: ``[B, C, Hkv, D]``, compressed keys of :func:`nsa_compress`.
        v_cmp: ``[B, C, Hkv, D]``, compressed values of :func:`nsa_compress`.
        cmp_block_size: tokens of a compressed block.
        cmp_stride: tokens from one block to the next.
        seq_len: tokens that were compressed, M; N when ``None``.
        softmax_scale: factor of ``q . k``, ``D ** -0.5`` by default.
        cu_seqlens: ``[sequences + 1]`` int32 offsets of packed sequences.

    Returns:
        The output ``[B, N, Hq, D]`` (zeros for a query before the first block's end) and the
        natural log-sum-exp ``[B, Hq, N]`` (``-inf`` there), fp32 or, for fp64 inputs, fp64.

    Raises:
        TypeError: an argument of a wrong type or dtype.
        ValueError: a wrong shape, device or value; the message names the argument.

    Source:
        arXiv 2502.11089, section 3.3.1.
    """
    spec = NSASpec(cmp_block_size, cmp_stride, sel_block_size=cmp_block_size)
    q = check_query(q)
    length = _check_compressed(q, k_cmp, v_cmp, spec, seq_len, cu_seqlens)
    scale = check_scale(softmax_scale, q.shape[3])
    found: tuple[torch.Tensor, torch.Tensor] = ops.compressed_fwd(
        q, k_cmp, v_cmp, length, cu_seqlens, spec.as_list(), scale
    )
    return found


def nsa_select(
    q: torch.Tensor,
    k_cmp: torch.Tensor,
    *,
    lse: torch.Tensor | None = None,
    cmp_block_size: int = 32,
    cmp_stride: int = 16,
    sel_block_size: int = 64,
    top_n: int = 16,
    num_init_blocks: int = 1,
    num_local_blocks: int = 2,
    seq_len: int | None = None,
    softmax_scale: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor:
    """The blocks that each token and KV head attends, chosen by compressed-attention mass.

    A block's score is the sum, over the query heads of the group and the compressed blocks that
    overlap it, of the attention probability times the strides that they share.  The first
    ``num_init_blocks`` and the latest ``num_local_blocks`` are always chosen; of the others, up
    to the query's own, the best fill up to ``top_n``.  Ties go to the lower index.  Nothing is
    differentiable here and no score leaves the chip.

    Args:
        q: ``[B, N, Hq, D]``.
        k_cmp: ``[B, C, Hkv, D]`` as :func:`nsa_compress` returns it.
        lse: ``[B, Hq, N]`` log-sum-exp of :func:`compressed_attention` with the same arguments;
            computed here when ``None``, which costs one more pass.
        cmp_block_size: tokens of a compressed block, a multiple of ``cmp_stride``.
        cmp_stride: tokens from one block to the next.
        sel_block_size: tokens of a selection block, a multiple of ``cmp_stride`` and at least
            ``cmp_block_size``.
        top_n: blocks per token, the forced ones included.
        num_init_blocks: first blocks of the sequence, always chosen.
        num_local_blocks: latest blocks, the query's own included, always chosen.
        seq_len: tokens that were compressed, M; N when ``None``.
        softmax_scale: factor of ``q . k``, ``D ** -0.5`` by default.
        cu_seqlens: ``[sequences + 1]`` int32 offsets of packed sequences.

    Returns:
        ``[B, N, Hkv, top_n]`` int32, ascending, ``-1`` after the last.

    Raises:
        TypeError: an argument of a wrong type or dtype.
        ValueError: a wrong shape, device or value; the message names the argument.

    Source:
        arXiv 2502.11089, equations 8 to 12.
    """
    spec = NSASpec(
        cmp_block_size, cmp_stride, sel_block_size, top_n, num_init_blocks, num_local_blocks
    )
    q = check_query(q)
    length = _check_compressed(q, k_cmp, k_cmp, spec, seq_len, cu_seqlens)
    scale = check_scale(softmax_scale, q.shape[3])
    fields = spec.as_list()
    q, k_cmp = q.detach(), k_cmp.detach()
    if lse is None:
        _, lse = ops.compressed_fwd(q, k_cmp, k_cmp, length, cu_seqlens, fields, scale)
    else:
        lse = check_tensor(
            "lse",
            lse,
            (q.shape[0], q.shape[2], q.shape[1]),
            (torch.float64 if q.dtype == torch.float64 else torch.float32,),
            q.device,
        ).detach()
    found: torch.Tensor = ops.select(q, k_cmp, lse, length, cu_seqlens, fields, scale)
    return found


def selected_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_indices: torch.Tensor,
    *,
    sel_block_size: int = 64,
    softmax_scale: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
    return_lse: bool = False,
    check: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Causal attention inside the blocks that each token and KV head chose; differentiable.

    Args:
        q: ``[B, N, Hq, D]``, fp16, bf16, fp32 or fp64, any strides, D from 1 to 256.
        k: ``[B, M, Hkv, D]``, M >= N; queries are the last N tokens.
        v: ``[B, M, Hkv, D]``.
        block_indices: ``[B, N, Hkv, S]`` int32 blocks of the token's sequence in any order,
            ``-1`` for none, distinct per row.
        sel_block_size: tokens of a block.
        softmax_scale: factor of ``q . k``, ``D ** -0.5`` by default.
        cu_seqlens: ``[sequences + 1]`` int32 offsets of packed sequences.
        return_lse: also return the log-sum-exp.
        check: also check the values of ``block_indices``, which waits for the device.  Without
            it, indices out of range or twice in a row give undefined results.

    Returns:
        The output ``[B, N, Hq, D]`` and, with ``return_lse``, the natural log-sum-exp
        ``[B, Hq, N]``.  A query with no visible key gives zeros and ``-inf``.  Both are
        differentiable in q, k and v.

    Raises:
        TypeError: an argument of a wrong type or dtype.
        ValueError: a wrong shape, device or value; the message names the argument.

    Source:
        arXiv 2502.11089, section 3.3.2.
    """
    q = check_query(q)
    check_pair(k, v, q)
    check_int("sel_block_size", sel_block_size, 1)
    check_lengths(q, k.shape[1], cu_seqlens)
    indices = check_indices(
        block_indices, q, k.shape[2], k.shape[1], sel_block_size, cu_seqlens, check
    )
    scale = check_scale(softmax_scale, q.shape[3])
    out, lse, _ = ops.selected_fwd(q, k, v, indices, cu_seqlens, sel_block_size, scale)
    return (out, lse) if return_lse else out


def nsa_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g_cmp: torch.Tensor,
    g_slc: torch.Tensor,
    g_swa: torch.Tensor,
    *,
    k_cmp: torch.Tensor | None = None,
    v_cmp: torch.Tensor | None = None,
    k_swa: torch.Tensor | None = None,
    v_swa: torch.Tensor | None = None,
    block_indices: torch.Tensor | None = None,
    cmp_block_size: int = 32,
    cmp_stride: int = 16,
    sel_block_size: int = 64,
    top_n: int = 16,
    num_init_blocks: int = 1,
    num_local_blocks: int = 2,
    window_size: int = 512,
    softmax_scale: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
    return_block_indices: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Native sparse attention: the gated sum of compressed, selected and sliding attention.

    Differentiable in q, every k and v, and the gates; the selection carries no gradient.  With
    l = 2 d and l' = 4 d Hopper GPUs keep block scores to 11 significant bits, where
    :func:`nsa_select` has fp32: of blocks whose scores differ by less, either may be chosen.

    Args:
        q: ``[B, N, Hq, D]``, fp16, bf16, fp32 or fp64.
        k: keys of the selected branch ``[B, M, Hkv, D]``.
        v: values of the selected branch ``[B, M, Hkv, D]``.
        g_cmp: gates of the compressed branch ``[B, N, Hq]``, any floating dtype, not negative (on
            Hopper GPUs gradients pass through their logarithm).
        g_slc: gates of the selected branch ``[B, N, Hq]``.
        g_swa: gates of the sliding branch ``[B, N, Hq]``.
        k_cmp: compressed keys ``[B, C, Hkv, D]`` of :func:`nsa_compress`; the block means of
            ``k`` and ``v`` when ``None``.
        v_cmp: compressed values, given with ``k_cmp``.
        k_swa: keys of the sliding branch ``[B, M', Hkv, D]``, the latest tokens at least that any
            window holds; ``k`` when ``None``.
        v_swa: values of the sliding branch, given with ``k_swa``.
        block_indices: ``[B, N, Hkv, S]`` int32 selection to use instead of :func:`nsa_select`.
        cmp_block_size: tokens of a compressed block, a multiple of ``cmp_stride``.
        cmp_stride: tokens from one compressed block to the next.
        sel_block_size: tokens of a selection block (see :func:`nsa_select`).
        top_n: blocks per token, the forced ones included.
        num_init_blocks: first blocks of the sequence, always chosen.
        num_local_blocks: latest blocks, the query's own included, always chosen.
        window_size: latest tokens that the sliding branch sees, the query's own included.
        softmax_scale: factor of ``q . k``, ``D ** -0.5`` by default.
        cu_seqlens: ``[sequences + 1]`` int32 offsets of packed sequences.
        return_block_indices: also return the selection.

    Returns:
        ``[B, N, Hq, D]`` in the dtype of q and, on request, ``[B, N, Hkv, S]`` int32.

    Raises:
        TypeError: an argument of a wrong type or dtype.
        ValueError: a wrong shape, device or value; the message names the argument.

    Source:
        arXiv 2502.11089, equation 5.
    """
    spec = NSASpec(
        cmp_block_size, cmp_stride, sel_block_size, top_n, num_init_blocks, num_local_blocks
    )
    q = check_query(q)
    check_pair(k, v, q)
    check_lengths(q, k.shape[1], cu_seqlens)
    for name, first, second in (("v_cmp", k_cmp, v_cmp), ("v_swa", k_swa, v_swa)):
        if (first is None) != (second is None):
            raise ValueError(f"{name}: expected a tensor exactly when its keys are given")
    gates = []
    for name, gate in (("g_cmp", g_cmp), ("g_slc", g_slc), ("g_swa", g_swa)):
        gates.append(check_tensor(name, gate, tuple(q.shape[:3]), DTYPES, q.device))
    length = k.shape[1]
    if k_cmp is not None and v_cmp is not None:
        _check_compressed(q, k_cmp, v_cmp, spec, length, cu_seqlens, k.shape[2])
    scale = check_scale(softmax_scale, q.shape[3])
    fields = spec.as_list()
    if block_indices is not None:
        block_indices = check_indices(
            block_indices, q, k.shape[2], k.shape[1], sel_block_size, cu_seqlens, False
        )
    check_int("window_size", window_size, 1)
    k_swa = k if k_swa is None else k_swa
    v_swa = v if v_swa is None else v_swa
    check_pair(k_swa, v_swa, q, "_swa", heads=k.shape[2])
    packed, tokens = cu_seqlens is not None, k_swa.shape[1]
    if tokens < q.shape[1] or (packed and tokens > q.shape[1]):
        raise ValueError(
            f"k_swa: expected {q.shape[1]} tokens{'' if packed else ' or more'}, got {tokens}"
        )
    direct = plain(q, k, v, *gates, k_cmp, v_cmp, k_swa, v_swa, block_indices, cu_seqlens)
    # One operator computes the gradient of the gated sum, so the branches record none.
    query = q.detach()
    # The sliding branch is first: the GPU is busy with it while the host prepares the others.
    out_swa, lse_swa = sink_flash_attention(
        query, k_swa.detach(), v_swa.detach(), window_size=window_size, softmax_scale=scale,
        cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, return_lse=True,
    )  # fmt: skip
    if k_cmp is None or v_cmp is None:
        k_cmp, v_cmp = nsa_compress(
            k, v, cmp_block_size=cmp_block_size, cmp_stride=cmp_stride, cu_seqlens=cu_seqlens
        )
    cmp = (k_cmp.detach(), v_cmp.detach())
    compressed = (query, *cmp, length, cu_seqlens, fields, scale)
    if block_indices is None:
        choose = ops.compressed_select_directly if direct else ops.compressed_select
        out_cmp, lse_cmp, block_indices = choose(*compressed)
    else:
        out_cmp, lse_cmp = ops.compressed_fwd(*compressed)
    leaves = (q, k_cmp, k, k_swa, v_cmp, v, v_swa, *gates)
    out: torch.Tensor
    if torch.is_grad_enabled() and any(x.requires_grad for x in leaves):
        out, *_ = (ops.branches_directly if direct else ops.branches)(
            [out_cmp, out_swa], [lse_cmp, lse_swa], gates,
            q, [k_cmp, k, k_swa], [v_cmp, v, v_swa], block_indices, length, cu_seqlens,
            fields, window_size, scale,
        )  # fmt: skip
    else:
        out = (ops.selected_gated_directly if direct else ops.selected_gated)(
            out_cmp, out_swa, gates,
            query, k.detach(), v.detach(), block_indices, cu_seqlens, sel_block_size, scale,
        )  # fmt: skip
    return (out, block_indices) if return_block_indices else out
