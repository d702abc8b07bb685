"""Launches of the NSA decode step over a paged cache.

Three kernels: what the new tokens complete is compressed; compressed attention, whose last program
of a token chooses its blocks; the chosen blocks and the window.  On Hopper each starts while the
one before it is at work, and waits for it where it reads what that writes.

Nothing here reads a device value: grids follow from shapes and from the host bounds of the batch,
so that the step can be captured in a CUDA graph and replayed with other lengths.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sparsek_kernels.common.device import multiprocessors
from sparsek_kernels.nsa.paged.kernels.attend import nsa_paged_attend_kernel
from sparsek_kernels.nsa.paged.kernels.attend_compressed import nsa_paged_compressed_kernel
from sparsek_kernels.nsa.paged.kernels.compress import nsa_paged_compress_kernel
from sparsek_kernels.nsa.paged.problem import PagedProblem
from sparsek_kernels.paged.checks import check_batch_layout, check_triton_layout
from sparsek_kernels.paged.config import choose_splits, largest_part, most_splits, next_power_of_2
from sparsek_kernels.paged.policy import ceil_div
from sparsek_kernels.paged.scratch import overlap_options, workspace


@dataclass(frozen=True)
class DecodeTiles:
    """Launch parameters of the kernels; ``benchmarks/tune_nsa_decode.py`` times alternatives."""

    cmp_rows: int = 64  # compressed rows attended at a time (half above 128 dimensions)
    cmp_programs: int = 2  # of compressed attention, per multiprocessor, that splitting aims at
    cmp_warps: int = 4
    cmp_stages: int = 2
    rows: int = 64  # keys of the other branches at a time (half above 128 dimensions)
    programs: int = 4  # of the other branches, per multiprocessor, that splitting aims at
    warps: int = 4  # twice as many where every program has one tile of keys
    stages: int = 2


TILES = DecodeTiles()

_WEIGHT_BYTES = 1 << 14  # of a tile of the compression's first layer
_LAST_WEIGHT_BYTES = 1 << 15  # of its second layer
_COMPRESS_STAGES = 7
_COMPRESS_WARPS = 8
_MOST_SPLITS = 32
_SCRATCH_MASSES = 1 << 24
"""Masses of blocks that are held at once (64 MiB); tokens beyond wait for the next launch."""


def _precision(x: torch.Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"


def _padded(n: int) -> int:
    """``n`` rounded up to a power of two that tensor cores can use."""
    return max(next_power_of_2(n), 16)


def decode(problem: PagedProblem, out: torch.Tensor) -> None:
    """Compress what the decodes complete and attend; only their rows of ``out`` are written.

    ``out`` is ``[T, 3, Hq, D]``.

    Raises:
        NotImplementedError: a tensor whose last dimension is not contiguous.
    """
    check_triton_layout(q=problem.q, out=out, **vars(problem.pages))
    check_batch_layout(problem.batch)
    _compress(problem)
    batch, spec, heads = problem.batch, problem.spec, problem.pages.num_kv_heads
    tiles = batch.num_decodes * batch.decode_query_len
    blocks = 2 * spec.num_selectable(batch.max_seq_len) * next_power_of_2(problem.group) * heads
    step = max(_SCRATCH_MASSES // max(blocks, 1), 1)
    for first in range(0, tiles, step):
        part = (first, min(step, tiles - first))
        cmp_splits, tile_keys, chosen = _attend_compressed(problem, out[:, 0], part)
        _attend(problem, out, part, cmp_splits, tile_keys, chosen)


def _compress(problem: PagedProblem) -> None:
    """Store the blocks that the decodes complete."""
    pages, batch, spec = problem.pages, problem.batch, problem.spec
    _, heads, page_size, dim = pages.k_raw.shape
    tiles = batch.num_decodes * batch.decode_query_len
    block_h, block_d = _padded(heads), _padded(dim)
    made, raw = problem.compression, pages.k_raw
    phi_k, phi_v, rope = made.phi_k, made.phi_v, made.rope_freqs
    hidden, parts, size = 1, 1, raw.element_size() * block_d
    weights: list[torch.Tensor | None] = [raw] * 8
    if phi_k is not None and phi_v is not None:
        hidden, parts = phi_k.w1.shape[1], largest_part(spec.cmp_block_size, 8)
        weights = [phi_k.w1, phi_v.w1, *made.constants, phi_k.w2, phi_v.w2, phi_k.b2, phi_v.b2]
    block_f = min(_padded(hidden), max(_WEIGHT_BYTES // size, 16))
    shares = tiles * 2 * (parts + 1) * heads * hidden
    nsa_paged_compress_kernel[(tiles, parts * ceil_div(hidden, block_f), 2)](
        pages.k_cmp, pages.v_cmp, workspace(raw.device, "nsa hidden", shares, torch.float32),
        workspace(raw.device, "nsa turns", tiles * 4 * block_d, torch.float32),
        workspace(raw.device, "nsa tickets", tiles * 2, torch.int32), raw, pages.v_raw, *weights,
        raw if rope is None else rope, batch.block_table, batch.seq_lens, batch.cu_seqlens_q,
        *pages.k_cmp.stride()[:3], *pages.v_cmp.stride()[:3], *raw.stride()[:3],
        *pages.v_raw.stride()[:3],
        batch.block_table.stride(0),
        TILES_PER_REQUEST=batch.decode_query_len, NUM_HEADS=heads, HEAD_DIM=dim, HIDDEN=hidden,
        CMP_BLOCK=spec.cmp_block_size, CMP_STRIDE=spec.cmp_stride, PAGE_SIZE=page_size,
        HAS_PHI=phi_k is not None, HAS_ROPE=rope is not None,
        ROTATED=made.rotated_keys and rope is not None, PARTS=parts, BLOCK_H=block_h,
        BLOCK_D=block_d, BLOCK_F=block_f,
        LAST_F=min(_padded(hidden), max(_LAST_WEIGHT_BYTES // size, 16)),
        PRECISION=_precision(raw), NUM_STAGES=_COMPRESS_STAGES, num_warps=_COMPRESS_WARPS,
        OVERLAP=overlap_options(raw.device)["OVERLAP"],
    )  # fmt: skip


def _attend_compressed(
    problem: PagedProblem, out: torch.Tensor, part: tuple[int, int]
) -> tuple[int, int, torch.Tensor]:
    """Compressed attention, and the blocks that it chooses, flat ``[T, Hkv, top_n]`` int32.

    ``part``: the first of the tokens that are served, and how many there are.

    Returns the splits, the compressed blocks of a tile, and the chosen blocks.  With more than one
    split the shares of the output wait in the workspaces.
    """
    q, pages, batch, spec = problem.q, problem.pages, problem.batch, problem.spec
    _, heads, rows_per_page, dim = pages.k_cmp.shape
    block_m, block_d = _padded(problem.group), _padded(dim)
    block_n = TILES.cmp_rows if dim <= 128 else TILES.cmp_rows // 2
    width = next_power_of_2(spec.strides_per_sel)
    block_n = max(block_n, width)
    per_tile = block_n // width
    tile_keys = per_tile * spec.strides_per_sel
    live = next_power_of_2(problem.group)
    first, tiles = part
    places = tiles * heads
    rows = places * live
    most_tiles = max(ceil_div(spec.num_compressed(batch.max_seq_len), tile_keys), 1)
    programs = TILES.cmp_programs * multiprocessors(q.device)
    splits = choose_splits(places, most_tiles, programs, most=_MOST_SPLITS, least=1)
    reached = most_tiles * per_tile
    warps = TILES.cmp_warps if reached <= 2048 else 8 if reached <= 8192 else 16
    chosen = workspace(q.device, "nsa chosen", q.shape[0] * heads * spec.top_n, torch.int32)
    shares = _shares(q.device, "nsa compressed", rows * splits, block_d)
    nsa_paged_compressed_kernel[(tiles, heads, splits)](
        chosen, out, *shares,
        workspace(q.device, "nsa masses", 2 * rows * (most_tiles + 1) * per_tile, torch.float32),
        workspace(q.device, "nsa weights", rows * most_tiles, torch.float32),
        workspace(q.device, "nsa compressed tickets", places, torch.int32), q, pages.k_cmp,
        pages.v_cmp, batch.block_table, batch.seq_lens, batch.cu_seqlens_q, problem.softmax_scale,
        first, splits, most_tiles,
        *(out.stride(0), out.stride(1)), *q.stride()[:2], *pages.k_cmp.stride()[:3],
        *pages.v_cmp.stride()[:3],
        batch.block_table.stride(0),
        TILES_PER_REQUEST=batch.decode_query_len, NUM_KV_HEADS=heads, GROUP=problem.group,
        HEAD_DIM=dim, CMP_BLOCK=spec.cmp_block_size, CMP_STRIDE=spec.cmp_stride,
        SEL_BLOCK=spec.sel_block_size, TOP_N=spec.top_n, NUM_INIT=spec.num_init_blocks,
        NUM_LOCAL=spec.num_local_blocks, ROWS_PER_PAGE=rows_per_page, TILE_KEYS=tile_keys,
        LIVE=live, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_D=block_d,
        BLOCK_T=next_power_of_2(max(most_tiles, ceil_div(32, per_tile))),
        BLOCK_O=next_power_of_2(spec.top_n), MOST_SPLITS=most_splits(splits),
        PRECISION=_precision(q), NUM_STAGES=TILES.cmp_stages, num_warps=warps,
        num_stages=TILES.cmp_stages, **overlap_options(q.device),
    )  # fmt: skip
    return splits, tile_keys, chosen


def _attend(
    problem: PagedProblem,
    out: torch.Tensor,
    part: tuple[int, int],
    cmp_splits: int,
    tile_keys: int,
    chosen: torch.Tensor,
) -> None:
    """The chosen blocks and the window, and the sum of what compressed attention left."""
    q, pages, batch, spec = problem.q, problem.pages, problem.batch, problem.spec
    _, heads, page_size, dim = pages.k_slc.shape
    block_m, block_d, live = _padded(problem.group), _padded(dim), next_power_of_2(problem.group)
    block_n = TILES.rows if dim <= 128 else TILES.rows // 2
    first, tiles = part
    places = tiles * heads
    pieces = [
        ceil_div(min(n, batch.max_seq_len), block_n)
        for n in (problem.window_size, spec.top_n * spec.sel_block_size)
    ]
    each = max(TILES.programs * multiprocessors(q.device) // places, 1)
    share = max(ceil_div(sum(pieces), each), ceil_div(max(pieces), _MOST_SPLITS))
    window_splits, selected_splits = (ceil_div(n, share) for n in pieces)
    width = window_splits + selected_splits
    cmp_shares = _shares(q.device, "nsa compressed", places * cmp_splits * live, block_d)
    shares = _shares(q.device, "nsa attend", places * width * live, block_d)
    nsa_paged_attend_kernel[(tiles, heads, width + (cmp_splits > 1))](
        out, *shares, workspace(q.device, "nsa attend tickets", places * 2, torch.int32),
        *cmp_shares, chosen, q, pages.k_slc, pages.v_slc, pages.k_swa, pages.v_swa,
        batch.block_table, batch.seq_lens, batch.cu_seqlens_q,
        problem.softmax_scale, problem.window_size, first, cmp_splits, window_splits,
        selected_splits,
        *out.stride()[:3], *q.stride()[:2],
        *pages.k_slc.stride()[:3], *pages.v_slc.stride()[:3],
        *pages.k_swa.stride()[:3], *pages.v_swa.stride()[:3],
        batch.block_table.stride(0),
        TILES_PER_REQUEST=batch.decode_query_len, NUM_KV_HEADS=heads, GROUP=problem.group,
        HEAD_DIM=dim, CMP_BLOCK=spec.cmp_block_size, CMP_STRIDE=spec.cmp_stride,
        TILE_KEYS=tile_keys, SEL_BLOCK=spec.sel_block_size, TOP_N=spec.top_n,
        PAGE_SIZE=page_size, LIVE=live, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_D=block_d,
        MOST=next_power_of_2(max(window_splits, selected_splits)),
        MOST_CMP=most_splits(cmp_splits), PRECISION=_precision(q), NUM_STAGES=TILES.stages,
        num_warps=TILES.warps * (2 if share == 1 else 1), num_stages=TILES.stages,
        **overlap_options(q.device),
    )  # fmt: skip


def _shares(
    device: torch.device, name: str, rows: int, dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scratch for partial outputs of so many rows, and for their maxima and sums."""
    part = workspace(device, f"{name} parts", rows * dim, torch.float32)
    return part, workspace(device, f"{name} states", rows * 2, torch.float32)
