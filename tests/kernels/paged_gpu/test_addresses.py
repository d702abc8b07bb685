"""Kernels touch nothing but their arguments, where these end with what they are read for.

The last request has the most keys and the fewest tokens, the block table has no spare column, and
scratch is as large as a launcher asks for.  On a GPU ``sanitize.py`` runs this too.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

import pytest
import torch
import triton
import triton.language as tl
from infllm_check import part_of, rotation
from problems import attend_phases, make_problem

from sparsek_kernels.paged import scratch, write_kv
from sparsek_kernels.paged.index.base import Indexers
from sparsek_kernels.paged.index.infllm import InfLLM
from sparsek_kernels.paged.index.infllm import launch as infllm_launch
from sparsek_kernels.paged.index.page_records import launch_sm80
from sparsek_kernels.paged.index.seer import Seer
from sparsek_kernels.paged.index.seer import launch as seer_launch
from sparsek_kernels.paged.index.seer.gates import Gates
from sparsek_kernels.paged.policy import SelectionPolicy, StepPolicy
from tests.kernels.addresses import within_arguments
from tests.kernels.launched import write_launched
from tests.kernels.paged.gate_cases import make_gates

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DECODES = [(4, 400), (2, 64), (3, 450), (1, 701)]
PROMPTS = [(5, 203), (20, 690)]
TILES = SelectionPolicy(num_sink=64, window_size=65, top_k=2)
TOKENS = replace(TILES, query_tile=1)


@dataclass(frozen=True)
class Kind:
    """A rule, who chooses by it, and what is launched for decodes and for prompts."""

    policy: SelectionPolicy
    decodes: str
    prompts: str
    indexer: str = ""


KINDS = {
    "dense": Kind(SelectionPolicy(), "attend_kernel", "attend_kernel"),
    "window": Kind(SelectionPolicy(num_sink=3, window_size=50), "attend_kernel", "attend_kernel"),
    "records-and-tiles": Kind(TILES, "score_records_kernel", "pool_means_kernel"),
    "infllm": Kind(TOKENS, *["average_logits_kernel"] * 2, "infllm"),
    "infllm-blocks-of-128": Kind(
        replace(TOKENS, sel_block_size=128, num_sink=128, window_size=1),
        *["average_logits_kernel"] * 2,
        "infllm",
    ),
    "seer": Kind(TOKENS, *["gate_logits_kernel"] * 2, "seer"),
}


def scratch_as_asked(
    device: torch.device, _name: str, numel: int, dtype: torch.dtype
) -> torch.Tensor:
    """In place of ``workspace``, which rounds sizes up: numbers are NaN, tickets zero."""
    value = float("nan") if dtype.is_floating_point else 0
    return torch.full((numel,), value, device=device, dtype=dtype)


@pytest.fixture(autouse=True)
def exact_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launch_sm80.workspace is scratch.workspace  # all that take scratch are imported
    for name, module in list(sys.modules.items()):
        if name.startswith("sparsek_kernels") and hasattr(module, "workspace"):
            monkeypatch.setattr(module, "workspace", scratch_as_asked)


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {"dim": 40}),
        pytest.param(torch.bfloat16, {"dim": 64, "heads": 1, "group": 4}, marks=pytest.mark.gpu),
    ],
    ids=["portable", "matrix-units"],
)
@pytest.mark.parametrize("decodes", [True, False], ids=["decodes", "prompts"])
@pytest.mark.parametrize("name", KINDS)
def test_kernels_stay_within_their_arguments(
    name: str, decodes: bool, dtype: torch.dtype, options: dict[str, int]
) -> None:
    kind = KINDS[name]
    problem = make_problem(
        DECODES if decodes else PROMPTS,
        num_decodes=len(DECODES) * decodes,
        decode_query_len=4 + (dtype == torch.float32),
        dtype=dtype,
        device=DEVICE,
        spare_columns=0,
        **options,
    )
    heads, dim = problem.k_cache.shape[1], problem.q.shape[2]
    gates = make_gates(heads, problem.q.shape[1] // heads, dim)
    gates = Gates(*(None if x is None else x.to(DEVICE) for x in gates.tensors))
    indexers, policy = None, kind.policy
    lengths = [len(keys) for keys in problem.keys]
    if kind.indexer:
        indexers = Indexers(*[InfLLM() if kind.indexer == "infllm" else Seer(gates)] * 2)
        policy = StepPolicy(kind.policy, kind.policy)
        turns = rotation(max(lengths), dim, DEVICE)
        problem = replace(problem, batch=replace(problem.batch, rotation=turns, _derived={}))
    whole = part_of(problem.batch, [0] * len(lengths), lengths, DEVICE)
    caches = problem.k_cache, problem.v_cache, None if kind.indexer else problem.k_summary
    write = write_kv if kind.indexer else write_launched  # in the interpreter, the longer half
    out = torch.full_like(problem.q, float("nan"))
    with within_arguments() as launched:
        for rows in zip(problem.keys, problem.values, problem.slots, strict=True):
            write(*rows[:2], *caches, rows[2])
        if kind.indexer == "infllm":
            infllm_launch.write_means(problem.k_cache, problem.k_summary, whole)
        elif kind.indexer:
            size = kind.policy.sel_block_size
            seer_launch.write_gate_keys(problem.k_cache, problem.k_summary, whole, size, gates)
        attend_phases(problem.operands(out), problem.batch, policy, indexers)
    assert out.isfinite().all()
    if DEVICE == "cpu":
        chooses = kind.decodes if decodes else kind.prompts
        assert launched >= {"attend_kernel", chooses}


@triton.jit
def copy_kernel(out_ptr, x_ptr, size, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, tl.load(x_ptr + offs, mask=offs < size), mask=offs < 16)


@pytest.mark.skipif(DEVICE == "cuda", reason="the sanitizer looks for these on a GPU")
@pytest.mark.parametrize(("rows", "size", "wrong"), [(16, 16, 0), (15, 16, 1), (16, 17, 1)])
def test_addresses_outside_are_found(rows: int, size: int, wrong: int) -> None:
    """Also in the storage, behind what a view shows of it."""
    x, out = torch.zeros(64)[:16], torch.zeros(64)[:rows]
    with within_arguments() as launched:
        if not wrong:
            copy_kernel[(1,)](out, x, size, BLOCK=32)
        else:
            with pytest.raises(Exception, match="1 addresses outside of its tensors"):
                copy_kernel[(1,)](out, x, size, BLOCK=32)
    assert launched == {"copy_kernel"}
