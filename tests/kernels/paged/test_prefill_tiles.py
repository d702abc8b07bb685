"""The table of the prefills' tiles."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsek_kernels.paged import prefill_tiles as tiles_module
from sparsek_kernels.paged.lengths import batch_of_lengths
from sparsek_kernels.paged.prefill_tiles import prefill_tiles

Requests = list[tuple[int, int]]
"""New tokens of each request, and keys before them."""


def _draw_requests(least: int, most: int) -> st.SearchStrategy[Requests]:
    lengths = st.tuples(st.integers(least, 200), st.integers(0, 500))
    return st.lists(lengths, min_size=1, max_size=most)


@given(_draw_requests(1, 3), st.integers(0, 2), st.sampled_from([16, 32, 64]))
def test_there_are_as_many_tiles_as_the_host_knows_of(
    prefills: Requests, decodes: int, tile: int
) -> None:
    counts = [1] * decodes + [count for count, _ in prefills]
    lengths = [70] * decodes + [count + before for count, before in prefills]
    table = torch.zeros(len(counts), 1, dtype=torch.int32)
    batch = batch_of_lengths(table, counts, lengths, decodes=decodes)
    expected = [
        [request, first]
        for request, (count, length) in enumerate(zip(counts, lengths, strict=True))
        for first in range((length - count) // tile * tile, length, tile)
        if request >= decodes
    ]
    assert prefill_tiles(batch, tile, sum(counts)).tolist() == expected

    with mock.patch.object(tiles_module, "captures", return_value=True):
        assert prefill_tiles(replace(batch, _derived={}), tile, sum(counts)).tolist() == expected
    unknown = replace(batch, seq_lens_host=None, _derived={})
    for more, asked in ((1, unknown), (2, replace(unknown, query_lens_host=None, _derived={}))):
        found = prefill_tiles(asked, tile, sum(counts)).tolist()
        assert found[: len(expected)] == expected
        assert {request for request, _ in found[len(expected) :]} <= {-1}
        assert len(found) <= len(expected) + more * len(prefills)


@given(st.integers(1, 300), st.sampled_from([16, 32, 64]))
def test_new_tokens_alone_give_the_most_tiles_that_they_touch(count: int, tile: int) -> None:
    table = torch.zeros(1, 1, dtype=torch.int32)
    batches = [batch_of_lengths(table, [count], [before + count]) for before in range(tile)]
    unknown = replace(batches[0], seq_lens_host=None, _derived={})
    most = max(len(prefill_tiles(batch, tile, count)) for batch in batches)
    assert len(prefill_tiles(unknown, tile, count)) == most


def test_requests_without_new_tokens_have_no_tile_but_a_grid_has_one() -> None:
    batch = batch_of_lengths(torch.zeros(2, 1, dtype=torch.int32), [0, 0], [0, 0])
    assert prefill_tiles(batch, 64, 0)[:, 0].tolist() == [-1]
    mixed = batch_of_lengths(torch.zeros(3, 1, dtype=torch.int32), [70, 0, 5], [70, 0, 5])
    assert prefill_tiles(mixed, 64, 75)[:, 0].tolist() == [0, 0, 2]
