"""Attention of decoded tokens by records, through the public call, against the float64 oracle."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sparsek_kernels.paged import (
    PagedBatch,
    PageRecords,
    SelectionPolicy,
    StepPolicy,
    paged_attention,
    scratch,
    select_blocks,
)
from sparsek_kernels.paged.api import default_indexers
from sparsek_kernels.paged.cpu.native import decode as native_decode
from sparsek_kernels.paged.index.page_records import cpu
from sparsek_kernels.paged.index.page_records.reference import choose_reference
from sparsek_kernels.paged.lengths import batch_of_lengths
from sparsek_kernels.paged.reference import gather_sequence
from sparsek_kernels.paged.sample import CELL_BITS
from sparsek_kernels.paged.sample_reference import list_error, start_reference
from tests.kernels.paged import choice_oracle as oracle
from tests.kernels.paged.record_batches import TILES, RecordsCase, make_records
from tests.kernels.paged.records_oracle import checked_lists, decode_reference


@pytest.fixture(autouse=True)
def _in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """C rounds factors of scores to 16 bits, and may draw other cells."""
    monkeypatch.setattr(native_decode, "supports", lambda *_: False)


def chosen(case: RecordsCase, batch: PagedBatch, q: torch.Tensor) -> torch.Tensor:
    """The lists of a batch's requests and tokens."""
    lists = select_blocks(q, case.k_cache, batch, case.policy, k_summary=case.records)
    return torch.cat(lists)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("page_size", "new"), [(64, 1), (128, 3)])
def test_decoded_tokens_attend_by_records(page_size: int, new: int, dtype: torch.dtype) -> None:
    case = make_records([900, 300, 1217], [new] * 3, page_size=page_size, dtype=dtype)
    policy = StepPolicy(replace(TILES, dense_last=0), case.policy)
    assert isinstance(default_indexers(policy).decode, PageRecords)
    sinks = torch.linspace(-1.0, 2.0, case.q.shape[1])
    caches = case.k_cache, case.v_cache
    out = paged_attention(case.q, *caches, case.batch, policy, k_summary=case.records, sinks=sinks)
    lists = chosen(case, case.batch, case.q)
    assert (lists >> CELL_BITS > 0).any()
    scale = case.q.shape[2] ** -0.5
    select = checked_lists(lists, 1e-4)
    wanted = decode_reference(case.q, *caches, case.batch, case.policy, scale, sinks, select)
    torch.testing.assert_close(
        out.double(), wanted, atol=2e-5 if dtype == torch.float32 else 2e-2, rtol=0.0
    )


def test_torch_draws_the_oracles_list() -> None:
    """Exactly, where no score is within rounding of a key's edge: so in these cases."""
    case = make_records([900, 1217, 2500], [1, 3, 2])
    scale, row = case.q.shape[2] ** -0.5, 0
    for request, mine in enumerate(chosen(case, case.batch, case.q)):
        length, count = int(case.batch.seq_lens[request]), case.batch.query_lens[request]
        k = gather_sequence(case.k_cache, case.batch.block_table[request], length)
        q = case.q[row : row + count]
        row += count
        found = choose_reference(q, k, length - count, case.policy, scale)
        assert found is not None
        assert mine.tolist() == found.entries


@pytest.mark.parametrize("rows", [1, 1 << 24], ids=["in parts", "at once"])
def test_prompts_attend_by_records_token_by_token(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside decoded tokens; whatever the chunks, tokens choose the same cells."""
    monkeypatch.setattr(scratch, "_ROW_ELEMENTS", rows)
    lengths, new = [700, 1217, 640, 200], [1, 70, 90, 200]
    case = make_records(lengths, new, decodes=1, group=2, dim=32)
    caches, scale = (case.k_cache, case.v_cache), case.q.shape[2] ** -0.5
    out = paged_attention(case.q, *caches, case.batch, case.policy, k_summary=case.records)
    tokens, whole = case.batch.by_token(0, len(case.q)), chosen(case, case.batch, case.q)
    select = checked_lists(whole, 1e-4)
    wanted = decode_reference(case.q, *caches, tokens, case.policy, scale, select=select)
    torch.testing.assert_close(out.double(), wanted, atol=2e-5, rtol=0.0)
    assert (whole[:161, 0, 0] >= 0).all()
    assert (whole[161:] == -1).all()  # a prompt that is attended whole
    table = case.batch.block_table[1:2]
    chunks = [
        batch_of_lengths(table, (count,), (1147 + end,)) for count, end in ((33, 33), (37, 70))
    ]
    parts = [
        chosen(case, batch, case.q[row : row + n])
        for batch, row, n in zip(chunks, (1, 34), (33, 37), strict=True)
    ]
    assert torch.equal(torch.cat(parts), whole[1:71])


def test_records_need_pages_of_whole_segments() -> None:
    pages = torch.zeros(3, 1, 96, 64)
    with pytest.raises(ValueError, match="page_size: expected a multiple of 64"):
        PageRecords().check(TILES.by_records(64), pages)


def test_contexts_have_numbers_for_their_cells() -> None:
    case = make_records([900], [1])
    batch = replace(case.batch, max_seq_len=(1 << 22) + 1, _derived={})
    with pytest.raises(NotImplementedError, match=r"max_seq_len: .* at most 4194304 .* 4194305"):
        paged_attention(
            case.q, case.k_cache, case.v_cache, batch, case.policy, k_summary=case.records
        )


@pytest.mark.parametrize("new", [1, 3])
def test_lists_follow_from_the_bytes_of_records(new: int) -> None:
    case = make_records([900, 1217], [new, new], page_size=128)
    scale, heads = case.q.shape[2] ** -0.5, case.k_cache.shape[1]
    for request, lists in enumerate(chosen(case, case.batch, case.q)):
        length = int(case.batch.seq_lens[request])
        k = gather_sequence(case.k_cache, case.batch.block_table[request], length).double()
        segment = torch.arange(length // 64)
        pages = case.batch.block_table[request, segment // 2].long()
        rows = case.records.unflatten(-1, (2, -1))[pages, :, segment % 2]
        front, local = (x // 32 for x in case.policy.candidate_range(length - new))
        fields = oracle.read(rows, case.k_cache.shape[3])
        q = case.q[new * request : new * (request + 1)].double().unflatten(1, (heads, -1))
        for head, entries in enumerate(lists.tolist()):
            found = oracle.choose(
                q[:, head],
                k[:, head],
                fields.of(slice(front, None), head),
                front,
                local,
                case.policy.scored_blocks,
                scale,
                start_reference(length - new),
            )
            assert not list_error(found, 0, entries, 1e-4)
            assert max(entry >> CELL_BITS for entry in entries) > 0


def test_mean_attention_over_starts_is_that_over_everything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Draws are wrong, each in another way: what they share is less than a third of it."""
    case = make_records([1217], [1])
    case.q /= 4.0  # so that much of the softmax lies beyond what is kept for certain
    caches, draws = (case.k_cache, case.v_cache), []
    dense = paged_attention(case.q, *caches, case.batch, SelectionPolicy()).double()
    for start in range(0, 1 << 16, 1 << 10):
        monkeypatch.setattr(cpu, "start_of", lambda *_, start=start: start)
        out = paged_attention(case.q, *caches, case.batch, case.policy, k_summary=case.records)
        draws.append(out.double() - dense)
    errors = torch.stack(draws)
    single, shared = (x.square().mean().sqrt() for x in (errors, errors.mean(0)))
    assert 0.02 < single / dense.square().mean().sqrt() < 2.0
    assert shared < single / 3
