"""Segments, ordinary ones and extremes, how near a record must come, and steps that write them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from sparsek_kernels.paged import PagedBatch
from sparsek_kernels.paged.record import (
    encode,
    page_bytes,
    read_means,
    read_pair_scales,
    read_variances,
    read_vectors,
    view_records,
)
from sparsek_kernels.paged.record_reference import records_reference

KINDS = ("normal", "massive", "offset", "zero", "constant", "tiny", "huge", "one_token")


def segments(
    kind: str, shape: tuple[int, ...], dim: int, dtype: torch.dtype, seed: int = 0
) -> torch.Tensor:
    """Keys ``[*shape, 64, D]``."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(*shape, 64, dim, generator=generator)
    if kind == "massive":
        keys[..., dim // 3] *= 500.0
    elif kind == "offset":  # means that dwarf what is left of the keys
        keys += 100.0 * torch.randn(*shape, 1, dim, generator=generator)
    elif kind == "zero":
        keys *= 0.0
    elif kind == "constant":
        keys = keys[..., :1, :].expand_as(keys)
    elif kind in ("tiny", "huge"):
        least, most = (1e-4, 4e3) if dtype == torch.float16 else (1e-30, 1e15)
        keys *= most if kind == "huge" else least
    elif kind == "one_token":
        keys[..., :63, :] = 0.0
    return keys.to(dtype)


def check_decoded(records: torch.Tensor, keys: torch.Tensor) -> None:
    """Compare what records stand for with the oracle: within a level, and nearly all exactly.

    Float32 sums that round to a border of two levels are no faults; there are few.
    """
    dim = keys.shape[-1]
    expected = records_reference(keys)
    means = read_means(records, dim).double()
    moved = (means != expected.means)[..., None, :]
    each_pair = read_pair_scales(records, dim)
    sizes = each_pair.double() / expected.pair_scales
    assert ((sizes == 1.0) | ((sizes > 0.66) & (sizes < 1.51))).all()
    ulp = expected.means.abs().clamp(min=2.0**-14) * 2.0**-10
    assert ((means - expected.means).abs() <= ulp).all()
    _check_mostly(each_pair, expected.pair_scales)
    _check_mostly(means, expected.means)
    variances = read_variances(records, dim).double()
    wanted = expected.variances
    assert ((variances - wanted).abs() <= wanted * 0.251 + 2.0**-16).all()
    _check_mostly(variances, wanted)
    vectors = read_vectors(records, dim).double()
    error = (vectors - expected.vectors).abs()
    steps = expected.steps * 1.01 + ulp[..., None, :]
    changed = moved | torch.cat([sizes, sizes], -1)[..., None, :].ne(1.0)
    assert (error <= torch.where(changed, 2.0 * steps, steps) + 2.0**-70).all()
    _check_mostly(vectors, expected.vectors, ulp[..., None, :] * 1e-3 + 1e-4 * expected.steps)


def _check_mostly(
    found: torch.Tensor, expected: torch.Tensor, within: torch.Tensor | float = 0.0
) -> None:
    away = ((found.double() - expected).abs() > within).double().mean()
    assert away < 0.01, away


UNWRITTEN = 255
"""A byte of pages whose records nobody wrote."""

Write = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Writes the records of a step: K, what pages keep, and the slots of its tokens."""


@dataclass
class Pages:
    """Sequences on shuffled pages that are poison where no key is.

    Args:
        keys: of each request, ``[tokens, Hkv, D]``; what steps put into the pages.
        k_cache: ``[pages, Hkv, page_size, D]``.
        k_summary: ``[pages, Hkv, bytes]``.
        table: ``[R, most pages]`` int32.
    """

    keys: list[torch.Tensor]
    k_cache: torch.Tensor
    k_summary: torch.Tensor
    table: torch.Tensor

    def slots(self, request: int, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Pages and rows of a request's tokens; those on other ranks are left out."""
        page_size = self.k_cache.shape[2]
        token = torch.arange(first, last, device=self.table.device)
        return self.table[request, token // page_size].long(), token % page_size

    def step(self, before: list[int], after: list[int], write: Write) -> None:
        """Put each request's tokens from ``before`` up to ``after`` into its pages."""
        slots = []
        for request, (first, last) in enumerate(zip(before, after, strict=True)):
            pages, rows = self.slots(request, first, last)
            here = pages >= 0
            slots.append(torch.where(here, pages * self.k_cache.shape[2] + rows, -1))
            new = self.keys[request][first:last][here].to(self.k_cache.dtype)
            self.k_cache[pages[here], :, rows[here]] = new
        write(self.k_cache, self.k_summary, torch.cat(slots))

    def batch(self, before: list[int], after: list[int]) -> PagedBatch:
        """The step: requests in front that have at most 5 new tokens decode."""
        counts = [last - first for first, last in zip(before, after, strict=True)]
        decodes = next((i for i, count in enumerate(counts) if count > 5), len(counts))
        device = self.table.device
        return PagedBatch(
            block_table=self.table,
            seq_lens=torch.tensor(after, dtype=torch.int32, device=device),
            cu_seqlens_q=torch.tensor([0, *counts], device=device).cumsum(0).to(torch.int32),
            num_decodes=decodes,
            num_decode_tokens=sum(counts[:decodes]),
            decode_query_len=max([1, *counts[:decodes]]),
            max_query_len=max(counts),
            max_seq_len=max(after),
            seq_lens_host=tuple(after),
            query_lens_host=tuple(counts),
        )

    @property
    def records(self) -> torch.Tensor:
        """``[pages, Hkv, page_size / 64, record_bytes]``."""
        return view_records(self.k_summary, *self.k_cache.shape[2:])

    def expected(self, lengths: list[int]) -> torch.Tensor:
        """Records of all complete segments of sequences, others unwritten."""
        found = torch.full_like(self.records, UNWRITTEN)
        for request, length in enumerate(lengths):
            for first in range(0, length // 64 * 64, 64):
                pages, rows = self.slots(request, first, first + 64)
                if pages[0] < 0:
                    continue
                keys = self.k_cache[pages[0], :, int(rows[0]) : int(rows[0]) + 64]
                found[pages[0], :, int(rows[0]) // 64] = encode(keys)
        return found


def make_pages(
    lengths: list[int],
    *,
    heads: int = 2,
    dim: int = 32,
    page_size: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    head_major: bool = False,
    kind: str = "normal",
    device: str = "cpu",
    seed: int = 0,
) -> Pages:
    """Pages as a server lays them: K beside V of a token, then what the page keeps."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-length // page_size) for length in lengths]
    pages = sum(counts) + 2
    body, kept = heads * page_size * 2 * dim, heads * page_bytes(page_size, dim)
    rows = 2 * dim * heads
    tail = -(-kept // dtype.itemsize // rows) * rows
    buffer = torch.full((pages, body + tail), float("nan")).to(dtype).to(device)
    strides = (page_size * 2 * dim, 2 * dim) if head_major else (2 * dim, rows)
    kv = buffer.as_strided((pages, heads, page_size, 2 * dim), (body + tail, *strides, 1))
    behind = buffer.view(torch.uint8)[:, body * dtype.itemsize :]
    k_summary = behind[:, :kept].unflatten(1, (heads, -1)).fill_(UNWRITTEN)
    order = torch.randperm(pages, generator=generator).to(torch.int32)
    table = torch.zeros(len(lengths), max(counts) + 1, dtype=torch.int32)
    for request, mine in enumerate(order[: sum(counts)].split(counts)):
        table[request, : counts[request]] = mine
    keys = []
    for request, length in enumerate(lengths):
        drawn = segments(kind, (-(-length // 64), heads), dim, dtype, seed + request)
        keys.append(drawn.transpose(1, 2).flatten(0, 1)[:length].to(device))
    return Pages(keys, kv[..., :dim], k_summary, table.to(device))


def write_in_pieces(pages: Pages, lengths: list[int], cuts: list[int], write: Write) -> None:
    """Step by step up to ``lengths``, each request by one cut after another."""
    before, turn = [0] * len(lengths), 0
    while before != lengths:
        after = [
            min(done + cuts[(turn + request) % len(cuts)], length)
            for request, (done, length) in enumerate(zip(before, lengths, strict=True))
        ]
        pages.step(before, after, write)
        before, turn = after, turn + 1


def redraft(pages: Pages, *first: int) -> None:
    """Other tokens from ``first`` of each request on."""
    for tokens, start in zip(pages.keys, first, strict=True):
        tokens[start:] += 1.0
