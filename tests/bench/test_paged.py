"""Serving ops of `sparsek bench kernels`: every provider that runs on a CPU passes its gate."""

from __future__ import annotations

import pytest
import torch

from sparsek_backend.bench.ops import get_op
from sparsek_backend.bench.ops.paged_inputs import make_inputs
from sparsek_backend.bench.registry import OURS, Case, Param, Unavailable
from sparsek_backend.bench.spec import parse_spec

SMALL: dict[str, Param] = {
    **get_op("paged_decode").defaults,
    **{"num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "dtype": "float32", "page_size": 32},
    **{"num_sink": 16, "window_size": 64, "top_k": 2, "sel_block_size": 32},
}
CPU = torch.device("cpu")


@pytest.mark.parametrize("max_len", [0, 4096])
@pytest.mark.parametrize("spec", ["1q1s1k", "2q1s1k", "2q1s64", "3q2s300"])
def test_decode_gates(spec: str, max_len: int) -> None:
    case = Case("t", parse_spec(spec), {**SMALL, "max_len": max_len})
    passed = set()
    for provider in get_op("paged_decode").build(case, CPU):
        try:
            call = provider.prepare()
        except Unavailable:
            continue
        verdict = provider.gate(call())
        assert verdict.passed, (provider.name, verdict.detail)
        passed.add(provider.name)
    assert {OURS, "sparsek_dense"} <= passed


def test_max_len_is_the_longest_context_that_a_launch_must_serve() -> None:
    inputs = make_inputs(Case("t", parse_spec("2q1s100"), {**SMALL, "max_len": 4096}), CPU)
    batch = inputs.batch((1, 1), (100, 100), 2)
    assert (batch.max_seq_len, batch.seq_lens.tolist()) == (4096, [100, 100])
    assert batch.block_table.shape == (2, 4096 // 32)
    assert len(inputs.k_cache) == 2 * 4  # pages of what is there alone


def test_an_unknown_score_kind_is_refused() -> None:
    case = Case("t", parse_spec("1q1s1k"), {**SMALL, "score_kind": "mean"})
    with pytest.raises(ValueError, match="score_kind: expected 'cell_mean' or 'min_max'"):
        make_inputs(case, CPU)
