"""Other implementations that ``benchmarks/nsa.py`` times; none of their code is here.

* ``fla``: flash-linear-attention 0.6.0 (``pip install fla-core==0.6.0 einops``), groups of 16;
* ``mdy666``: ``flash_nsa`` of mdy666/Scalable-Flash-Native-Sparse-Attention on ``PYTHONPATH``;
* ``xunhaolai``: ``native_sparse_attention`` of XunhaoLai/native-sparse-attention-triton, also
  on ``PYTHONPATH``;
* dense causal attention: ``fa3`` (vLLM's FlashAttention-3, forward only) and torch's ``cudnn`` and
  ``fa2``.

The sparse ones run without a window branch, which they take from FlashAttention.  A whole pass
takes q ``[1, N, Hq, D]``, k, v and three gates ``[1, N, Hq]``; a selected branch takes q, k, v and
``block_indices [1, N, Hkv, S]``.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from sparsek_backend.bench.ops.peers import load_fa3
from sparsek_backend.bench.registry import Unavailable

Provider = Callable[..., torch.Tensor]


def bare_packages(*names: str) -> None:
    """Make packages importable without running their ``__init__``, which imports whole models."""
    for name in names:
        if name not in sys.modules:
            folder = Path(*name.split("."))
            places = [str(Path(p) / folder) for p in sys.path if (Path(p) / folder).is_dir()]
            if not places:
                raise Unavailable(f"{name} is not on the path")
            module = types.ModuleType(name)
            module.__path__ = places
            module.__version__ = ""  # type: ignore[attr-defined]
            sys.modules[name] = module


def _cu_seqlens(q: torch.Tensor) -> torch.Tensor:
    return torch.tensor([0, q.shape[1]], dtype=torch.int32, device=q.device)


def _fla() -> Provider:
    bare_packages("fla", "fla.ops")
    function: Provider = importlib.import_module("fla.ops.nsa.parallel").parallel_nsa
    return function


def _fla_groups(q: torch.Tensor, k: torch.Tensor) -> None:
    if q.shape[2] // k.shape[2] < 16:
        raise Unavailable("fla takes groups of 16 query heads and more")


def fla(q: torch.Tensor, k: torch.Tensor) -> Provider:
    _fla_groups(q, k)
    nsa = _fla()
    return lambda q, k, v, a, b, _: nsa(q, k, v, a, b, None, block_counts=16)


def fla_selected(q: torch.Tensor, k: torch.Tensor) -> Provider:
    _fla_groups(q, k)
    nsa = _fla()
    return lambda q, k, v, chosen: nsa(q, k, v, block_indices=chosen, block_counts=16)


def _mdy666(q: torch.Tensor) -> dict[str, Callable[..., torch.Tensor]]:
    if importlib.util.find_spec("pkg_resources") is None:  # all that is used of it
        stub = types.ModuleType("pkg_resources")
        stub.parse_version = lambda text: tuple(  # type: ignore[attr-defined]
            int(x) for x in text.split("+")[0].split(".")
        )
        sys.modules["pkg_resources"] = stub
    bare_packages("flash_nsa")
    helper = importlib.import_module("flash_nsa.utils").NSAHelper
    helper.init_cu_seqlens(_cu_seqlens(q))
    found = {}
    for name, place in (
        ("mean_pooling", "compress_kv"),
        ("compress_attn", "compress_attn"),
        ("slc_topk_indices", "topk"),
        ("select_attn", "select_attn"),
        ("fused_sigmoid_combine", "combine"),
    ):
        found[name] = getattr(importlib.import_module(f"flash_nsa.ops.{place}"), name)
    return found


def mdy666(q: torch.Tensor, k: torch.Tensor) -> Provider:
    """Compression, selection, selected attention and the fused gate."""
    ops = _mdy666(q)
    scale = q.shape[3] ** -0.5

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *g: torch.Tensor) -> torch.Tensor:
        q, k, v, a, b = (x[0] for x in (q, k, v, *g[:2]))
        k_cmp, v_cmp = ops["mean_pooling"](k), ops["mean_pooling"](v)
        out_cmp, lse = ops["compress_attn"](q, k_cmp, v_cmp, sm_scale=scale)
        chosen, _ = ops["slc_topk_indices"](
            q, k_cmp, lse, sm_scale=scale, maybe_efficient_version=True, scale_slc_p=True
        )
        out_slc = ops["select_attn"](q, k, v, chosen, sm_scale=scale)
        # The gate wants a third branch; it gets one that was there before and needs no gradient.
        gates = torch.stack((a, b, b), -1)
        return ops["fused_sigmoid_combine"](out_cmp, out_slc, out_cmp.detach(), gates)[None]

    return run


def mdy666_selected(q: torch.Tensor, k: torch.Tensor) -> Provider:
    select_attn = _mdy666(q)["select_attn"]
    scale = q.shape[3] ** -0.5
    return lambda q, k, v, chosen: select_attn(
        q[0], k[0], v[0], chosen[0].transpose(0, 1).contiguous(), sm_scale=scale
    )[None]


def _xunhaolai() -> types.ModuleType:
    try:
        return importlib.import_module("native_sparse_attention.ops")
    except ImportError as error:
        raise Unavailable(f"native_sparse_attention: {error}") from error


def xunhaolai(q: torch.Tensor, k: torch.Tensor) -> Provider:
    """Compression, selection and selected attention; gates in torch."""
    ops = _xunhaolai()
    tokens, cu_seqlens = q.shape[1], _cu_seqlens(q)

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *g: torch.Tensor) -> torch.Tensor:
        q, k, v, a, b = (x[0] for x in (q, k, v, *g[:2]))
        k_cmp, cu_cmp = ops.avgpool_compress(k, None, cu_seqlens, 32, 16)
        v_cmp, _ = ops.avgpool_compress(v, None, cu_seqlens, 32, 16)
        out_cmp, chosen = ops.compressed_attention(
            q, k_cmp, v_cmp, 32, 16, 64, 16, cu_seqlens, cu_cmp, tokens, k_cmp.shape[0]
        )
        out_slc = ops.topk_sparse_attention(q, k, v, chosen, 64, cu_seqlens)
        return (out_cmp * a[..., None] + out_slc * b[..., None])[None]

    return run


def xunhaolai_selected(q: torch.Tensor, k: torch.Tensor) -> Provider:
    ops, cu_seqlens = _xunhaolai(), _cu_seqlens(q)
    return lambda q, k, v, chosen: ops.topk_sparse_attention(
        q[0], k[0], v[0], chosen[0].transpose(0, 1).contiguous(), 64, cu_seqlens
    )[None]


def _dense(backend: SDPBackend) -> Provider:
    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(
                *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True
            ).transpose(1, 2)

    return run


def fa2(q: torch.Tensor, k: torch.Tensor) -> Provider:
    return _dense(SDPBackend.FLASH_ATTENTION)


def cudnn(q: torch.Tensor, k: torch.Tensor) -> Provider:
    return _dense(SDPBackend.CUDNN_ATTENTION)


def fa3(q: torch.Tensor, k: torch.Tensor) -> Provider:
    flash_attn_varlen_func = load_fa3(q)
    cu_seqlens, tokens = _cu_seqlens(q), q.shape[1]

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return flash_attn_varlen_func(
            *(x[0] for x in (q, k, v)),
            max_seqlen_q=tokens,
            cu_seqlens_q=cu_seqlens,
            max_seqlen_k=tokens,
            cu_seqlens_k=cu_seqlens,
            causal=True,
            fa_version=3,
        )[None]

    return run


Loader = Callable[[torch.Tensor, torch.Tensor], Provider]
WHOLE: dict[str, Loader] = {
    "mdy666": mdy666, "xunhaolai": xunhaolai, "fla": fla, "fa3": fa3, "cudnn": cudnn, "fa2": fa2,
}  # fmt: skip
"""Whole passes by name, each made for q and k."""
SELECTED: dict[str, Loader] = {
    "mdy666": mdy666_selected, "xunhaolai": xunhaolai_selected, "fla": fla_selected,
}  # fmt: skip
"""Selected branches by name."""
SPARSE = frozenset(SELECTED)
"""Peers that are native sparse attention."""
