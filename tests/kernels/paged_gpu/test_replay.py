"""A step's later layers launch what the JIT would launch for them: kernels, grids and arguments.

Without a GPU the kernels are spies that stand for compiled ones.  They note their arguments, and
the notes of a replay are compared with those of a launch through the JIT on the same tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from aot import hopper_kernels
from problems import Problem, attend_phases, make_problem
from replays import POLICIES, TOP_K, call_of, layer

from sparsek_kernels.common.recording import Tensors
from sparsek_kernels.paged import InfLLM, Seer, paged_attention, write_kv
from sparsek_kernels.paged import plan as plan_module
from sparsek_kernels.paged import scratch as scratch_module
from sparsek_kernels.paged.api import attend_segment, default_indexers
from sparsek_kernels.paged.attend import launch as attend_launch
from sparsek_kernels.paged.batch import PagedBatch
from sparsek_kernels.paged.chosen import Chosen
from sparsek_kernels.paged.index.base import Indexer, Indexers
from sparsek_kernels.paged.index.page_records import launch as choose_launch
from sparsek_kernels.paged.index.vertical_slash import VerticalSlash, block_lists
from sparsek_kernels.paged.operands import PagedOperands
from sparsek_kernels.paged.plan import Segment, plan_step
from sparsek_kernels.paged.policy import SelectionPolicy, StepPolicy
from sparsek_kernels.paged.replay import Replays
from sparsek_kernels.paged.scratch import _workspaces
from tests.kernels.launched import write_launched
from tests.kernels.paged.gate_cases import make_gates
from tests.kernels.spied import STREAM, Note, taken


def attend_through_the_jit(problem: Problem, batch: PagedBatch, policy: SelectionPolicy) -> Tensors:
    """Launch a layer's attention; its tensors, in the order of the api."""
    out = torch.empty_like(problem.q)
    sinks = torch.zeros(problem.q.shape[1]) if policy.window_size == 300 else None
    operands = problem.operands(out, sinks=sinks)
    attend_phases(operands, batch, policy)
    cache = (problem.q, problem.k_cache, problem.v_cache, out, problem.k_summary)
    return (*cache, sinks)


