"""Launches of compressed attention and block selection together.

On Hopper the attention kernel also writes sums of its weights, from which block scores are made.
"""

from __future__ import annotations

import math

import torch

from sparsek_kernels.common.alignment import describable
from sparsek_kernels.common.device import multiprocessors
from sparsek_kernels.common.recording import run
from sparsek_kernels.common.shapes import next_power_of_2
from sparsek_kernels.nsa.compressed import launch as launch_compressed
from sparsek_kernels.nsa.compressed import launch_sm90
from sparsek_kernels.nsa.compressed.kernels.block_sums_sm90 import KEYS, PER_CMP, PER_SEL
from sparsek_kernels.nsa.compressed.launch_sm90 import BlockSums
from sparsek_kernels.nsa.compressed.problem import CompressedProblem
from sparsek_kernels.nsa.select.kernels.topk import nsa_top_summed_blocks_kernel
from sparsek_kernels.nsa.select.launch import blocks_reached, select
from sparsek_kernels.nsa.spec import NSASpec

_SCRATCH_SUMS = 36 << 20  # tiles of block sums held at once, 68 bytes each
_LEAST_ROWS = 2048  # tokens of a launch, however many blocks there are


def attend_and_select(
    problem: CompressedProblem, out: torch.Tensor, lse: torch.Tensor, block_indices: torch.Tensor
) -> None:
    """Fill ``out`` and ``lse`` of compressed attention, and the blocks that follow from it.

    Without block sums, scores are computed from the log-sum-exps.
    """
    q, k_cmp, shape, spec = problem.q, problem.k_cmp, problem.shape, problem.spec
    tile = problem.config.compressed_hopper
    if (
        tile is None
        or spec.strides_per_sel != PER_SEL.value
        or spec.strides_per_cmp != PER_CMP.value
        or spec.num_local_blocks < 2
        or spec.top_n == spec.num_init_blocks + spec.num_local_blocks
        or not describable(q)
        or 0 in (q.numel(), k_cmp.numel())
    ):
        launch_compressed.forward(problem, out, lse)
        select(problem, lse, block_indices)
        return
    keys = launch_sm90.arrange(problem)
    pitch = -(-k_cmp.shape[1] // KEYS.value)
    per_row = shape.batch * shape.num_heads * pitch
    step = max(_SCRATCH_SUMS // per_row, _LEAST_ROWS)
    # As many rows as give every multiprocessor the same number of tiles.
    programs = multiprocessors(q.device)
    even = tile.block_m * programs // math.gcd(programs, shape.num_heads * shape.batch)
    step = min(max(step // even * even, step % even), shape.num_q)
    words = torch.empty(step * per_row * 16, dtype=torch.int32, device=q.device)
    maxima = torch.empty(step * per_row, dtype=torch.float32, device=q.device)
    for first in range(0, shape.num_q, step):
        rows = min(step, shape.num_q - first)
        sums = BlockSums(words, maxima, first, rows, pitch)
        launch_sm90.forward(problem, tile, keys, out, lse, sums)
        choose_summed(block_indices, sums, lse, problem.token_seq, problem.cu_seqlens, spec)


def choose_summed(
    block_indices: torch.Tensor,
    sums: BlockSums,
    lse: torch.Tensor,
    token_seq: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    spec: NSASpec,
) -> None:
    """The best blocks of the rows of ``sums``; ``lse [B, Hq, N]``."""
    batch, num_q, num_kv_heads, _ = block_indices.shape
    heads = lse.shape[1]
    group = heads // num_kv_heads
    done, end = 0, sums.rows
    while done < end:
        # Early tokens see few blocks: their programs are narrower.
        width = blocks_reached(sums.pitch * 32, cu_seqlens, sums.first + done + 1, spec)
        rows = end - done
        if cu_seqlens is None:
            rows = min(rows, max(width * spec.sel_block_size - sums.first - done, 1))
        run(
            nsa_top_summed_blocks_kernel, (rows, num_kv_heads, batch),
            block_indices, sums.words[done * heads * sums.pitch * 16 :],
            sums.maxima[done * heads * sums.pitch :], lse,
            block_indices if token_seq is None else token_seq,
            block_indices if cu_seqlens is None else cu_seqlens, sums.first + done, sums.rows,
            num_q, sums.pitch,
            GROUP=group, SEL_BLOCK=spec.sel_block_size, TOP_N=spec.top_n,
            NUM_INIT=spec.num_init_blocks, NUM_LOCAL=spec.num_local_blocks,
            VARLEN=cu_seqlens is not None, BLOCK_R=width // 32,
            BLOCK_O=next_power_of_2(spec.top_n),
            num_warps=max(min(width * next_power_of_2(group) // 8192, 16), 1),
        )  # fmt: skip
        done += rows
