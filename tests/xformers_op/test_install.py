"""install() and uninstall(): first choice, exact restoration, threads."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.xformers_op.cases import ab, assert_close, fmha, inputs, reference

from sparsek_backend.xformers_op import (  # isort: skip
    BwOp,
    FwOp,
    SinkWindowMask,
    compat,
    install,
    installed,
    uninstall,
)

NAMES = ("_dispatch_fw_priority_list", "_dispatch_bw")


def _dispatch() -> list[object]:
    return [
        getattr(compat.dispatch_module(), NAMES[0]),
        getattr(compat.fmha_module(), NAMES[1]),
    ]


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = _dispatch()
    yield
    uninstall()
    assert [id(x) for x in _dispatch()] == [id(x) for x in before]


def _first(inp: Any, needs_gradient: bool = True) -> Any:
    return compat.dispatch_module()._dispatch_fw_priority_list(inp, needs_gradient)[0]


def test_ours_comes_first_and_leaves_without_a_trace() -> None:
    before = _dispatch()
    q, k, v = inputs(33, 33)
    listed = list(compat.dispatch_module()._dispatch_fw_priority_list(fmha.Inputs(q, k, v), True))
    install()
    assert installed()
    assert _first(fmha.Inputs(q, k, v, SinkWindowMask(1, 4))) is FwOp
    found = compat.dispatch_module()._dispatch_fw_priority_list(fmha.Inputs(q, k, v), True)
    assert list(found) == [FwOp, *listed]
    uninstall()
    assert not installed()
    assert all(a is b for a, b in zip(_dispatch(), before, strict=True))
    assert (
        list(compat.dispatch_module()._dispatch_fw_priority_list(fmha.Inputs(q, k, v), True))
        == listed
    )


def test_calls_without_op_run_on_our_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (x.requires_grad_() for x in inputs(33, 33))
    calls = []
    monkeypatch.setattr(FwOp, "apply", _spy(calls, "forward", FwOp.apply))
    monkeypatch.setattr(BwOp, "apply", _spy(calls, "backward", BwOp.apply))
    with install():
        out = fmha.memory_efficient_attention(q, k, v, ab.LowerTriangularMask())
        out.sum().backward()
    assert calls == ["forward", "backward"]
    assert_close("out", out, reference(q, k, v, ab.LowerTriangularMask())[0], 2e-5)


def _spy(calls: list[str], name: str, real: Any) -> Any:
    def spy(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return real(*args, **kwargs)

    return spy


def test_low_level_backward_dispatches_to_ours() -> None:
    q, k, v = inputs(33, 33)
    with install():
        out, lse = fmha.memory_efficient_attention_forward_requires_grad(q, k, v)
        dq, dk, dv = fmha.memory_efficient_attention_backward(out, out, lse, q, k, v)
    assert dq.shape == q.shape
    assert dk.shape == dv.shape == k.shape


def test_unsupported_inputs_go_where_they_went() -> None:
    q, k, v = inputs(33, 33)
    bias = ab.LocalAttentionFromBottomRightMask(3, 2)
    messages = []
    for step in ("before", "installed"):
        if step == "installed":
            install()
        with pytest.raises(NotImplementedError) as error:
            fmha.memory_efficient_attention(q, k, v, bias)
        messages.append(str(error.value))
    assert "window_right=2" not in messages[0]
    assert "window_right=2" in messages[1]
    # what xFormers' own operators say is all still there
    own = [line for line in messages[0].splitlines() if line.startswith("`")]
    assert own
    assert all(line in messages[1] for line in own)
    found = compat.dispatch_module()._dispatch_fw_priority_list(fmha.Inputs(q, k, v, bias), True)
    assert found[0] is not FwOp


def test_tensor_biases_prefer_xformers_own_operators() -> None:
    q, k, v = inputs(33, 33)
    inp = fmha.Inputs(q, k, v, torch.zeros(1, 3, 33, 33))
    with install():
        found = compat.dispatch_module()._dispatch_fw_priority_list(inp, True)
        assert found[0] is not FwOp
        assert found[-1] is FwOp
        # nothing else takes CPU tensors
        out = fmha.memory_efficient_attention(q, k, v, inp.attn_bias)
    assert_close("out", out, reference(q, k, v, None)[0], 2e-5)


def test_named_operators_are_left_alone() -> None:
    q, k, v = inputs(33, 33)
    with install(), pytest.raises(ValueError, match="does not support"):
        fmha.memory_efficient_attention(q, k, v, op=(fmha.flash.FwOp, None))


def test_contexts_nest_and_do_not_end_a_lasting_installation() -> None:
    with install():
        with install():
            assert installed()
        assert installed()
    assert not installed()
    install()
    install()
    with install():
        pass
    assert installed()
    uninstall()
    assert not installed()
    uninstall()


def test_blocks_of_one_installation_nest() -> None:
    handle = install()
    with handle:
        with handle:
            pass
        assert installed()
        with pytest.raises(RuntimeError, match="inside"), handle:
            raise RuntimeError("inside")
        assert installed()
    assert not installed()
    with handle:
        assert installed()
        uninstall()
        with handle:
            assert installed()
    assert not installed()


def test_a_context_ends_with_an_error() -> None:
    with pytest.raises(RuntimeError, match="inside"), install():
        raise RuntimeError("inside")
    assert not installed()


def test_a_later_wrapper_of_somebody_else_survives(caplog: pytest.LogCaptureFixture) -> None:
    module = compat.dispatch_module()
    original = module._dispatch_fw_priority_list
    install()
    ours = module._dispatch_fw_priority_list

    def theirs(inp: Any, needs_gradient: bool) -> Any:
        return ours(inp, needs_gradient)

    module._dispatch_fw_priority_list = theirs
    try:
        uninstall()
        assert module._dispatch_fw_priority_list is theirs
        assert "steps aside" in caplog.text
        q, k, v = inputs(33, 33)
        assert FwOp not in theirs(fmha.Inputs(q, k, v), True)
    finally:
        module._dispatch_fw_priority_list = original


def test_threads_install_and_use_at_once() -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    errors: list[BaseException] = []
    q, k, v = inputs(17, 17)
    wanted = reference(q, k, v, None)[0]

    def work() -> None:
        try:
            for _ in range(20):
                with install():
                    out = fmha.memory_efficient_attention(q, k, v)
                    assert_close("out", out, wanted, 2e-5)
        except BaseException as error:  # reported by the main thread
            errors.append(error)

    try:
        threads = [threading.Thread(target=work) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not errors, errors
    assert not installed()
