"""Which kernels Triton compiles for a step: those that it has compiled for a step before.

Triton compiles a kernel again for an address that is no multiple of 16 bytes, and for an integer
that is 1, or a multiple of 16 where it was none.  A server compiles while it starts; whatever is
compiled later makes requests wait.
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterable
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from aot import Recorded, hopper_kernels, record
from problems import make_caches, make_problem
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction, native_specialize_impl

from sparsek_kernels.paged import InfLLM, Seer
from sparsek_kernels.paged.api import default_indexers
from sparsek_kernels.paged.batch import PagedBatch
from sparsek_kernels.paged.index.base import Indexer
from sparsek_kernels.paged.operands import PagedOperands
from sparsek_kernels.paged.plan import Segment, plan_step
from sparsek_kernels.paged.policy import Growth, SelectionPolicy, StepPolicy
from tests.kernels.launched import attend_launched
from tests.kernels.paged.gate_cases import make_gates

PROMPT = (1024, 2400)
POLICIES = {
    "topk": SelectionPolicy(num_sink=64, window_size=512, top_k=8, dense_last=64),
    "window": SelectionPolicy(num_sink=4, window_size=300),
}


def compiled_for(launched: Iterable[Recorded]) -> set[Hashable]:
    """What Triton's cache knows these launches by."""
    found = set()
    for one in launched:
        kernel = one.kernel
        if isinstance(kernel, InterpretedFunction):
            kernel = JITFunction(kernel.fn, **kernel.kwargs)
        options = {**dict(zip(kernel.arg_names, one.args, strict=False)), **one.kwargs}
        key: list[Hashable] = [one.name]
        for parameter in kernel.params:
            value = options.pop(parameter.name)
            if parameter.is_constexpr:
                key.append(value)
                continue
            specialised = native_specialize_impl(
                CUDABackend,
                value,
                parameter.is_const,
                not parameter.do_not_specialize,
                not parameter.do_not_specialize_on_alignment,
            )
            key.append(str(specialised))
        found.add((*key, *sorted(options.items())))
    return found


def kernels_of(
    operands: PagedOperands, segment: Segment, rule: StepPolicy, index: Indexer | None = None
) -> set[Hashable]:
    """Kernels of one segment on a Hopper GPU that is not there."""
    index = index or default_indexers(rule).of(segment)
    mine = operands.of_rows(segment.rows)
    return compiled_for(record(lambda: attend_launched(mine, segment, index), 90, 132))


def prefills(decodes: int, prompts: int, policy: SelectionPolicy) -> set[Hashable]:
    """Kernels of the sparse prefills of a step that has ``decodes`` before them."""
    problem = make_problem(
        [(1, 900 + index) for index in range(decodes)] + [PROMPT] * prompts,
        num_decodes=decodes,
        heads=8,
        group=4,
        dim=128,
        page_size=64,
        dtype=torch.bfloat16,
        max_seq_len=131072,
    )
    table = problem.batch.block_table
    wide = torch.zeros(len(table), 2051, dtype=torch.int32)  # rows do not end at 16 bytes
    wide[:, : table.shape[1]] = table
    batch = replace(problem.batch, block_table=wide)
    rule = StepPolicy.of(policy)
    segment = next(one for one in plan_step(batch, rule) if not one.decodes)
    return kernels_of(problem.operands(torch.empty_like(problem.q)), segment, rule)


@pytest.mark.parametrize("hopper", [False, True], ids=["portable", "hopper"])
@pytest.mark.parametrize("policy", POLICIES)
def test_prefills_behind_decodes_compile_nothing(policy: str, hopper: bool) -> None:
    rule = POLICIES[policy]
    with hopper_kernels(hopper):
        alone = {prompts: prefills(0, prompts, rule) for prompts in (1, 2, 3)}
        assert all(alone.values())
        for decodes in (1, 2, 3, 5):
            for prompts, known in alone.items():
                assert prefills(decodes, prompts, rule) <= known, (decodes, prompts)


