"""Ahead-of-time compilation of the paged decode step's own kernels, with no GPU; a script.

Prints one JSON line per kernel, as ``aot.py`` does for the kernels of training.
"""

from __future__ import annotations

import json
import re
import sys

import torch

from sparsek_kernels import PagedBatch
from sparsek_kernels.nsa.compress.mlp import PhiWeights
from sparsek_kernels.nsa.paged import launch as launch_paged
from sparsek_kernels.nsa.paged.cache import Compression, NSAPages
from sparsek_kernels.nsa.paged.problem import PagedProblem
from sparsek_kernels.nsa.spec import NSASpec
from sparsek_kernels.paged.config import overlaps
from tests.kernels.nsa.aot import Launch, Spy, compile_launch

PAGES, PAGE, LENGTH = 64, 64, 65536


def launches(arch: int, dtype: torch.dtype, dim: int, group: int) -> list[Launch]:
    """The step's kernels as ``arch`` launches them: 4 KV heads, compressed by a learnable map."""
    seen: list[Launch] = []
    for name in [n for n in vars(launch_paged) if re.fullmatch(r"nsa_\w+_kernel", n)]:
        setattr(launch_paged, name, Spy(name, getattr(launch_paged, name), seen))
    overlap = overlaps(arch)
    launch_paged.overlap_options = lambda *_: {"OVERLAP": overlap, "launch_pdl": overlap}
    spec, heads = NSASpec(), 4
    token_rows = [torch.empty(PAGES, heads, PAGE, dim, dtype=dtype) for _ in range(6)]
    cmp_rows = [torch.empty(PAGES, heads, PAGE // 16, dim, dtype=dtype) for _ in range(2)]
    phi = PhiWeights(
        torch.empty(32, dim, dtype=dtype),
        torch.empty(32 * dim, dim, dtype=dtype),
        torch.empty(dim, dtype=dtype),
        torch.empty(dim, dim, dtype=dtype),
        torch.empty(dim, dtype=dtype),
    )
    batch = PagedBatch(
        block_table=torch.zeros(1, LENGTH // PAGE, dtype=torch.int32),
        seq_lens=torch.tensor([LENGTH], dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32),
        num_decodes=1,
        num_decode_tokens=1,
        decode_query_len=1,
        max_query_len=1,
        max_seq_len=LENGTH,
    )
    pages = NSAPages(*token_rows, *cmp_rows)
    compression = Compression(phi, phi, torch.empty(dim // 2))
    q = torch.empty(1, heads * group, dim, dtype=dtype)
    problem = PagedProblem(q, pages, batch, spec, compression, 512, 0.1)
    launch_paged.decode(problem, torch.empty(1, 3, heads * group, dim))
    return seen


def main() -> None:
    arch, group, dim = (int(x) for x in sys.argv[1:4])
    for launch in launches(arch, getattr(torch, sys.argv[4]), dim, group):
        print(json.dumps(compile_launch(launch, arch)), flush=True)


if __name__ == "__main__":
    main()
