"""Contracts of every operator: schema, fake implementation, autograd, tracing."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from sparsek_kernels import nsa_attention, nsa_compress, selected_attention
from sparsek_kernels.common import tape
from sparsek_kernels.nsa import api, launches, ops, torch_path
from sparsek_kernels.nsa.compress import launch_rotary, rotary
from sparsek_kernels.nsa.selected.problem import SelectedProblem
from tests.devices import spy_on_guards
from tests.kernels.nsa.conftest import make_problem

OPERATORS = {name: x for name, x in vars(ops).items() if isinstance(x, type(ops.mean_pool))}
SPEC = [8, 4, 8, 5, 1, 2]
TOKENS, SCALE = 33, 0.3


def arguments(cu: torch.Tensor | None, dtype: torch.dtype) -> dict[str, tuple[Any, ...]]:
    """A call of each operator; what is differentiable requires gradients."""
    case = make_problem(TOKENS, dtype=dtype)
    q, k, v, dout = case.q, case.k, case.v, case.dout
    k_cmp, v_cmp = ops.mean_pool([k, v], cu, SPEC)
    cmp = (TOKENS, cu, SPEC, SCALE)
    out, lse = ops.compressed_fwd(q, k_cmp, v_cmp, *cmp)
    dlse = torch.randn_like(lse)
    indices = ops.select(q, k_cmp, lse, *cmp)
    slc = (indices, cu, 8, SCALE)
    out_slc, lse_slc, _ = ops.selected_fwd(q, k, v, *slc)
    outs, lses = [out, out_slc, out], [lse, lse_slc, lse]
    keys, values = [k_cmp, k, k], [v_cmp, v, v]

    def leaf(x: torch.Tensor) -> torch.Tensor:
        return x.detach().requires_grad_()

    def leaves(*xs: torch.Tensor) -> list[torch.Tensor]:
        return [leaf(x) for x in xs]

    rest = (indices, TOKENS, cu, SPEC, 20, SCALE)
    index = indices.new_empty(0)  # torch operations have none
    return {
        "mean_pool": (leaves(k, v), cu, SPEC),
        "mean_pool_bwd": ([k_cmp, v_cmp], TOKENS, cu, SPEC),
        "compressed_fwd": (*leaves(q, k_cmp, v_cmp), *cmp),
        "compressed_bwd": (dout, dlse, q, k_cmp, v_cmp, out, lse, *cmp),
        "compressed_select": (q, k_cmp, v_cmp, *cmp),
        "select": (q, k_cmp, lse, *cmp),
        "selected_fwd": (*leaves(q, k, v), *slc),
        "selected_bwd": (dout, None, q, k, v, out_slc, lse_slc, *slc, index),
        "selected_gated": (out, out, case.gates, q, k, v, *slc),
        "branches": (
            *(outs[::2], lses[::2], leaves(*case.gates), leaf(q), leaves(*keys), leaves(*values)),
            *rest,
        ),
        "branches_bwd": (dout, index, outs, lses, case.gates, q, keys, values, *rest),
    }


@pytest.mark.parametrize(
    ("offsets", "dtype"),
    [(None, torch.float64), ([0, 9, TOKENS], torch.bfloat16)],
    ids=["fixed-fp64", "packed-bf16"],
)
@pytest.mark.parametrize("name", OPERATORS)
def test_operators_pass_opcheck(name: str, offsets: list[int] | None, dtype: torch.dtype) -> None:
    cu = None if offsets is None else torch.tensor(offsets, dtype=torch.int32)
    torch.library.opcheck(OPERATORS[name], arguments(cu, dtype)[name])


@pytest.mark.parametrize("offsets", [None, [0, 9, TOKENS]], ids=["fixed", "packed"])
@pytest.mark.parametrize("name", ["branches", "selected_fwd"])
def test_the_index_of_kernels_is_as_long_as_traced(
    name: str, offsets: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    cu = None if offsets is None else torch.tensor(offsets, dtype=torch.int32)
    given = arguments(cu, torch.float32)
    monkeypatch.setattr(ops, "_passes", lambda x: torch_path)
    monkeypatch.setattr(ops, "runs_kernels", lambda x: True)
    assert len(OPERATORS[name](*given[name])[-1]) > given["selected_fwd"][3].numel()
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(OPERATORS[name], given[name], test_utils=tests)


@pytest.mark.parametrize("compiled", [False, True])
def test_selected_attention_keeps_the_index_for_its_gradients(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = []

    def forward(problem: SelectedProblem, *results: torch.Tensor) -> None:
        torch_path.selected_forward(problem, *results)
        assert problem.index is not None
        problem.index.copy_(torch.arange(problem.index.numel()))

    def backward(problem: SelectedProblem, *given: Any) -> Any:
        read.append(problem.index)
        return torch_path.selected_backward(problem, *given)

    case = make_problem(TOKENS, dtype=torch.float32)
    q, k, v = (x.detach().requires_grad_() for x in (case.q, case.k, case.v))
    passes = SimpleNamespace(selected_forward=forward, selected_backward=backward)
    monkeypatch.setattr(ops, "_passes", lambda x: passes)
    monkeypatch.setattr(ops, "runs_kernels", lambda x: True)
    attend = (
        torch.compile(selected_attention, backend="aot_eager") if compiled else selected_attention
    )
    indices = torch.arange(5, dtype=torch.int32).expand(*q.shape[:2], k.shape[2], 5)
    found = torch.autograd.grad(attend(q, k, v, indices, sel_block_size=8), (q, k, v), case.dout)
    (index,) = read
    assert torch.equal(index, torch.arange(index.numel(), dtype=torch.int32))
    monkeypatch.undo()
    wanted = selected_attention(q, k, v, indices, sel_block_size=8)
    torch.testing.assert_close(found, torch.autograd.grad(wanted, (q, k, v), case.dout))


@pytest.mark.parametrize("name", OPERATORS)
def test_results_lie_as_traced_whatever_the_strides(name: str) -> None:
    def heads_first(x: torch.Tensor) -> torch.Tensor:
        moved = x.detach().transpose(1, 2).contiguous() if x.dim() == 4 else x.detach()
        return (moved.transpose(1, 2) if x.dim() == 4 else moved).requires_grad_(x.requires_grad)

    given = arguments(None, torch.float32)[name]
    torch.library.opcheck(OPERATORS[name], tree_map_only(torch.Tensor, heads_first, given))


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_run_on_the_device_of_their_tensors(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = arguments(None, torch.float32)[name]
    asked = spy_on_guards(monkeypatch, ops, "_passes")
    OPERATORS[name](*given)
    assert set(asked) == {True}


@pytest.mark.parametrize("with_dlse", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["compressed_bwd", "selected_bwd"])
def test_backward_operators_take_an_absent_gradient(
    name: str, dtype: torch.dtype, with_dlse: bool
) -> None:
    dout, _, q, k, v, out, lse, *rest = arguments(None, dtype)[name]
    dlse = torch.ones_like(lse) if with_dlse else None
    torch.library.opcheck(OPERATORS[name], (dout, dlse, q, k, v, out, lse, *rest))


def test_launches_and_torch_operations_have_the_same_signatures() -> None:
    names = [name for name, x in vars(launches).items() if inspect.isfunction(x)]
    assert len(names) == 11
    for name in names:
        launch, plain = (
            inspect.signature(getattr(x, name)).parameters for x in (launches, torch_path)
        )
        assert launch == plain, name


class Wrapped(torch.Tensor):
    """A subclass, as of what a collective has yet to fill: its address may be none."""


@pytest.mark.parametrize("name", ["q", "k", "v", "g_cmp", "g_slc", "g_swa", "cu_seqlens"])
def test_subclasses_go_through_the_dispatcher(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_problem(TOKENS, dtype=torch.float32)
    given: dict[str, Any] = dict(
        zip(("q", "k", "v", "g_cmp", "g_slc", "g_swa"), case.leaves(), strict=True)
    )
    given["cu_seqlens"] = torch.tensor([0, 9, TOKENS], dtype=torch.int32)
    given[name] = given[name].as_subclass(Wrapped)
    for each in ("compressed_select_directly", "branches_directly", "selected_gated_directly"):
        monkeypatch.setattr(ops, each, None)
    monkeypatch.setattr(ops, "_branches_bwd", None)
    if name in ("k", "v", "cu_seqlens"):
        monkeypatch.setattr(ops, "mean_pool_directly", None)
    nsa_attention(**given).sum().backward()
    with torch.no_grad():
        nsa_attention(**given)
    nsa_compress(given["k"], given["v"], cu_seqlens=given["cu_seqlens"])


def test_a_gradient_that_is_watched_is_rotated_by_torch_operations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    signs = []
    monkeypatch.setattr(rotary, "runs_kernels", lambda _: True)
    monkeypatch.setattr(tape, "replayed", lambda _tensors, _options, compute: compute())
    monkeypatch.setattr(launch_rotary, "rotate_into", lambda *given: signs.append(given[4]))
    x, dout = torch.randn(2, 1, 5, 2, 8)
    positions, frequencies = torch.arange(5), rotary.rotary_frequencies(8, 10000.0)
    out = rotary.rotate(x.requires_grad_(), positions, frequencies)
    with FlopCounterMode(display=False):
        (grad,) = torch.autograd.grad(out, x, dout)
        wanted = rotary.rotate(dout, -positions, frequencies)
    assert signs == [1]
    torch.testing.assert_close(grad, wanted)


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("function", [nsa_attention, nsa_compress])
def test_second_derivatives_are_refused(
    function: Any, plain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "plain", lambda *_: plain)
    given = make_problem(TOKENS, dtype=torch.float32).leaves()
    given = given if function is nsa_attention else given[1:3]

    def cubes(*leaves: torch.Tensor) -> torch.Tensor:
        found = function(*leaves)
        return (found if function is nsa_attention else found[0]).pow(3).sum()

    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        torch.autograd.functional.hvp(cubes, tuple(given), tuple(given))


def test_shapes_follow_without_data() -> None:
    leaves = [x.to("meta") for x in make_problem(TOKENS, dtype=torch.float32).leaves()]
    k_cmp, v_cmp = nsa_compress(*leaves[1:3])
    out = nsa_attention(*leaves, k_cmp=k_cmp, v_cmp=v_cmp)
    grads = torch.autograd.grad(out.sum(), leaves)
    assert [x.shape for x in (out, *grads)] == [x.shape for x in (leaves[0], *leaves)]
