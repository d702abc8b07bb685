"""The choice of the best blocks alone, by scores or block sums, and what neighbours share."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import torch

from sparsek_kernels.nsa.compressed import launch_sm90 as launch_compressed_hopper
from sparsek_kernels.nsa.config import TileConfig
from sparsek_kernels.nsa.select import launch as launch_select
from sparsek_kernels.nsa.select import launch_fused as launch_compressed_select
from sparsek_kernels.nsa.selected.index import merge_selection, sort_selection
from sparsek_kernels.nsa.selected.problem import SelectedProblem
from sparsek_kernels.nsa.selected.share import share_blocks
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


def run_share(group: int, device: str) -> int:
    """Check which blocks tiles share, and that all other far blocks are in the index."""
    torch.manual_seed(group)
    judge, (rows, heads, top_n, size) = Judge(f"shared of {group}"), (150, 2, 6, 8)
    q = torch.zeros(1, rows, heads * group, 16, device=device)
    k = q[:, :, :heads]
    ranks = torch.rand(1, rows, heads, 19).masked_fill_(torch.arange(19) > 12, -1.0)
    ranks += 0.4 * torch.rand(1, 1, heads, 19)  # so that neighbours agree on some
    own = torch.arange(rows).view(1, -1, 1, 1) // size
    chosen = ranks.masked_fill(torch.arange(19) > own, -1.0).topk(top_n)
    indices = torch.where(chosen.values >= 0, chosen.indices, -1).int().to(device)
    problem = SelectedProblem(q, k, k, indices, None, size, 1.0)
    config = replace(problem.config, index_rows=21)
    problem = replace(problem, tuned=config)
    found = share_blocks(problem, TileConfig(64, size, 4, 2), 2)
    if found is None:
        judge.say(group == 1, "nothing", "too many entries")
        return judge.failed
    block_t, launch_rows = 64 // group, 42
    least = max(block_t // 2, 2)
    num_keys = -(-rows // 21) * heads * 19
    keys = [[2 * num_keys] * top_n for _ in range(rows * heads)]
    far = torch.zeros(rows, heads, dtype=torch.int32)
    good, shared, single = True, 0, 0
    starts = [
        (first, start)
        for first in range(0, rows, launch_rows)
        for start in range(first, first + found.launch_tiles * block_t, block_t)
    ]
    for tile, (first, start) in enumerate(starts):
        tokens = range(min(start, rows), min(start + block_t, first + launch_rows, rows))
        for head in range(heads):
            listed = {t: indices[0, t, head].tolist() for t in tokens}
            named = [b for t in tokens for b in listed[t] if 0 < b < t // size - 1]
            times = Counter(named)
            want = list(dict.fromkeys(b for b in named if times[b] >= least))
            count, places = found.counts[tile, head].tolist()
            good &= found.lists[tile, head, :count].tolist() == want
            union = 0
            for t in tokens:
                for s, b in enumerate(listed[t]):
                    if b < 0:
                        continue
                    key = (t // 21 * heads + head) * 19 + b
                    keys[t * heads + head][s] = key + num_keys
                    if 0 < b < t // size - 1 and times[b] < least:
                        keys[t * heads + head][s] = key
                        far[t, head] |= 1 << s
                union |= int(far[t, head])
            good &= places == union
            shared += len(want)
            single += union.bit_count()
    judge.say(good, "lists and places", f"{shared} shared, {single} places")
    judge.say(shared > 0 and single > 0, "both kinds", "there")
    judge.say(torch.equal(found.far.cpu(), far), "bits", f"{rows} rows")
    same = found.keys.cpu() == torch.tensor(keys).flatten()
    judge.say(bool(same.all()), "keys", f"{len(same)} places")
    return judge.failed


def run_index(packed: bool, together: int, device: str) -> int:
    """Check that the indices invert a selection: of far entries, and of all by larger chunks."""
    torch.manual_seed(0)
    judge = Judge(f"index {'packed' if packed else 'batch'} {together}")
    batch, rows, heads, slots, size, step = (1, 60, 2, 3, 8, 13) if packed else (2, 30, 2, 3, 8, 13)
    offsets = torch.tensor([0, 17, 17, 60], dtype=torch.int32).to(device) if packed else None
    seq_of = [0] * 17 + [2] * 43
    chosen = torch.rand(batch, rows, heads, 8).argsort(-1)[..., :slots].int()
    limit = torch.tensor([3] * 17 + [6] * 43 if packed else [4] * 30).view(1, rows, 1, 1)
    chosen = torch.where((chosen < limit) & (torch.rand(chosen.shape) < 0.7), chosen, -1)
    q, k = torch.empty(batch, rows, heads, 1), torch.empty(batch, rows, heads, 1)
    problem = SelectedProblem(
        q.to(device), k.to(device), k.to(device), chosen.to(device), offsets, size, 1.0
    )
    config = replace(
        problem.config, index_rows=step, item_entries=5, chunk_rows_bwd=together * step,
        item_entries_bwd=7,
    )  # fmt: skip
    problem = replace(problem, tuned=config, index=problem.new_index().fill_(-9))
    flat = chosen.flatten().tolist()
    starts = torch.tensor([(0, 17, 17)[seq] for seq in seq_of]) if packed else torch.zeros(rows)
    own = ((torch.arange(rows) - starts) // size).view(1, rows, 1, 1)
    far = (chosen > 0) & (chosen < own - 1)
    found = {"far": sort_selection(problem, problem.index)}
    found["all"] = merge_selection(problem, problem.index)
    for name, index in found.items():
        listed, good, free = [], True, 0
        chunk_rows, most = (step, 5) if name == "far" else (together * step, 7)
        last = index.num_chunks * heads * index.num_blocks
        begins = index.entry_offsets[: last + 1].tolist()
        first_items = [begin // most + key for key, begin in enumerate(begins)]
        for key, (lo, hi) in enumerate(pairwise(begins)):
            pair, block = divmod(key, index.num_blocks)
            items = index.item_keys[first_items[key] : first_items[key + 1]].tolist()
            used = -(-(hi - lo) // most)
            good &= used <= len(items) <= index.chunk_items
            good &= items == [key] * used + [-1] * (len(items) - used)
            free += len(items) - used
            entries = index.entries[lo:hi].tolist()
            good &= entries == sorted(entries)
            for place, entry in enumerate(entries, lo):
                row, at_head = entry // (heads * slots), entry // slots % heads
                seq = seq_of[row] if packed else row // rows
                first = (0, 17, 17)[seq] // size + seq if packed else 4 * seq
                good &= (row // chunk_rows, at_head) == divmod(pair, heads)
                good &= flat[entry] == block - first
                good &= int(index.entry_rows[place]) == row % rows
                good &= not packed or int(index.block_seq[block]) == seq
            listed += entries
        judge.say(good, f"{name}: keys, items and entries", f"{len(listed)} entries, {free} free")
        want = (far if name == "far" else chosen >= 0).flatten().nonzero().flatten().tolist()
        same = sorted(listed) == want and begins[0] == 0
        judge.say(same and len(want) > 0, f"{name}: all of them", "listed once")
        per_chunk = [
            first_items[i + heads * index.num_blocks] - first_items[i]
            for i in range(0, last, heads * index.num_blocks)
        ]
        judge.say(max(per_chunk) <= index.chunk_items, f"{name}: items of a chunk", f"{per_chunk}")
    return judge.failed
