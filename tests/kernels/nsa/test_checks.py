"""Bad input to the NSA functions: each error names the argument, the rule and the value."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from sparsek_kernels.nsa.api import (
    compressed_attention,
    nsa_attention,
    nsa_compress,
    nsa_select,
    selected_attention,
)
from sparsek_kernels.nsa.compress.mlp import PhiWeights
from sparsek_kernels.nsa.compressed.launch_sm90 import query_segments
from sparsek_kernels.nsa.compressed.problem import CompressedProblem
from sparsek_kernels.nsa.config import ProblemShape, select_config
from sparsek_kernels.nsa.select import launch as launch_select
from sparsek_kernels.nsa.selected.index import sort_selection
from sparsek_kernels.nsa.selected.problem import MAX_CHUNKS, SelectedProblem
from sparsek_kernels.nsa.spec import NSASpec

Q = torch.zeros(1, 70, 4, 8)
K = torch.zeros(1, 70, 2, 8)
GATES = [torch.zeros(1, 70, 4) for _ in range(3)]
INDICES = torch.zeros(1, 70, 2, 1, dtype=torch.int32)
CMP = torch.zeros(1, 3, 2, 8)


def cu(*offsets: int) -> torch.Tensor:
    return torch.tensor(offsets, dtype=torch.int32)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        (
            {"sel_block_size": 40},
            ValueError,
            "sel_block_size: expected a multiple of cmp_stride=16",
        ),
        (
            {"cmp_block_size": 24},
            ValueError,
            "cmp_block_size: expected a multiple of cmp_stride=16",
        ),
        ({"sel_block_size": 16}, ValueError, "sel_block_size: expected at least cmp_block_size=32"),
        ({"top_n": 2}, ValueError, "top_n: expected at least the 3 forced blocks"),
        ({"cmp_stride": 0}, ValueError, "cmp_stride: expected an integer >= 1, got 0"),
        ({"num_init_blocks": -1}, ValueError, "num_init_blocks: expected an integer >= 0"),
        ({"top_n": 1.5}, TypeError, "top_n: expected an int, got float"),
    ],
)
def test_block_sizes(fields: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        NSASpec(**fields)
    with pytest.raises(error, match=message):
        nsa_attention(Q, K, K, *GATES, **fields)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: nsa_attention(None, K, K, *GATES), TypeError, "q: expected a torch.Tensor"),
        (lambda: nsa_attention(Q[0], K, K, *GATES), ValueError, "q: expected shape"),
        (lambda: nsa_attention(Q.int(), K, K, *GATES), TypeError, "q: expected dtype"),
        (lambda: nsa_attention(Q[:, :, :3], K, K, *GATES), ValueError, "q: expected a multiple"),
        (lambda: nsa_attention(Q, K.half(), K, *GATES), TypeError, "k: expected dtype"),
        (lambda: nsa_attention(Q, K[:, :9], K, *GATES), ValueError, "v: expected shape"),
        (
            lambda: nsa_attention(Q, K[:, :9], K[:, :9], *GATES),
            ValueError,
            "q: expected at most as many",
        ),
        (lambda: nsa_attention(Q, K, K[:, :9], *GATES), ValueError, "v: expected shape"),
        (
            lambda: nsa_attention(Q, K, K, GATES[0][0], *GATES[1:]),
            ValueError,
            "g_cmp: expected shape",
        ),
        (lambda: nsa_attention(Q, K, K, *GATES, k_cmp=CMP), ValueError, "v_cmp: expected a tensor"),
        (lambda: nsa_attention(Q, K, K, *GATES, k_swa=K), ValueError, "v_swa: expected a tensor"),
        (
            lambda: nsa_attention(Q, K, K, *GATES, k_swa=K[..., :-1], v_swa=K),
            ValueError,
            "k_swa: expected shape",
        ),
        (
            lambda: nsa_attention(Q, K, K, *GATES, k_swa=K, v_swa=K.repeat(1, 1, 2, 1)),
            ValueError,
            "v_swa: expected shape",
        ),
        (
            lambda: nsa_attention(Q, K, K, *GATES, k_swa=K[:, 1:], v_swa=K[:, 1:]),
            ValueError,
            "k_swa: expected 70 tokens or more, got 69",
        ),
        (lambda: nsa_attention(Q, K, K, *GATES, window_size=0), ValueError, "window_size: "),
        (lambda: nsa_attention(Q, K, K, *GATES, window_size=None), TypeError, "window_size: "),
        (lambda: nsa_attention(Q, K, K, *GATES, cu_seqlens=cu()), ValueError, "cu_seqlens: "),
        (
            lambda: nsa_attention(Q, K, K, *GATES, k_cmp=CMP[:, :2], v_cmp=CMP),
            ValueError,
            "k_cmp: expected shape",
        ),
        (
            lambda: nsa_attention(Q, K, K, *GATES, k_cmp=CMP[:, :, :1], v_cmp=CMP[:, :, :1]),
            ValueError,
            r"k_cmp: expected shape \[1, 3, 2, 8\], got \[1, 3, 1, 8\]",
        ),
        (
            lambda: nsa_attention(Q, K, K, *GATES, k_swa=Q, v_swa=Q),
            ValueError,
            r"k_swa: expected shape \[1, M, 2, 8\], got \[1, 70, 4, 8\]",
        ),
        (
            lambda: nsa_attention(Q, K, K, *GATES, softmax_scale=float("nan")),
            ValueError,
            "softmax_scale: expected a finite number",
        ),
        (
            lambda: nsa_attention(Q, K, K, *GATES, cu_seqlens=cu(0, 60)),
            ValueError,
            "cu_seqlens: expected non-decreasing offsets from 0 to the token count 70",
        ),
        (
            lambda: nsa_attention(Q, K, K, *GATES, cu_seqlens=cu(0, 50, 40, 70)),
            ValueError,
            "cu_seqlens: expected non-decreasing",
        ),
        (
            lambda: nsa_attention(Q, K, K, *GATES, cu_seqlens=cu(0, 70).long()),
            TypeError,
            "cu_seqlens: expected dtype torch.int32",
        ),
        (
            lambda: selected_attention(
                Q.expand(2, -1, -1, -1),
                K.expand(2, -1, -1, -1),
                K.expand(2, -1, -1, -1),
                INDICES.expand(2, -1, -1, -1),
                cu_seqlens=cu(0, 70),
            ),
            ValueError,
            "q: expected batch size 1",
        ),
        (
            lambda: selected_attention(Q, K, K, INDICES.long()),
            TypeError,
            "block_indices: expected dtype torch.int32",
        ),
        (
            lambda: selected_attention(Q, K, K, INDICES[:, :, :1]),
            ValueError,
            "block_indices: expected shape",
        ),
        (
            lambda: selected_attention(Q, K, K, INDICES + 2, check=True),
            ValueError,
            "block_indices: expected -1 or a block of the sequence, got 2",
        ),
        (
            lambda: selected_attention(Q, K, K, INDICES - 2, check=True),
            ValueError,
            "block_indices: expected -1 or a block of the sequence, got -2",
        ),
        (
            lambda: selected_attention(Q, K, K, INDICES + 1, cu_seqlens=cu(0, 10, 70), check=True),
            ValueError,
            "block_indices: expected -1 or a block of the sequence, got 1",
        ),
        (
            lambda: selected_attention(Q, K, K, INDICES.expand(-1, -1, -1, 2), check=True),
            ValueError,
            "block_indices: expected distinct blocks, got 0 twice",
        ),
        (
            lambda: selected_attention(Q, K, K, INDICES, sel_block_size=0),
            ValueError,
            "sel_block_size: expected an integer >= 1",
        ),
        (lambda: nsa_select(Q, CMP[:, :2]), ValueError, "k_cmp: expected shape"),
        (
            lambda: nsa_select(Q, CMP, lse=torch.zeros(1, 4, 69)),
            ValueError,
            "lse: expected shape",
        ),
        (
            lambda: compressed_attention(Q, CMP, CMP[..., :4]),
            ValueError,
            "v_cmp: expected shape",
        ),
        (
            lambda: nsa_compress(K, K, phi_k=PhiWeights(*(torch.zeros(4, 8) for _ in range(5)))),
            ValueError,
            "phi_k.position: expected shape",
        ),
        (
            lambda: nsa_compress(K, K, phi_v=tuple(torch.zeros(4, 8) for _ in range(5))),  # type: ignore[arg-type]
            TypeError,
            "phi_v: expected PhiWeights, got tuple",
        ),
        (
            lambda: selected_attention(
                torch.zeros(1, 4, 128, 8),
                torch.zeros(1, 4, 1, 8),
                torch.zeros(1, 4, 1, 8),
                torch.zeros(1, 4, 1, 1, dtype=torch.int32),
            ),
            NotImplementedError,
            "q: expected at most 64 query heads per KV head, got 128",
        ),
    ],
)
def test_arguments(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("group", [1, 2, 4, 7, 8, 12, 16])
@pytest.mark.parametrize("dim", [16, 64, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_config_is_a_pure_function(group: int, dim: int, dtype: torch.dtype) -> None:
    for arch in (75, 80, 90, 100, 120):
        for tokens in (1, 1000, 1 << 20):
            shape = ProblemShape(1, tokens, tokens, 4 * group, 4, dim)
            config = select_config(shape, 16, dtype, arch)
            assert config == select_config(shape, 16, dtype, arch)
            assert 1 <= config.chunk_rows <= tokens
            assert -(-tokens // config.chunk_rows) <= 16
            assert 1 <= config.index_rows <= config.chunk_rows <= config.chunk_rows_bwd <= tokens
            assert -(-tokens // config.index_rows) <= MAX_CHUNKS
            assert config.token_major == (tokens * 4 <= 2048)
            half = dtype == torch.bfloat16
            wanted = arch == 90 and half and dim in (64, 128) and tokens * 4 * group > 8192
            fused = (
                *("compressed_hopper", "compressed_bwd_hopper", "select_hopper", "selected_hopper"),
                *("combine_hopper", "selected_bwd_hopper"),
            )
            assert all((getattr(config, name) is not None) == wanted for name in fused)
            assert (config.selected_boxes is not None) == (wanted and group in (8, 16, 32, 64))


def test_hopper_kernels_serve_whole_sequences_only() -> None:
    last = ProblemShape(1, 4096, 8192, 16, 4, 128)
    whole = ProblemShape(1, 8192, 8192, 16, 4, 128)
    assert select_config(last, 16, torch.bfloat16, 90).compressed_hopper is None
    assert select_config(whole, 16, torch.bfloat16, 90).compressed_hopper is not None


@pytest.mark.parametrize("tokens", [1, 2048, 2049, 65536, 100_000, 1 << 20])
def test_segments_cover_the_queries(tokens: int) -> None:
    count, rows = query_segments(tokens, span=2048)
    assert count <= 32
    assert rows % 2048 == 0
    assert (count - 1) * rows < tokens <= count * rows


def test_an_index_of_more_chunks_than_it_has_room_for_is_refused() -> None:
    q = torch.zeros(1, 330, 1, 16)
    chosen = torch.zeros(1, 330, 1, 1, dtype=torch.int32)
    problem = SelectedProblem(q, q, q, chosen, None, 16, 1.0)
    problem = replace(problem, tuned=replace(problem.config, index_rows=10))
    with pytest.raises(ValueError, match="tuned: expected index_rows of 11 or more, got 10"):
        sort_selection(problem, problem.new_index())


def test_scores_of_all_tokens_share_one_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass that is recorded keeps what it allocates, so it must not allocate for each launch."""
    seen: list[tuple[int, ...]] = []

    def note(scores: torch.Tensor) -> None:
        seen.append((scores.data_ptr(), *scores.shape))

    monkeypatch.setattr(launch_select, "score", lambda *given: note(given[2]))
    monkeypatch.setattr(launch_select, "choose", lambda *given: note(given[1]))
    monkeypatch.setattr(launch_select, "_SCRATCH_SCORES", 1)
    monkeypatch.setattr(launch_select, "_LEAST_ROWS", 32)
    problem = CompressedProblem(Q, CMP, CMP, 70, None, NSASpec(), 1.0)
    launch_select.select(problem, torch.zeros(1, 4, 70), torch.empty(1, 70, 2, 16).int())
    assert seen == [(seen[0][0], 1, rows, 2, 64) for rows in (32, 32, 6) for _ in range(2)]
