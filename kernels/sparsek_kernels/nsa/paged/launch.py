"""Launches of the NSA decode step over a paged cache.

Nothing here reads a device value: grids follow from shapes and from the host bounds of the batch,
so that the step can be captured in a CUDA graph and replayed with other lengths.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sparsek_kernels.common.device import multiprocessors
from sparsek_kernels.nsa.paged.cache import Compression, NSAPages
from sparsek_kernels.nsa.paged.kernels.attend_compressed import nsa_paged_compressed_kernel
from sparsek_kernels.nsa.paged.kernels.compress import nsa_paged_compress_kernel
from sparsek_kernels.nsa.paged.kernels.scores import nsa_paged_scores_kernel
from sparsek_kernels.nsa.paged.problem import PagedProblem
from sparsek_kernels.nsa.select.launch import choose, score_pitch
from sparsek_kernels.nsa.spec import NSASpec
from sparsek_kernels.paged.attend.launch import attend_segment
from sparsek_kernels.paged.batch import PagedBatch
from sparsek_kernels.paged.chosen import Chosen
from sparsek_kernels.paged.config import choose_splits, largest_part, most_splits, next_power_of_2
from sparsek_kernels.paged.operands import PagedOperands
from sparsek_kernels.paged.plan import Segment
from sparsek_kernels.paged.policy import SelectionPolicy, ceil_div
from sparsek_kernels.paged.scratch import workspace


@dataclass(frozen=True)
class DecodeTiles:
    """Launch parameters of the kernels; ``benchmarks/tune_nsa_decode.py`` times alternatives."""

    cmp_rows: int = 64  # compressed rows attended at a time (half above 128 dimensions)
    cmp_programs: int = 2  # of compressed attention, per multiprocessor, that splitting aims at
    cmp_warps: int = 4
    cmp_stages: int = 2
    score_rows: int = 128  # compressed rows that a program scores
    score_warps: int = 4


TILES = DecodeTiles()

_WEIGHT_BYTES = 1 << 14  # of a tile of the compression's first layer
_COMPRESS_STAGES = 7


def _precision(x: torch.Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"


def _padded(n: int) -> int:
    """``n`` rounded up to a power of two that tensor cores can use."""
    return max(next_power_of_2(n), 16)


def compress_decoded(
    pages: NSAPages, batch: PagedBatch, spec: NSASpec, compression: Compression
) -> None:
    """Store the blocks that the decodes of ``batch`` complete."""
    _, heads, page_size, dim = pages.k_raw.shape
    tiles = batch.num_decodes * batch.decode_query_len
    block_h, block_d = _padded(heads), _padded(dim)
    key_constant, value_constant = compression.constants
    rope_freqs = compression.rope_freqs
    for cmp, raw, phi, constant, rope in (
        (pages.k_cmp, pages.k_raw, compression.phi_k, key_constant, rope_freqs),
        (pages.v_cmp, pages.v_raw, compression.phi_v, value_constant, None),
    ):
        hidden = 1 if phi is None else phi.w1.shape[1]
        parts = 1 if phi is None else largest_part(spec.cmp_block_size, 8)
        block_f = min(_padded(hidden), max(_WEIGHT_BYTES // (block_d * raw.element_size()), 16))
        shares = 1 if phi is None else tiles * parts * block_h * hidden
        nsa_paged_compress_kernel[(tiles, parts, ceil_div(hidden, block_f))](
            cmp, workspace(raw.device, "nsa hidden", shares, torch.float32),
            workspace(raw.device, "nsa tickets", tiles, torch.int32), raw,
            raw if phi is None else phi.w1, raw if constant is None else constant,
            raw if phi is None else phi.w2, raw if phi is None else phi.b2,
            raw if rope is None else rope, batch.block_table, batch.seq_lens, batch.cu_seqlens_q,
            *cmp.stride()[:3], *raw.stride()[:3],
            batch.block_table.stride(0),
            TILES_PER_REQUEST=batch.decode_query_len, NUM_HEADS=heads, HEAD_DIM=dim, HIDDEN=hidden,
            CMP_BLOCK=spec.cmp_block_size, CMP_STRIDE=spec.cmp_stride, PAGE_SIZE=page_size,
            HAS_PHI=phi is not None, HAS_ROPE=rope is not None,
            ROTATED=compression.rotated_keys and rope is not None, PARTS=parts, BLOCK_H=block_h,
            BLOCK_D=block_d, BLOCK_F=block_f, PRECISION=_precision(raw),
            NUM_STAGES=_COMPRESS_STAGES, num_warps=4,
        )  # fmt: skip


def decode(problem: PagedProblem, out: torch.Tensor) -> None:
    """Compressed and selected branch of the decodes: fills ``out[:, 0]`` and ``out[:, 1]``.

    ``out`` is ``[T, 3, Hq, D]``; only rows of decodes are written.
    """
    batch, pages, spec = problem.batch, problem.pages, problem.spec
    heads = pages.num_kv_heads
    tokens = batch.num_decode_tokens
    q, out = problem.q[:tokens], out[:tokens]
    row, start = batch.derived(("nsa decode", tokens), lambda: _token_sequences(tokens, q.device))
    lse = torch.empty((tokens, q.shape[1]), dtype=torch.float32, device=q.device)
    _attend_compressed(problem, out[:, 0], lse, start)
    pitch = score_pitch(spec.num_selectable(batch.max_seq_len))
    scores = torch.empty((1, tokens, heads, pitch), dtype=torch.float32, device=q.device)
    _score(problem, scores, lse)
    chosen = torch.empty((1, tokens, heads, spec.top_n), dtype=torch.int32, device=q.device)
    choose(chosen, scores, row, start, spec)
    free = spec.top_n - spec.num_init_blocks - spec.num_local_blocks
    policy = SelectionPolicy(
        num_sink=spec.num_init_blocks * spec.sel_block_size,
        window_size=(spec.num_local_blocks - 1) * spec.sel_block_size + 1,
        top_k=free,
        sel_block_size=spec.sel_block_size,
        query_tile=1,
    )
    by_score = chosen[0, :, :, spec.num_init_blocks : spec.num_init_blocks + free]
    operands = PagedOperands(q, pages.k_slc, pages.v_slc, out[:, 1], problem.softmax_scale)
    attend_segment(operands, Segment(batch, policy), Chosen(by_score))


def _token_sequences(tokens: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """``(row, start)``, int32 ``[T]`` each, with which every decoded token is a packed sequence.

    The kernel of compressed attention stores ``row - position`` in ``start``, which ``choose``
    reads as ``cu_seqlens``.  A row that no token has stays at position 0, where nothing is chosen.
    """
    row = torch.arange(tokens, device=device, dtype=torch.int32)
    return row, row.clone()


def _attend_compressed(
    problem: PagedProblem, out: torch.Tensor, lse: torch.Tensor, start: torch.Tensor
) -> None:
    q, pages, batch, spec = problem.q, problem.pages, problem.batch, problem.spec
    _, heads, rows_per_page, dim = pages.k_cmp.shape
    block_m, block_d = _padded(problem.group), _padded(dim)
    block_n = TILES.cmp_rows if dim <= 128 else TILES.cmp_rows // 2
    tiles = batch.num_decodes * batch.decode_query_len
    steps = ceil_div(spec.num_compressed(batch.max_seq_len), block_n)
    programs = TILES.cmp_programs * multiprocessors(q.device)
    splits = choose_splits(tiles * heads, steps, programs)
    places = tiles * heads if splits > 1 else 1
    rows = places * splits * block_m
    nsa_paged_compressed_kernel[(tiles, heads, splits)](
        out, lse, start, workspace(q.device, "nsa parts", rows * block_d, torch.float32),
        workspace(q.device, "nsa part state", rows * 2, torch.float32),
        workspace(q.device, "nsa tickets", places, torch.int32), q, pages.k_cmp, pages.v_cmp,
        batch.block_table, batch.seq_lens, batch.cu_seqlens_q, problem.softmax_scale, splits,
        *out.stride()[:2], *q.stride()[:2], *pages.k_cmp.stride()[:3], *pages.v_cmp.stride()[:3],
        batch.block_table.stride(0),
        TILES_PER_REQUEST=batch.decode_query_len, NUM_KV_HEADS=heads, GROUP=problem.group,
        HEAD_DIM=dim, CMP_BLOCK=spec.cmp_block_size, CMP_STRIDE=spec.cmp_stride,
        ROWS_PER_PAGE=rows_per_page, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_D=block_d,
        MOST_SPLITS=most_splits(splits), PRECISION=_precision(q), NUM_STAGES=TILES.cmp_stages,
        num_warps=TILES.cmp_warps, num_stages=TILES.cmp_stages,
    )  # fmt: skip


def _score(problem: PagedProblem, scores: torch.Tensor, lse: torch.Tensor) -> None:
    q, k_cmp, batch, spec = problem.q, problem.pages.k_cmp, problem.batch, problem.spec
    _, heads, rows_per_page, dim = k_cmp.shape
    touching = spec.strides_per_cmp - 1
    block_c = max(next_power_of_2(spec.strides_per_sel + touching), TILES.score_rows)
    blocks = (block_c - touching) // spec.strides_per_sel
    tiles = batch.num_decodes * batch.decode_query_len
    steps = ceil_div(spec.num_selectable(batch.max_seq_len), blocks)
    nsa_paged_scores_kernel[(tiles, heads, steps)](
        scores, q, k_cmp, lse, batch.block_table, batch.seq_lens, batch.cu_seqlens_q,
        problem.softmax_scale,
        *q.stride()[:2], *k_cmp.stride()[:3],
        batch.block_table.stride(0), scores.shape[3],
        TILES_PER_REQUEST=batch.decode_query_len, GROUP=problem.group, HEAD_DIM=dim,
        CMP_BLOCK=spec.cmp_block_size, CMP_STRIDE=spec.cmp_stride, SEL_BLOCK=spec.sel_block_size,
        NUM_LOCAL=spec.num_local_blocks, ROWS_PER_PAGE=rows_per_page, BLOCKS=blocks,
        BLOCK_B=next_power_of_2(blocks), BLOCK_C=block_c, BLOCK_G=_padded(problem.group),
        BLOCK_D=_padded(dim), PRECISION=_precision(q), num_warps=TILES.score_warps,
    )  # fmt: skip
