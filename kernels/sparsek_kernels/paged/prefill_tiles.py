"""The tiles of a segment's prefills, as a table on the device."""

from __future__ import annotations

import torch

from sparsek_kernels.common.device import captures, on_device
from sparsek_kernels.paged.batch import PagedBatch


def prefill_tiles(batch: PagedBatch, tile: int, num_rows: int) -> torch.Tensor:
    """Device table of the prefills' tiles: ``[count, 2]`` int32, request (or -1) and base.

    There are as many as the prefills have where the host knows their lengths.  Where it knows but
    their new tokens, there are as many as these touch at most: one more for each, or none, which
    belongs to no request.  Else there are up to two more.

    The host makes the table where it knows the lengths: a device takes thirty operations.  A CUDA
    graph holds those, since its replays may be of other lengths.

    Args:
        tile: query positions of a tile.
        num_rows: rows of the queries that the batch counts in.
    """
    device = batch.seq_lens.device

    def build() -> torch.Tensor:
        lengths, counts = batch.seq_lens_host, batch.query_lens_host
        if lengths is None or counts is None or captures(device):
            return _table_by_device(batch, tile, max(_count_tiles(batch, tile, num_rows), 1))
        requests = enumerate(zip(lengths, counts, strict=True))
        parts = [
            _tiles_of(request, length - count, length, tile)
            for request, (length, count) in requests
            if count and request >= batch.num_decodes
        ]
        table = torch.cat(parts) if parts else torch.tensor([[-1, 0]])  # a grid has a program
        return on_device(table, torch.int32, device)

    return batch.derived(("prefill tiles", tile, num_rows), build)


def _tiles_of(request: int, begin: int, end: int, tile: int) -> torch.Tensor:
    """The tiles that hold positions of one request, as rows of the table, on the host."""
    first = max(begin, 0) // tile * tile
    bases = torch.arange(first, max(end, first + 1), tile)
    return torch.stack((torch.full_like(bases, request), bases), dim=1)


def _table_by_device(batch: PagedBatch, tile: int, count: int) -> torch.Tensor:
    """The table from the lengths on the device, with ``count`` rows."""
    first = batch.num_decodes
    cu = batch.cu_seqlens_q[first:].to(torch.int64)
    counts = cu[1:] - cu[:-1]
    lens = batch.seq_lens[first:].to(torch.int64)
    first_tile = (lens - counts).clamp(min=0) // tile
    tiles = torch.where(counts > 0, (lens - 1).clamp(min=0) // tile - first_tile + 1, 0)
    ends = tiles.cumsum(0)
    index = torch.arange(count, device=cu.device)
    owner = torch.searchsorted(ends, index, right=True)
    known = owner < lens.shape[0]
    owner = owner.clamp(max=lens.shape[0] - 1)
    base = (first_tile[owner] + index - (ends - tiles)[owner]) * tile
    request = torch.where(known, owner + first, -1)
    return torch.stack([request, base], dim=1).to(torch.int32).contiguous()


def _count_tiles(batch: PagedBatch, tile: int, num_rows: int) -> int:
    """Tiles of the prefills, at most; what the host knows decides, never a device's values."""
    lengths, counts = batch.seq_lens_host, batch.query_lens_host
    if counts is None:
        tokens = num_rows - batch.first_row - batch.num_decode_tokens
        return tokens // tile + 2 * batch.num_prefills
    counts = counts[batch.num_decodes :]
    if lengths is None:  # a first token may be a tile's last
        return sum((count - 2) // tile + 2 for count in counts if count)
    prefills = zip(lengths[batch.num_decodes :], counts, strict=True)
    return sum((n - 1) // tile - (n - count) // tile + 1 for n, count in prefills if count)
