"""What paged attention and selection refuse, each with an error that names the argument."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sparsek_kernels.paged import (
    SelectionPolicy,
    attend_segment,
    paged_attention,
    select_blocks,
    write_kv,
)
from sparsek_kernels.paged.checks import check_triton_layout
from sparsek_kernels.paged.operands import PagedOperands
from sparsek_kernels.paged.plan import Segment
from tests.kernels.paged.cache_cases import POLICIES, make_case

SUMMARY = torch.zeros(6, 2, 400, dtype=torch.uint8)


def _arguments() -> dict[str, object]:
    case = make_case([40, 70], [1, 70], 1)
    return {
        "q": case.q,
        "k_cache": case.k_cache,
        "v_cache": case.v_cache,
        "batch": case.batch,
        "policy": POLICIES["topk"],
        "k_summary": case.k_summary,
    }


def _selection() -> dict[str, object]:
    return {name: value for name, value in _arguments().items() if name != "v_cache"}


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"q": torch.zeros(71, 3, 32)}, ValueError, "q: expected a multiple of num_kv_heads=2"),
        ({"q": torch.zeros(71, 4, 16)}, ValueError, r"q: expected shape \[T, Hq, 32\]"),
        ({"q": torch.zeros(71, 4, 32, dtype=torch.float64)}, TypeError, "q: expected dtype"),
        ({"q": torch.zeros(71, 4, 32, dtype=torch.float16)}, TypeError, "k_cache: expected"),
        ({"q": [1]}, TypeError, "q: expected a torch.Tensor, got list"),
        ({"v_cache": None}, TypeError, "v_cache: expected a torch.Tensor, got NoneType"),
        ({"policy": "dense"}, TypeError, "policy: expected a SelectionPolicy or a StepPolicy"),
        ({"k_summary": None}, ValueError, "k_summary: expected the page summaries"),
        ({"k_summary": torch.zeros(1, 2, 2, 32)}, ValueError, "k_summary: expected shape"),
        ({"k_summary": SUMMARY.half()}, TypeError, "k_summary: expected dtype torch.uint8"),
        ({"k_summary": SUMMARY.mT.contiguous().mT}, ValueError, "the bytes of a page and head"),
        ({"sinks": torch.zeros(3)}, ValueError, "sinks: expected shape"),
        ({"softmax_scale": float("nan")}, ValueError, "softmax_scale: expected a finite number"),
        ({"softmax_scale": -0.5}, ValueError, "softmax_scale: expected a finite number > 0"),
        ({"out": torch.zeros(1, 4, 32)}, ValueError, "out: expected shape"),
        (
            {"policy": SelectionPolicy(window_size=8, top_k=1, sel_block_size=48)},
            ValueError,
            "page_size: expected a divisor or a multiple",
        ),
    ],
)
def test_bad_arguments(change: dict[str, object], error: type[Exception], match: str) -> None:
    arguments = {**_arguments(), **change}
    with pytest.raises(error, match=match):
        paged_attention(**arguments)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"key": torch.zeros(3, 1, 32)}, ValueError, r"key: expected shape \[T, 2, 32\]"),
        ({"key": torch.zeros(3, 2, 32).half()}, TypeError, "k_cache: expected the dtype of q"),
        ({"value": torch.zeros(3, 2, 24)}, ValueError, r"value: expected shape \[3, 2, 32\]"),
        (
            {"value": torch.zeros(3, 2, 32).double()},
            TypeError,
            "value: expected dtype torch.float32",
        ),
        ({"slot_mapping": torch.arange(3).int()}, TypeError, "slot_mapping: expected dtype"),
        ({"slot_mapping": torch.arange(4)}, ValueError, "slot_mapping: expected at most 3 entries"),
    ],
)
def test_tokens_that_do_not_fit_the_pages(
    change: dict[str, torch.Tensor], error: type[Exception], match: str
) -> None:
    case = make_case([40], [40], 0)
    tokens = {"key": torch.zeros(3, 2, 32), "value": torch.zeros(3, 2, 32)}
    arguments = {**tokens, "slot_mapping": torch.arange(3), **change}
    with pytest.raises(error, match=match):
        write_kv(**arguments, k_cache=case.k_cache, v_cache=case.v_cache, k_summary=None)


def test_an_output_in_the_memory_of_the_queries_is_refused() -> None:
    """Dense ends of prompts read their queries after the other rows are written."""
    arguments = _arguments()
    with pytest.raises(ValueError, match="out: expected memory of its own, got that of q"):
        paged_attention(**arguments, out=arguments["q"])


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"query_lens_host": (1, 71)}, "q: expected at least 72 rows, .* got 71"),
        ({"prompt_left_host": (0,)}, r"prompt_left_host: .* each of 2 requests, got 1"),
        ({"seq_lens_host": (40,)}, r"seq_lens_host: .* each of 2 requests, got 1"),
        ({"query_lens_host": (1, 70, 0)}, r"cu_seqlens_q.*: expected 2 requests, .* got 3"),
        ({"seq_lens_host": (40, 69)}, r"seq_lens: expected 70 .* for request 1, got 69"),
        ({"seq_lens_host": (40, 10**6)}, r"seq_lens: expected 70 .* for request 1, got 1000000"),
    ],
    ids=["queries", "prompts", "fewer", "more", "short", "long"],
)
def test_batches_that_do_not_fit(fields: dict[str, tuple[int, ...]], match: str) -> None:
    arguments = _arguments()
    batch = replace(arguments["batch"], **fields, _derived={})
    if len(fields.get("query_lens_host", ())) == 2:  # long enough for the extra query
        batch = replace(batch, seq_lens_host=(40, 71), _derived={})
    with pytest.raises(ValueError, match=match):
        paged_attention(**{**arguments, "batch": batch})
    with pytest.raises(ValueError, match=match):
        select_blocks(**{**_selection(), "batch": batch})


@pytest.mark.parametrize(
    ("fields", "error", "match"),
    [
        ({"num_decodes": 3}, ValueError, "num_decodes: expected 0 to 2 requests, got 3"),
        ({"num_decode_tokens": 0}, ValueError, "num_decode_tokens: expected 1, .* got 0"),
        ({"num_decode_tokens": 5}, ValueError, "num_decode_tokens: expected 1, .* got 5"),
        (
            {"num_decodes": 2, "num_decode_tokens": 71},
            ValueError,
            "decode_query_len: .*at least 70",
        ),
        ({"block_table": torch.zeros(2, 3)}, TypeError, "block_table: expected dtype torch.int32"),
        (
            {"block_table": torch.zeros(1, 3).int()},
            ValueError,
            "seq_lens: expected no more requests",
        ),
        ({"block_table": torch.full((2, 3), 99).int()}, ValueError, "block_table: .* got 99"),
        ({"block_table": torch.full((2, 3), -1).int()}, ValueError, "block_table: .* got -1"),
        (
            {"cu_seqlens_q": torch.tensor([0, 1, 71, 71])},
            ValueError,
            r"cu_seqlens_q.*: expected 2 requests, as many as seq_lens has, got 3",
        ),
        ({"cu_seqlens_q": torch.tensor([0, 1.0, 71.0])}, TypeError, "cu_seqlens_q: expected dtype"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_batches_that_contradict_themselves(
    fields: dict[str, object], error: type[Exception], match: str
) -> None:
    arguments = _arguments()
    batch = replace(arguments["batch"], **fields, _derived={})
    with pytest.raises(error, match=match):
        paged_attention(**{**arguments, "batch": batch})
    with pytest.raises(error, match=match):
        select_blocks(**{**_selection(), "batch": batch})


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (
            {"k_summary": None},
            ValueError,
            "k_summary: .* summaries that the indexer",
        ),
        ({"k_summary": torch.zeros(9, 2, 4, 32)}, ValueError, "k_summary: expected shape"),
        ({"q": torch.zeros(71, 4, 16)}, ValueError, r"q: expected shape \[T, Hq, 32\]"),
        ({"q": torch.zeros(71, 4, 32, dtype=torch.float16)}, TypeError, "k_cache: expected"),
        ({"k_scale": 2.0}, ValueError, "k_scale, v_scale: expected 1.0"),
        ({"policy": POLICIES["window"]}, ValueError, "policy: expected top_k >= 1"),
    ],
)
def test_bad_selections(change: dict[str, object], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        select_blocks(**{**_selection(), **change})


def test_prefills_of_single_token_tiles_need_summaries() -> None:
    case = make_case([300], [300], 0)
    with pytest.raises(ValueError, match=r"k_summary: .* summaries that the indexer"):
        select_blocks(case.q, case.k_cache, case.batch, POLICIES["topk_token"])


def test_gpu_kernels_refuse_tensors_that_they_would_misread() -> None:
    rows = torch.zeros(3, 8)
    check_triton_layout(q=rows, k_summary=None, sinks=rows[:1, 0])
    for name, tensor in {"k_summary": rows.T, "sinks": rows[:, 0]}.items():
        with pytest.raises(NotImplementedError, match=f"{name}: on a GPU the last dimension"):
            check_triton_layout(q=rows, **{name: tensor})


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"num_sink": -1}, "num_sink: expected an integer >= 0, got -1"),
        ({"window_size": 0}, "window_size: expected an integer >= 1"),
        ({"top_k": 2}, "window_size: expected an integer when"),
        ({"window_size": 4, "sel_block_size": 24}, "sel_block_size: expected a multiple of 16"),
        ({"query_tile": 0}, "query_tile: expected an integer >= 1"),
        ({"window_size": 1.5}, "window_size: expected an integer >= 1 or None, got 1.5"),
        ({"window_size": 4, "top_k": 2.5}, "top_k: expected an integer >= 0, got 2.5"),
        ({"window_size": 4, "num_sink": "3"}, "num_sink: expected an integer >= 0, got '3'"),
        ({"window_size": 4, "sel_block_size": 64.0}, "sel_block_size: .* 16, got 64.0"),
    ],
)
def test_bad_policies(fields: dict[str, int], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        SelectionPolicy(**fields)


def test_a_segment_whose_blocks_do_not_fit_its_pages() -> None:
    case = make_case([90], [90], 0, page_size=48)
    operands = PagedOperands(case.q, case.k_cache, case.v_cache, case.q, 1.0)
    with pytest.raises(ValueError, match=r"segment: .* pages of 48 .* got sel_block_size=64"):
        attend_segment(operands, Segment(case.batch, SelectionPolicy()), None)


def test_pages_that_no_block_fits() -> None:
    case = make_case([40], [40], 0)
    cache = torch.zeros(4, 2, 24, 32)
    with pytest.raises(ValueError, match=r"page_size: .* a multiple of 16, got 24"):
        paged_attention(case.q, cache, cache, case.batch, SelectionPolicy())