@pytest.mark.parametrize("flash", [False, True], ids=["ours", "flash"])
@pytest.mark.parametrize(
    ("heads", "group", "dim", "longest", "most", "growth"),
    [
        (8, 4, 128, 33792, 1024, None),
        (2, 7, 64, 32768, 2048, None),
        (4, 8, 128, 1 << 20, 2048, None),
        (8, 4, 128, 131072, 2048, None),
        (8, 4, 128, 131072, 2048, Growth(end=81920)),
        (2, 7, 64, 32768, 1024, Growth()),
    ],
)
def test_a_server_compiles_before_its_first_request(
    heads: int, group: int, dim: int, longest: int, most: int, growth: Growth | None, flash: bool
) -> None:
    """Random steps launch only what the steps of the warm-up launch.

    With ``flash`` FlashAttention attends a step's dense prefills.
    """
    warmup = pytest.importorskip("sparsek_backend.vllm_backend.sparsek.warmup")
    prompts_of = SelectionPolicy(
        num_sink=64, window_size=512, top_k=86, dense_below=2048, dense_last=1024, last_part=16,
        growth=growth,
    )  # fmt: skip
    rule = StepPolicy(prompts_of, prompts_of.by_records(3072))
    caches = make_caches(1, heads, 64, dim, torch.bfloat16, "cpu", head_major=True)
    width, cpu, requests = -(-longest // 64), torch.device("cpu"), 40

    def launched(batch: PagedBatch, policy: StepPolicy = rule) -> set[Hashable]:
        q = torch.empty(sum(batch.query_lens), heads * group, dim, dtype=torch.bfloat16)
        operands = PagedOperands(q, *caches[:2], torch.empty_like(q), dim**-0.5, caches[2])
        found: set[Hashable] = set()
        for segment in plan_step(batch, policy):
            if not (flash and segment.policy.is_band and not segment.decodes):
                found |= kernels_of(operands, segment, rule)
        return found

    steps = 0
    known: set[Hashable] = set()
    for prefill, reach in warmup.prefill_policies(rule.prefill, longest, flash):
        for shape in warmup.prefill_shapes(prefill, reach, most, requests):
            known |= launched(
                warmup.made_up_prefill(*shape, width, cpu), replace(rule, prefill=prefill)
            )
            steps += 1
    for count, context in warmup.decode_shapes(rule.decode, longest, requests, heads):
        known |= launched(warmup.made_up_decodes(count, 1, context, width, cpu))
        steps += 1
    grows = growth is not None and longest > growth.start
    # each takes milliseconds of a server's start
    assert steps <= (70 if flash else 95) + 40 * grows
    chance = random.Random(0)
    for _ in range(80):
        decodes = chance.choice([0, 1, 2, 3, 5, 17, requests])
        prompts = chance.choice([0, 1, 1, 2, 4, 9]) if decodes else chance.choice([1, 1, 3])
        ends = sorted(chance.sample(range(1, most - decodes + 1), prompts))
        counts = [1] * decodes + [end - start for start, end in pairwise([0, *ends])]
        lengths = [chance.randint(count, chance.choice([most, longest])) for count in counts]
        offsets = torch.tensor([0, *accumulate(counts)], dtype=torch.int32)
        batch = PagedBatch(
            block_table=torch.zeros(len(counts), width, dtype=torch.int32),
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
            cu_seqlens_q=offsets,
            num_decodes=decodes,
            num_decode_tokens=decodes,
            decode_query_len=1,
            max_query_len=max(counts),
            max_seq_len=max(lengths),
            seq_lens_host=tuple(lengths),
            query_lens_host=tuple(counts),
            prompt_left_host=tuple(chance.choice([0, 40, 9000]) for _ in counts),
        )
        assert launched(batch) <= known, (counts, lengths)


@pytest.mark.parametrize("indexer", ["infllm", "seer"])
@pytest.mark.parametrize(("heads", "group", "most"), [(1, 8, 300), (8, 4, 256)])
def test_decodes_of_learned_indexers_find_their_kernels(
    heads: int, group: int, most: int, indexer: str
) -> None:
    warmup = pytest.importorskip("sparsek_backend.vllm_backend.sparsek.warmup")
    longest, dim, page_size = 40_000, 128, 64
    index = InfLLM() if indexer == "infllm" else Seer(make_gates(heads, group, dim))
    policy = SelectionPolicy(num_sink=64, window_size=512, top_k=64, query_tile=1)
    rule = StepPolicy(SelectionPolicy(), policy)
    k_cache, v_cache, _ = make_caches(
        1, heads, page_size, dim, torch.bfloat16, "cpu", head_major=True
    )
    summary = torch.zeros(1, heads, index.page_bytes(page_size, dim), dtype=torch.uint8)

    def kernels(count: int, context: int) -> set[Hashable]:
        width = -(-longest // page_size)
        batch = warmup.made_up_decodes(count, 1, context, width, torch.device("cpu"))
        q = torch.empty(count, heads * group, dim, dtype=torch.bfloat16)
        operands = PagedOperands(q, k_cache, v_cache, torch.empty_like(q), dim**-0.5, summary)
        [segment] = plan_step(batch, rule)
        return kernels_of(operands, segment, rule, index)

    known: set[Hashable] = set()
    for shape in warmup.decode_shapes(policy, longest, most, heads):
        known |= kernels(*shape)
    chance = random.Random(0)
    for _ in range(40):
        count = min(chance.randint(1, most), round(2 ** chance.uniform(0, 10)))
        context = round(2 ** chance.uniform(0, 15.2))
        assert kernels(count, context) <= known, (count, context)


def test_an_address_is_part_of_what_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the aligned copies of a part's tensors, kernels would be compiled again."""
    rule: Any = replace(POLICIES["topk"], dense_last=0)  # else the end of a prompt is cut off
    known = prefills(0, 1, rule)
    monkeypatch.setattr("sparsek_kernels.paged.batch._aligned", lambda x: x)
    assert len(prefills(1, 1, rule) - known) > 5
