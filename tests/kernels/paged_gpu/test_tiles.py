"""The table of a step's prefill tiles, against a plain count of them."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from problems import make_problem

from sparsek_kernels.paged.batch import PagedBatch
from sparsek_kernels.paged.launch.tiles import prefill_tiles, rows_with_queries
from sparsek_kernels.paged.policy import SelectionPolicy

requests = st.lists(
    st.tuples(st.integers(0, 700), st.integers(0, 900)), min_size=1, max_size=5
)  # new tokens, tokens before them


def batch_of(
    lengths: list[tuple[int, int]], num_decodes: int
) -> tuple[PagedBatch, int, list[tuple[int, int]]]:
    """A batch, its tokens, and new tokens and keys of each request."""
    sized = [(new, before + new) for new, before in lengths]
    sized[:num_decodes] = [(1, before + 1) for _, before in lengths[:num_decodes]]
    problem = make_problem(sized, num_decodes=num_decodes, heads=1, group=1, dim=16)
    return problem.batch, problem.q.shape[0], sized


def plain_table(
    sized: list[tuple[int, int]], num_decodes: int, tile: int, together: int
) -> list[tuple[int, int, bool]]:
    """Request, base and whether there are queries, of the tiles of every span that has some."""
    found = []
    for request, (new, length) in enumerate(sized):
        if request < num_decodes:
            continue
        queries = set(range(length - new, length))
        for base in range(0, length + tile * together, tile):
            span = base // (tile * together) * tile * together
            if queries & set(range(span, span + tile * together)):
                found.append((request, base, bool(queries & set(range(base, base + tile)))))
    return found


@given(
    lengths=requests,
    num_decodes=st.integers(0, 2),
    tile=st.sampled_from([1, 16, 24, 64, 100, 300]),
    together=st.sampled_from([1, 2, 4, 7]),
)
def test_the_table_has_the_tiles_of_whole_spans(
    lengths: list[tuple[int, int]], num_decodes: int, tile: int, together: int
) -> None:
    decodes = min(num_decodes, len(lengths) - 1)
    batch, tokens, sized = batch_of(lengths, decodes)
    table = prefill_tiles(batch, tile, tokens, together)
    assert table.dtype == torch.int32
    assert table.is_contiguous()
    assert len(table) % together == 0
    wanted = [(request, base) for request, base, _ in plain_table(sized, decodes, tile, together)]
    rows = [tuple(row) for row in table.tolist()]
    assert rows[: len(wanted)] == wanted
    assert all(request == -1 for request, _ in rows[len(wanted) :])


@given(
    lengths=requests,
    num_decodes=st.integers(0, 2),
    tile=st.sampled_from([2, 16, 24, 64, 100, 300]),
)
def test_rows_with_queries_are_in_the_order_of_the_queries(
    lengths: list[tuple[int, int]], num_decodes: int, tile: int
) -> None:
    policy = SelectionPolicy(window_size=64, top_k=1, query_tile=tile)
    decodes = min(num_decodes, len(lengths) - 1)
    batch, _, sized = batch_of(lengths, decodes)
    table = plain_table(sized, decodes, tile, policy.tiles_per_list)
    wanted = [row for row, (_, _, some) in enumerate(table) if some]
    assert rows_with_queries(batch, policy) == wanted


def test_chunks_that_begin_and_end_inside_spans() -> None:
    """Spans of 256: the first chunk has the middle of two, the second the end of one."""
    batch, tokens, _ = batch_of([(1, 40), (200, 130), (0, 90), (30, 226)], 1)
    table = prefill_tiles(batch, 64, tokens, 4).tolist()
    first = [[1, base] for base in range(0, 512, 64)]
    assert table[:12] == first + [[3, base] for base in range(0, 256, 64)]
    policy = SelectionPolicy(window_size=64, top_k=1)
    assert rows_with_queries(batch, policy) == [2, 3, 4, 5, 11]
