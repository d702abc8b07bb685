"""The public function on CPU: values, gradients, operators, compilation and every refusal."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsek_kernels import sink_flash_attention
from tests import processes
from tests.kernels.sink_window.reference import sink_flash_attention_reference

MASKS = [
    {},
    {"causal": False},
    {"num_sink": 3, "window_size": 5},
    {"window_size": 1},
    {"num_sink": 100, "window_size": 7},
]


def tensors(n: int = 17, m: int = 17, heads: int = 6, kv_heads: int = 2, dim: int = 8,
            dtype: torch.dtype = torch.float64, batch: int = 2) -> list[torch.Tensor]:  # fmt: skip
    torch.manual_seed(0)
    shapes = ((batch, n, heads, dim), (batch, m, kv_heads, dim), (batch, m, kv_heads, dim))
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize(("n", "m"), [(17, 17), (9, 21), (21, 9), (1, 30)])
@pytest.mark.parametrize("with_sinks", [False, True], ids=["plain", "sinks"])
def test_matches_the_oracle(mask: dict[str, Any], n: int, m: int, with_sinks: bool) -> None:
    q, k, v = tensors(n, m)
    sinks = torch.randn(6, dtype=torch.float64, requires_grad=True) if with_sinks else None
    out, lse = sink_flash_attention(q, k, v, sinks=sinks, return_lse=True, **mask)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    dlse = dlse.masked_fill(lse == float("-inf"), 0.0)
    leaves = [q, k, v] if sinks is None else [q, k, v, sinks]
    found = torch.autograd.grad((out, lse), leaves, (dout, dlse))
    want = sink_flash_attention_reference(q, k, v, sinks=sinks, dout=dout, dlse=dlse, **mask)
    torch.testing.assert_close((out, lse, *found), want)


def test_sinks_without_a_window_are_warned_of() -> None:
    q, k, v = tensors(9, 9)
    with pytest.warns(UserWarning, match="num_sink: expected 0 without window_size, got 4") as seen:
        out = sink_flash_attention(q, k, v, num_sink=4)
    assert seen[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(out, sink_flash_attention(q, k, v))
        sink_flash_attention(q, k, v, num_sink=4, window_size=2)


def test_a_head_without_a_sink_has_no_gradient_where_rows_see_no_key() -> None:
    q, k, v = tensors(21, 9)
    sinks = torch.randn(6, dtype=torch.float64, requires_grad=True)
    with torch.no_grad():
        sinks[1] = float("-inf")
    wanted = torch.autograd.grad(sink_flash_attention(q, k, v, sinks=sinks).sum(), sinks)[0]
    assert wanted[1] == 0.0
    assert wanted.isfinite().all()


@settings(max_examples=40, deadline=None)
@given(
    lens=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=5),
    num_sink=st.integers(0, 12),
    window=st.integers(1, 50),
    group=st.sampled_from([1, 3, 4]),
    with_sinks=st.booleans(),
)
def test_packed_sequences_match_the_oracle(
    lens: list[tuple[int, int]], num_sink: int, window: int, group: int, with_sinks: bool
) -> None:
    cu_q, cu_k = (
        torch.tensor([0, *part], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        for part in zip(*lens, strict=True)
    )
    q, k, v = tensors(int(cu_q[-1]), int(cu_k[-1]), 2 * group, 2, batch=1)
    sinks = torch.randn(2 * group, dtype=torch.float64, requires_grad=True) if with_sinks else None
    options = {"num_sink": num_sink, "window_size": window, "sinks": sinks}
    out = sink_flash_attention(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **options)
    assert isinstance(out, torch.Tensor)
    dout = torch.randn_like(out)
    leaves = [q, k, v] if sinks is None else [q, k, v, sinks]
    found = torch.autograd.grad(out, leaves, dout)
    want = sink_flash_attention_reference(
        q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, dout=dout, **options
    )
    torch.testing.assert_close((out, *found), (want[0], *want[2:]))


def test_packing_does_not_change_a_sequence() -> None:
    q, k, v = tensors(30, 30, batch=1)
    cu = torch.tensor([0, 12, 30], dtype=torch.int32)
    options = {"num_sink": 2, "window_size": 4}
    packed = sink_flash_attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, **options)
    alone = sink_flash_attention(q[:, 12:], k[:, 12:], v[:, 12:], **options)
    torch.testing.assert_close(packed[:, 12:], alone)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_half_precision_stays_within_twice_the_error_of_torch(dtype: torch.dtype) -> None:
    q, k, v = tensors(64, 64, dtype=dtype)
    out = sink_flash_attention(q, k, v, num_sink=4, window_size=9)
    exact, _ = sink_flash_attention_reference(q, k, v, num_sink=4, window_size=9)
    plain, _ = sink_flash_attention_reference(q, k, v, num_sink=4, window_size=9, dtype=dtype)
    assert out.dtype == dtype
    limit = 2 * (plain.double() - exact).abs().max() + 1e-6
    assert (out.double() - exact).abs().max() <= limit


def test_long_sequence_uses_memory_of_the_window_only() -> None:
    q, k, v = (torch.randn(1, 20000, 1, 8) for _ in range(3))
    out = sink_flash_attention(q, k, v, num_sink=4, window_size=64)
    tail, _ = sink_flash_attention_reference(
        q[:, -50:], k, v, num_sink=4, window_size=64, dtype=torch.float32
    )
    torch.testing.assert_close(out[:, -50:], tail)


def test_gradcheck() -> None:
    q, k, v = tensors(7, 9, 4, 2, 3, batch=1)
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)

    def run(*args: torch.Tensor) -> Any:
        return sink_flash_attention(
            args[0], args[1], args[2], sinks=args[3], num_sink=2, window_size=3, return_lse=True
        )

    assert torch.autograd.gradcheck(run, (q, k, v, sinks))


def test_operators_pass_opcheck() -> None:
    q, k, v = tensors(9, 12)
    sinks = torch.randn(6, dtype=torch.float64, requires_grad=True)
    torch.library.opcheck(
        torch.ops.sparsek.sink_flash_fwd.default, (q, k, v, sinks, None, None, 2, 4, True, 0.3)
    )
    out = torch.empty_like(q).detach()
    plain = [x.detach() for x in (q, k, v)]
    torch.library.opcheck(
        torch.ops.sparsek.sink_flash_fwd_out.default,
        (out, *plain, None, None, None, 2, 4, True, 0.3),
    )
    for learned in (None, sinks.detach()):
        out, lse = torch.ops.sparsek.sink_flash_fwd(*plain, learned, None, None, 2, 4, True, 0.3)
        torch.library.opcheck(
            torch.ops.sparsek.sink_flash_bwd.default,
            (out, None, *plain, out, lse, learned, None, None, 2, 4, True, 0.3),
        )


def test_operators_on_packed_sequences_pass_opcheck() -> None:
    q, k, v = (x.detach() for x in tensors(9, 12, dtype=torch.bfloat16, batch=1))
    packed = (None, offsets(0, 4, 9), offsets(0, 4, 12), 2, 4, True, 0.3)
    torch.library.opcheck(torch.ops.sparsek.sink_flash_fwd.default, (q, k, v, *packed))
    out, lse = torch.ops.sparsek.sink_flash_fwd(q, k, v, *packed)
    torch.library.opcheck(
        torch.ops.sparsek.sink_flash_bwd.default, (out, lse, q, k, v, out, lse, *packed)
    )
    slots = torch.tensor([1, -1, -1, 0, *[-1] * 7, 2], dtype=torch.int32)
    torch.library.opcheck(
        torch.ops.sparsek.sink_flash_bwd_terms.default,
        (slots, 3, out, lse, q, k, v, out, lse, *packed),
    )


@pytest.mark.parametrize("learned", [False, True])
def test_terms_of_sums_are_not_rounded(learned: bool) -> None:
    q, k, v = (x.detach() for x in tensors(dtype=torch.bfloat16))
    rest = (torch.randn(6) if learned else None, None, None, 2, 4, True, 0.3)
    out, lse = torch.ops.sparsek.sink_flash_fwd(q, k, v, *rest)
    inputs = (torch.randn_like(out), None, q, k, v, out, lse, *rest)
    slots = torch.full((17,), -1, dtype=torch.int32)
    keys = torch.tensor([16, 3, 4, 0])
    slots[keys] = torch.arange(4, dtype=torch.int32)
    *found, terms = torch.ops.sparsek.sink_flash_bwd_terms(slots, 4, *inputs)
    want = torch.ops.sparsek.sink_flash_bwd(*inputs)
    assert all(map(torch.equal, found, want))
    for grad, some in zip(found[1:3], terms, strict=True):
        assert some.dtype == torch.float32
        assert torch.equal(some.bfloat16(), grad[:, keys])
        assert not torch.equal(some, some.bfloat16().float())


def test_compiles_without_graph_breaks() -> None:
    q, k, v = tensors(12, 12, dtype=torch.float32)
    sinks = torch.randn(6, requires_grad=True)

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, s: torch.Tensor) -> Any:
        return sink_flash_attention(q * 2, k, v, sinks=s, num_sink=2, window_size=4).sum()

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v, sinks), run(q, k, v, sinks))
    want = torch.autograd.grad(run(q, k, v, sinks), (q, k, v, sinks))
    found = torch.autograd.grad(compiled(q, k, v, sinks), (q, k, v, sinks))
    torch.testing.assert_close(found, want)


def test_compiles_for_sizes_that_change() -> None:
    def run(q: torch.Tensor) -> Any:
        return sink_flash_attention(q * 2, q, q, num_sink=2, window_size=4)

    compiled = torch.compile(run, dynamic=True, fullgraph=True, backend="aot_eager")
    for tokens, dim in ((12, 8), (13, 8), (20, 16)):
        q = torch.randn(1, tokens, 2, dim, requires_grad=True)
        torch.testing.assert_close(compiled(q), run(q))


def test_compiles_packed_sequences_and_out() -> None:
    q, k, v = (x.detach() for x in tensors(12, 12, dtype=torch.float32, batch=1))
    cu = torch.tensor([0, 5, 12], dtype=torch.int32)

    def run(out: torch.Tensor) -> Any:
        return sink_flash_attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, out=out) * 1

    want = run(torch.empty_like(q))
    out = torch.full_like(q, float("nan"))
    torch.testing.assert_close(torch.compile(run, fullgraph=True, backend="eager")(out), want)
    torch.testing.assert_close(out, want)


def test_writes_into_out_and_reads_strided_inputs() -> None:
    q, k, v = (x.detach() for x in tensors(11, 11))
    want = sink_flash_attention(q, k, v)
    holder = torch.full((2, 6, 11, 9), float("nan"), dtype=torch.float64)
    out = holder.transpose(1, 2)[..., :8]
    swapped = [x.transpose(1, 3).contiguous().transpose(1, 3) for x in (q, k, v)]
    assert sink_flash_attention(*swapped, out=out) is out
    torch.testing.assert_close(out, want)
    assert holder[..., 8].isnan().all()


def test_inputs_are_not_changed() -> None:
    q, k, v = tensors()
    before = [x.detach().clone() for x in (q, k, v)]
    sink_flash_attention(q, k, v, num_sink=1, window_size=3).sum().backward()
    for x, y in zip((q, k, v), before, strict=True):
        assert torch.equal(x, y)


def bad(**changes: Any) -> dict[str, Any]:
    """Arguments of a valid packed call, some of them replaced."""
    q, k, v = (x.detach() for x in tensors(12, 12, dtype=torch.float32, batch=1))
    return {"q": q, "k": k, "v": v, **changes}


def offsets(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


x4 = torch.zeros
REFUSED: list[tuple[str, type[Exception], str, dict[str, Any]]] = [
    ("not a tensor", TypeError, "q: expected a torch.Tensor, got list", {"q": [1]}),
    ("rank", ValueError, r"q: expected shape \[B, N, Hq, D\]", {"q": x4(12, 6, 8)}),
    ("dtype", TypeError, "q: expected dtype", {"q": x4(1, 12, 6, 8, dtype=torch.int8)}),
    ("mixed dtypes", TypeError, "k: expected dtype torch.float32", {"k": x4(1, 12, 2, 8).half()}),
    ("devices", ValueError, "v: expected device cpu", {"v": x4(1, 12, 2, 8, device="meta")}),
    ("batch", ValueError, r"k: expected shape \[1,", {"k": x4(2, 12, 2, 8)}),
    ("head_dim", ValueError, r"k: expected .* 8\], got .* 4\]", {"k": x4(1, 12, 2, 4)}),
    ("k and v", ValueError, r"v: expected shape \[1, 12, 2, 8\]", {"v": x4(1, 11, 2, 8)}),
    ("groups", ValueError, "q: expected a multiple of num_kv_heads=2", {"q": x4(1, 12, 5, 8)}),
    ("no head", ValueError, "q: expected .* query heads, got 0", {"q": x4(1, 12, 0, 8)}),
    (
        "large head_dim",
        ValueError,
        "q: expected head_dim from 1 to 256, got 320",
        {name: x4(1, 2, 1, 320) for name in "qkv"},
    ),
    ("num_sink", ValueError, "num_sink: expected an integer >= 0, got -1", {"num_sink": -1}),
    ("num_sink type", TypeError, "num_sink: expected an int, got float", {"num_sink": 1.0}),
    ("window", ValueError, "window_size: expected an integer >= 1, got 0", {"window_size": 0}),
    ("window type", TypeError, "window_size: expected an int, got str", {"window_size": "4"}),
    (
        "window of full attention",
        ValueError,
        "window_size: expected None with causal=False",
        {"window_size": 4, "causal": False},
    ),
    ("scale", ValueError, "softmax_scale: expected a finite", {"softmax_scale": float("nan")}),
    ("negative scale", ValueError, "softmax_scale: expected", {"softmax_scale": -1.0}),
    ("sinks shape", ValueError, r"sinks: expected shape \[6\]", {"sinks": x4(2)}),
    ("sinks dtype", TypeError, "sinks: expected dtype", {"sinks": x4(6, dtype=torch.int32)}),
    ("sinks device", ValueError, "sinks: expected device cpu", {"sinks": x4(6, device="meta")}),
    (
        "one cu_seqlens",
        ValueError,
        "cu_seqlens_k: expected a tensor",
        {"cu_seqlens_q": offsets(0, 12)},
    ),
    (
        "other cu_seqlens",
        ValueError,
        "cu_seqlens_q: expected a tensor",
        {"cu_seqlens_k": offsets(0, 12)},
    ),
    ("out shape", ValueError, "out: expected shape", {"out": x4(1, 12, 6, 4)}),
    ("out dtype", TypeError, "out: expected dtype torch.float32", {"out": x4(1, 12, 6, 8).half()}),
    ("out device", ValueError, "out: expected device cpu", {"out": x4(1, 12, 6, 8, device="meta")}),
]
BAD_OFFSETS: list[tuple[str, type[Exception], str, torch.Tensor]] = [
    ("end", ValueError, r"expected .* the token count 12, got \[0, 11\]", offsets(0, 11)),
    ("start", ValueError, r"expected .* the token count 12, got \[1, 12\]", offsets(1, 12)),
    ("order", ValueError, "expected non-decreasing offsets", offsets(0, 8, 4, 12)),
    ("dtype", TypeError, "expected dtype torch.int32, got torch.int64", torch.tensor([0, 12])),
    ("rank", ValueError, r"expected shape \[sequences \+ 1\]", offsets(0, 12)[None]),
    ("device", ValueError, "expected device cpu, got meta", offsets(0, 12).to("meta")),
]


@pytest.mark.parametrize(("error", "message", "changes"), [r[1:] for r in REFUSED],
                         ids=[r[0] for r in REFUSED])  # fmt: skip
def test_refuses(error: type[Exception], message: str, changes: dict[str, Any]) -> None:
    with pytest.raises(error, match=message):
        sink_flash_attention(**bad(**changes))


@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k"])
@pytest.mark.parametrize(("error", "message", "value"), [r[1:] for r in BAD_OFFSETS],
                         ids=[r[0] for r in BAD_OFFSETS])  # fmt: skip
def test_refuses_offsets(
    name: str, error: type[Exception], message: str, value: torch.Tensor
) -> None:
    fine = {"cu_seqlens_q": offsets(0, 12), "cu_seqlens_k": offsets(0, 12)}
    with pytest.raises(error, match=f"{name}: {message}"):
        sink_flash_attention(**bad(**{**fine, name: value}))


def test_packed_sequences_of_inference_mode_are_checked_and_served() -> None:
    q, k, v = tensors(12, 12)
    q, k, v = q[:1], k[:1], v[:1]
    with torch.inference_mode():
        cu = offsets(0, 5, 12)
        found = sink_flash_attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu)
        wrong = offsets(0, 13)
        with pytest.raises(ValueError, match=r"the token count 12, got \[0, 13\]"):
            sink_flash_attention(q, k, v, cu_seqlens_q=wrong, cu_seqlens_k=wrong)
    cu = offsets(0, 5, 12)
    assert torch.equal(found, sink_flash_attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu))


def test_refuses_different_numbers_of_sequences_and_batches() -> None:
    with pytest.raises(ValueError, match="cu_seqlens_k: expected 2 offsets"):
        sink_flash_attention(**bad(cu_seqlens_q=offsets(0, 12), cu_seqlens_k=offsets(0, 5, 12)))
    q, k, v = tensors(12, 12)
    with pytest.raises(ValueError, match="q: expected batch size 1 with cu_seqlens, got 2"):
        sink_flash_attention(q, k, v, cu_seqlens_q=offsets(0, 12), cu_seqlens_k=offsets(0, 12))


def test_refuses_out_when_a_gradient_is_needed() -> None:
    q, k, v = tensors()
    with pytest.raises(ValueError, match="out: expected None when a gradient is required"):
        sink_flash_attention(q, k, v, out=torch.empty_like(q))
    with torch.no_grad():
        sink_flash_attention(q, k, v, out=torch.empty_like(q))


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_refuses_to_write_into_an_input(name: str) -> None:
    inputs = dict(zip("qkv", (torch.randn(1, 8, 2, 16) for _ in range(3)), strict=True))
    with pytest.raises(ValueError, match=f"out: expected memory of its own, got that of {name}"):
        sink_flash_attention(**inputs, out=inputs[name])


def test_importing_the_package_does_not_import_triton() -> None:
    code = (
        "import sys; sys.path[:0] = ['kernels']; import sparsek_kernels;"
        "sparsek_kernels.sink_flash_attention; assert 'triton' not in sys.modules"
    )
    done = processes.run(sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr
