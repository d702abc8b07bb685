"""Random gates of SeerAttention-R, and caches whose pages keep their keys."""

from __future__ import annotations

from dataclasses import replace

import torch

from sparsek_kernels.paged import Gates, PagedBatch, Seer, SelectionPolicy, write_index
from tests.kernels.paged.cache_cases import Case


def make_gates(kv_heads: int, group: int, dim: int, *, norms: bool = True, seed: int = 3) -> Gates:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return Gates(
        draw(kv_heads, group, dim, dim) * (group * dim) ** -0.5,
        draw(kv_heads, 3 * dim, dim) * (3 * dim) ** -0.5,
        2.0 + draw(dim) if norms else None,
        2.0 + draw(dim) if norms else None,
    )


def make_rotation(positions: int, dim: int) -> torch.Tensor:
    """Cosines and sines as YaRN has them, longer than 1."""
    angles = torch.arange(positions)[:, None] * 1e4 ** -(2 * torch.arange(dim // 2) / dim)
    return 1.2 * torch.cat([angles.cos(), angles.sin()], -1).float()


def chunks(batch: PagedBatch, sizes: list[int], starts: list[int]) -> list[PagedBatch]:
    """The sequences of a batch, from ``starts`` on, as steps that prefill ``sizes`` in turn."""
    lengths, at, found = batch.seq_lens.tolist(), list(starts), []
    turn = 0
    while at != lengths:
        size = sizes[turn % len(sizes)]
        turn += 1
        ends = [min(begin + size, length) for begin, length in zip(at, lengths, strict=True)]
        counts = [end - begin for begin, end in zip(at, ends, strict=True)]
        found.append(
            replace(
                batch,
                seq_lens=torch.tensor(ends, dtype=torch.int32),
                cu_seqlens_q=torch.tensor([0, *counts]).cumsum(0).to(torch.int32),
                num_decodes=0,
                num_decode_tokens=0,
                max_query_len=max(counts),
                max_seq_len=max(ends),
                _derived={},
            )
        )
        at = ends
    return found


def keep_gate_keys(
    case: Case,
    policy: SelectionPolicy,
    gates: Gates,
    sizes: list[int] | None = None,
    starts: list[int] | None = None,
) -> None:
    """Fill the pages' summaries, which are NaN else, in chunks of these sizes."""
    if starts is None:
        case.k_summary.fill_(255)
    for step in chunks(case.batch, sizes or [1 << 20], starts or [0] * len(case.batch.seq_lens)):
        write_index(case.k_cache, case.v_cache, case.k_summary, step, policy, Seer(gates))