def described(found: list[Note], tensors: Tensors) -> list[Any]:
    """Launches with a name for every address: of a layer's tensor, of scratch, or of an order."""
    names: dict[int, Any] = {}
    for index, tensor in enumerate(tensors):
        if tensor is not None:
            names.setdefault(tensor.data_ptr(), f"tensor {index}")
    for key, scratch in _workspaces.items():
        names[scratch.data_ptr()] = key

    def named(address: int) -> Any:
        return names.setdefault(address, f"other {len(names)}")

    def plain(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return named(value.data_ptr())
        if hasattr(value, "block_shape"):
            shape = (*value.shape, *value.strides, *value.block_shape, value.padding)
            return named(value.base.data_ptr()), shape, value.layout
        if isinstance(value, int) and value > 1 << 28:  # some heaps begin as low
            return named(value)
        return value

    return [(name, grid, [plain(x) for x in args]) for name, grid, args in found]


@pytest.mark.parametrize("hopper", [False, True], ids=["portable", "hopper"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_replay_launches_what_the_jit_would(policy: str, hopper: bool, notes: list[Note]) -> None:
    first, second = layer(1), layer(2)
    rule = POLICIES[policy]
    with hopper_kernels(hopper):
        tensors = attend_through_the_jit(second, replace(first.batch, _derived={}), rule)
        wanted = described(taken(notes), tensors)
        replays: Replays = {}
        mine = (first.q, first.k_cache, first.v_cache, torch.empty_like(first.q), first.k_summary)
        mine = (*mine, *(None if x is None else x.clone() for x in tensors[5:]))
        operands = PagedOperands(*mine[:4], first.q.shape[-1] ** -0.5, mine[4], mine[5])
        call = call_of(mine, policy, replays)
        assert not call.replay()
        with call.recorded():
            attend_phases(operands, first.batch, rule)
    names = {name for name, *_ in taken(notes)}
    assert ("attend_hopper_kernel" in names) == (hopper and rule.selects_blocks)
    with mock.patch.object(
        attend_launch, "attend_segment", side_effect=AssertionError("not a replay")
    ):
        assert call_of(tensors, policy, replays).replay()
    found = described(taken(notes), tensors)
    assert [note[:2] for note in found] == [note[:2] for note in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert same_but_for_order(one[2], other[2]), one[0]
    text = str(found)
    for tensor in mine:
        assert tensor is None or str(tensor.data_ptr()) not in text


def same_but_for_order(found: list[Any], wanted: list[Any]) -> bool:
    """Equal arguments; what has no name but an order is some scratch tensor in both."""

    def kind(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(kind(x) for x in value)
        return "other" if isinstance(value, str) and value.startswith("other") else value

    return [kind(x) for x in found] == [kind(x) for x in wanted]


def test_writes_are_replayed(notes: list[Note]) -> None:
    first, second = layer(1), layer(2)

    def tensors(problem: Problem) -> Tensors:
        cache = (problem.k_cache, problem.v_cache, problem.k_summary)
        return (problem.keys[0], problem.values[0], *cache, problem.slots[0])

    write_launched(*tensors(second))
    wanted = described(taken(notes), tensors(second))
    replays: Replays = {}
    with call_of(tensors(first), 0, replays).recorded():
        write_launched(*tensors(first))
    taken(notes)
    assert call_of(tensors(second), 0, replays).replay()
    assert described(taken(notes), tensors(second)) == wanted
    assert replays[0] is not None
    assert not replays[0].kept  # nothing of the first step outlives it


def test_attention_is_replayed_where_the_choice_is_not(
    on_cpu: None, notes: list[Note], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of prompts by a list: every layer has lists of its own."""
    problems, outputs = [layer(seed) for seed in (1, 2)], []
    rule = replace(TOP_K, dense_last=0)
    monkeypatch.setattr(scratch_module, "take_turns", lambda _device: STREAM)
    segment = Segment(problems[0].batch.part(2, 4), rule)
    lists = [block_lists(torch.tensor([[entry]] * 4), rule) for entry in (3, 5)]
    noted = []
    with mock.patch.object(torch.Tensor, "is_cuda", True):
        for turn, (problem, own) in enumerate(zip(problems, lists, strict=True)):
            operands = problem.operands(torch.empty_like(problem.q))
            outputs.append(operands.out)
            with mock.patch.object(
                attend_launch,
                "attend_segment",
                side_effect=AssertionError("not a replay") if turn else None,
                wraps=attend_launch.attend_segment,
            ):
                attend_segment(operands, segment, VerticalSlash(own))
            noted.append(taken(notes))
    (first,), (again,) = noted
    assert first[:2] == again[:2]
    changed = [
        (x.data_ptr() if isinstance(x, torch.Tensor) else x, y)
        for x, y in zip(first[2], again[2], strict=True)
    ]
    changed = [(x, y) for x, y in changed if x != y]
    assert len(changed) > 3  # the output, queries, keys and values, and what is chosen
    assert (outputs[0].data_ptr(), outputs[1].data_ptr()) in changed


@pytest.fixture
def no_lasting() -> Iterator[None]:
    """Steps of other tests have left no launches."""
    plan_module._lasting_replays.cache_clear()
    yield
    plan_module._lasting_replays.cache_clear()


INDEXERS: dict[str, tuple[StepPolicy, Callable[[], Indexers]]] = {
    "records": (StepPolicy.of(TOP_K), lambda: default_indexers(StepPolicy.of(TOP_K))),
    "records, no matrix units": (
        StepPolicy.of(TOP_K),
        lambda: default_indexers(StepPolicy.of(TOP_K)),
    ),
    "window": (StepPolicy.of(POLICIES["window"]), lambda: Indexers(None, None)),
    "infllm": (
        StepPolicy(SelectionPolicy(), TOP_K.per_token(sel_block_size=64)),
        lambda: Indexers(None, InfLLM()),
    ),
    "seer": (
        StepPolicy(SelectionPolicy(), TOP_K.per_token(sel_block_size=32)),
        lambda: Indexers(None, Seer(make_gates(4, 2, 64))),
    ),
}


STEPS = [(1, 1850), (1, 700), (500, 3000)], [(1, 690), (1, 1841), (500, 2990)]
"""Two decodes and a part of a prompt, in as many pages."""


@pytest.mark.parametrize("name", INDEXERS)
def test_decodes_repeat_what_another_step_launched(
    name: str, on_cpu: None, no_lasting: None, notes: list[Note], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of other requests, of other lengths: as if it had gone through the JIT."""
    rule, make = INDEXERS[name]
    monkeypatch.setattr(scratch_module, "take_turns", lambda _device: STREAM)
    monkeypatch.setattr(choose_launch, "_fits", lambda *_: name == "records")
    shape = {"heads": 4, "dim": 64, "page_size": 64, "head_major": True, "dtype": torch.bfloat16}
    first, second = (make_problem(step, num_decodes=2, **shape) for step in STEPS)
    indexers = make()

    def launched(problem: Problem, *, through_the_jit: bool) -> list[Any]:
        """What a step's decodes launch, by the names of their tensors."""
        if through_the_jit:
            plan_module._lasting_replays.cache_clear()
        decodes = plan_step(replace(problem.batch, _derived={}), rule)[0]
        operands = problem.operands(torch.empty_like(problem.q))
        with (
            mock.patch.object(torch.Tensor, "is_cuda", True),
            mock.patch.object(
                attend_launch,
                "attend_segment",
                side_effect=None if through_the_jit else AssertionError("not a replay"),
                wraps=attend_launch.attend_segment,
            ),
        ):
            attend_segment(operands, decodes, indexers.of(decodes))
        of_step = (decodes.batch.block_table, decodes.batch.seq_lens, decodes.batch.cu_seqlens_q)
        return described(taken(notes), operands.tensors + of_step)

    wanted = launched(second, through_the_jit=True)
    launched(first, through_the_jit=True)
    found = launched(second, through_the_jit=False)
    assert (found[0][0] == "weigh_cells_kernel") == (name == "records")
    assert [note[:2] for note in found] == [note[:2] for note in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert same_but_for_order(one[2], other[2]), one[0]


class ByLength(Indexer):
    """Chooses what follows from lengths on the host; from outside the package, says no more."""

    def __init__(self) -> None:
        self.chosen: list[torch.Tensor] = []

    def select(self, operands: PagedOperands, segment: Segment) -> Chosen:
        """Return as many first blocks as the host knows tokens."""
        lengths = torch.tensor(segment.batch.seq_lens_host, dtype=torch.int32)
        shape = (-1, operands.heads, segment.policy.scored_blocks)
        self.chosen.append(lengths[:, None, None].expand(shape).contiguous())
        return Chosen(self.chosen[-1])


def test_what_an_indexer_makes_on_the_host_is_of_its_own_step(
    on_cpu: None, no_lasting: None, notes: list[Note], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And of its own layer, though decodes repeat the launches of attention."""
    rule, index = StepPolicy(SelectionPolicy(), TOP_K.per_token(sel_block_size=64)), ByLength()
    monkeypatch.setattr(scratch_module, "take_turns", lambda _device: STREAM)
    shape = {"heads": 4, "dim": 64, "page_size": 64, "head_major": True, "dtype": torch.bfloat16}
    for step in STEPS:
        problem = make_problem(step, num_decodes=2, **shape)
        decodes = plan_step(problem.batch, rule)[0]
        for _layer in range(2):
            operands = problem.operands(torch.empty_like(problem.q))
            with mock.patch.object(torch.Tensor, "is_cuda", True):
                attend_segment(operands, decodes, index)
            ((name, _grid, args),) = taken(notes)
            assert name == "attend_kernel"
            own = index.chosen[-1]
            addresses = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in args]
            assert own.data_ptr() in addresses
            assert own[:, 0, 0].tolist() == [length for _, length in step[:2]]
    assert len(index.chosen) == 4


def test_steps_keep_their_own_replays_but_for_decodes(on_cpu: None, no_lasting: None) -> None:
    rule = StepPolicy.of(TOP_K)
    one, other = layer(1).batch, layer(1).batch
    for each in plan_step(one, rule):
        shared = [each.replays is later.replays for later in plan_step(other, rule)]
        assert sum(shared) == each.decodes
    first, again = plan_step(one, rule), plan_step(one, rule)
    assert all(x.replays is y.replays for x, y in zip(first, again, strict=True))
    assert len({id(each.replays) for each in first}) == len(first) > 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("policy", [*POLICIES, "pattern"])
def test_replayed_layers_equal_launched_ones(policy: str) -> None:
    base = POLICIES.get(policy, TOP_K)
    rule = replace(base, dense_last=16 if base.top_k else 0)
    indexers = default_indexers(StepPolicy.of(rule))
    if policy == "pattern":
        lists = block_lists(torch.tensor([[3, -9]] * 4), rule).cuda()
        indexers = Indexers(VerticalSlash(lists), indexers.decode)
    first, second = layer(1, device="cuda"), layer(2, device="cuda")
    for keys, values, slots in zip(second.keys, second.values, second.slots, strict=True):
        cache = (second.k_cache, second.v_cache, second.k_summary)
        write_kv(-keys, values.flip(0), *cache, slots)

    def attend(problem: Problem, batch: PagedBatch) -> torch.Tensor:
        out = torch.full_like(problem.q, float("nan"))
        cache = (problem.k_cache, problem.v_cache)
        options: dict[str, Any] = {"k_summary": problem.k_summary, "indexers": indexers}
        return paged_attention(problem.q, *cache, batch, rule, out=out, **options)

    wanted = attend(second, replace(second.batch, _derived={}))
    assert wanted.isfinite().all()
    attend(first, first.batch)
    with mock.patch.object(
        attend_launch, "attend_segment", side_effect=AssertionError("not a replay")
    ):
        found = attend(second, first.batch)
    assert torch.equal(found, wanted)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("policy", POLICIES)
def test_a_step_that_repeats_another_equals_a_launched_one(policy: str, no_lasting: None) -> None:
    shape = {"heads": 4, "dim": 64, "page_size": 64, "head_major": True, "dtype": torch.bfloat16}
    steps = [make_problem(step, num_decodes=2, device="cuda", **shape) for step in STEPS]
    rule = POLICIES[policy]
    for step in steps:
        cache = (step.k_cache, step.v_cache, step.k_summary)
        for keys, values, slots in zip(step.keys, step.values, step.slots, strict=True):
            write_kv(keys, values, *cache, slots)

    def attend(problem: Problem) -> torch.Tensor:
        cache = (problem.k_cache, problem.v_cache, replace(problem.batch, _derived={}))
        return paged_attention(problem.q, *cache, rule, k_summary=problem.k_summary)

    wanted = attend(steps[1])
    assert wanted.isfinite().all()
    plan_module._lasting_replays.cache_clear()
    attend(steps[0])
    decodes = plan_step(replace(steps[1].batch, _derived={}), StepPolicy.of(rule))[0]
    assert len(decodes.replays) == 1
    assert torch.equal(attend(steps[1]), wanted)
    assert len(decodes.replays) == 1
