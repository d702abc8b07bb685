"""The choice of the best blocks alone, from given scores or block sums."""

from __future__ import annotations

import math

import torch

from sparsek_kernels.nsa.compressed import launch_sm90 as launch_compressed_hopper
from sparsek_kernels.nsa.select import launch as launch_select
from sparsek_kernels.nsa.select import launch_fused as launch_compressed_select
from sparsek_kernels.nsa.spec import NSASpec
from tests.kernels.nsa.judge import Judge


def run_best(num_blocks: int, num_init: int, device: str) -> int:
    """Check the choice of the best blocks alone: many ties, zeros and NaN, wide rows."""
    torch.manual_seed(num_blocks)
    judge, rows, top_n, block = Judge(f"best of {num_blocks}"), 5, 16, 64
    length = num_blocks * block
    pitch = launch_select.score_pitch(num_blocks)
    scores = torch.randint(0, 9, (rows, pitch)).float() / 4
    scores[0] += torch.rand(scores[0].shape)
    scores[1, ::3] = float("nan")
    scores[2, 20:] = 0.0
    scores[3, num_blocks - 2 :] = float("inf")  # of no candidate
    found = torch.full((1, rows, 1, top_n), -7, dtype=torch.int32, device=device)
    launch_select.choose(
        found, scores[None, :, None].to(device), None, None,
        NSASpec(32, 16, block, top_n, num_init, 2), offset=length - rows,
    )  # fmt: skip
    total = torch.nan_to_num(scores, nan=0.0)
    own = num_blocks - 1
    total[:, :num_init] = total[:, own - 1 :] = -1.0
    free = top_n - num_init - 2
    best = total.sort(dim=1, descending=True, stable=True).indices[:, :free]
    forced = torch.tensor([*range(num_init), own - 1, own]).expand(rows, -1)
    want = torch.cat((best, forced), 1).sort(1).values.int()
    judge.say(torch.equal(found[0, :, 0].cpu(), want), "selection", f"{rows} rows")
    return judge.failed


def run_summed(device: str) -> int:
    """Check the choice from block sums alone, where tokens begin to reach more than 256 blocks."""
    torch.manual_seed(0)
    judge, spec = Judge("best of sums"), NSASpec(8, 4, 16, 8, 1, 2)
    first, rows, (heads, kv_heads), pitch = 4090, 14, (6, 2), 9
    codes = torch.randint(1 << 10, 1 << 16, (rows, heads, pitch, 16, 2), dtype=torch.int64)
    words = codes[..., 0] | codes[..., 1] << 16
    words = torch.where(words < 1 << 31, words, words - (1 << 32)).int()
    maxima, lse = torch.randn(rows, heads, pitch), torch.randn(1, heads, first + rows)
    found = torch.full((1, first + rows, kv_heads, spec.top_n), -7, dtype=torch.int32)
    sums = launch_compressed_hopper.BlockSums(
        words.flatten().to(device), maxima.flatten().to(device), first, rows, pitch
    )
    found = found.to(device)
    launch_compressed_select.choose_summed(found, sums, lse.to(device), None, None, spec)
    values = ((codes << 13) + (67 << 23)).int().view(torch.float32).flatten(3).double()
    share = torch.exp2(maxima.double() - lse[0, :, first:].T[..., None].double() / math.log(2))
    total = (values * share[..., None]).flatten(2).view(rows, kv_heads, -1, pitch * 32).sum(2)
    own = (torch.arange(first, first + rows) // spec.sel_block_size)[:, None, None]
    block = torch.arange(pitch * 32)
    total = total.masked_fill((block == 0) | (block > own - 2), -1.0)
    best = total.sort(dim=2, descending=True, stable=True).indices[..., :5]
    forced = torch.cat((own * 0, own - 1, own), 2).expand(-1, kv_heads, -1)
    want = torch.cat((best, forced), 2).sort(2).values.int()
    judge.say(torch.equal(found[0, first:].cpu(), want), "selection", f"{rows} rows")
    judge.say(bool((found[0, :first] == -7).all()), "other rows", "untouched")
    return judge.failed
