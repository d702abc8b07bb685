"""Sink-window and ring attention on several ranks against one rank and the fp64 oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsek_backend.distributed import SequenceLayout
from sparsek_backend.distributed.halo import plan_halo
from sparsek_backend.distributed.rows import Piece
from sparsek_kernels import sink_flash_attention
from tests.distributed import cases
from tests.distributed.cases import Arrays
from tests.distributed.group import Ranks
from tests.kernels.sink_window.reference import sink_flash_attention_reference


def draw(
    layout: SequenceLayout, batch: int = 1, sinks: bool = True, dim: int = 8
) -> dict[str, torch.Tensor]:
    """Inputs and upstream gradients, which 16 bits hold: 4 query heads, 2 KV heads."""
    torch.manual_seed(layout.num_tokens)
    tokens = layout.num_tokens
    found = {name: torch.randn(batch, tokens, 4, dim).bfloat16().float() for name in ("q", "dout")}
    found |= {name: torch.randn(batch, tokens, 2, dim).bfloat16().float() for name in ("k", "v")}
    found["dlse"] = torch.randn(batch, 4, tokens)
    if sinks:
        found["sinks"] = torch.randn(4)
    return found


def together(layout: SequenceLayout, shards: list[Arrays]) -> dict[str, torch.Tensor]:
    """Shards in the order of the stream; shares of the gradient of sinks summed."""
    order = torch.cat([layout.token_indices(rank) for rank in range(layout.world_size)]).argsort()
    found = {}
    for name in shards[0]:
        parts = [torch.from_numpy(x[name]) for x in shards]
        if name == "dsinks":
            found[name] = torch.stack(parts).sum(0)
        else:
            dim = 2 if name == "lse" else 1
            found[name] = torch.cat(parts, dim).index_select(dim, order)
    return found


def check(
    ranks: Ranks, layout: SequenceLayout, batch: int = 1, sinks: bool = True, **mask: Any
) -> None:
    """Outputs and all gradients, within twice the error of one rank; in bf16 on GPUs."""
    device, on_gpu = ranks.device, ranks.device == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    whole = draw(layout, batch, sinks, 64 if on_gpu else 8)
    arrays = {name: x.numpy() for name, x in whole.items()}
    shards = ranks.run(layout.world_size, cases.attend, layout, mask, arrays, dtype)
    found = together(layout, shards)
    whole = {name: x.to(device) for name, x in whole.items()}
    whole |= {name: whole[name].to(dtype) for name in ("q", "k", "v", "dout")}
    cu = None
    if layout.cu_seqlens is not None:
        cu = torch.tensor(layout.cu_seqlens, dtype=torch.int32, device=device)
    offsets = {"cu_seqlens_q": cu, "cu_seqlens_k": cu}
    names = ["q", "k", "v"] + ["sinks"] * sinks
    upstream = {"dout": whole["dout"], "dlse": whole["dlse"]}
    inputs = {name: whole[name] for name in names}
    oracle = sink_flash_attention_reference(**inputs, **mask, **offsets, **upstream)
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    out, lse = sink_flash_attention(**leaves, **mask, **offsets, return_lse=True)
    torch.autograd.backward((out, lse), (whole["dout"], whole["dlse"]))
    one_rank = (out.detach(), lse.detach(), *(x.grad for x in leaves.values()))
    for name, exact, single in zip(found, oracle, one_rank, strict=True):
        error = (found[name].to(device) - exact).abs().max()
        bound = 2 * (single - exact).abs().max() + 2e-6 * max(1.0, float(exact.abs().max()))
        assert error <= bound, f"{name}: {error:.2e} > {bound:.2e}"


BF16 = torch.bfloat16
PACKED = {  # 192 tokens; cuts at 96 for 2 ranks, at 48, 96, 144 for 4
    "one": None,
    "packed": (0, 7, 7, 60, 190, 192),
}


@pytest.mark.parametrize("cu_seqlens", PACKED.values(), ids=PACKED)
@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
@pytest.mark.parametrize("num_sink", [0, 4, 65])
@pytest.mark.parametrize("world", [2, 4])
def test_sink_window(
    ranks: Ranks, world: int, num_sink: int, order: Any, cu_seqlens: tuple[int, ...] | None
) -> None:
    layout = SequenceLayout(192, world, order, cu_seqlens)
    size = layout.tokens_per_rank
    for window in (1, 17, size, size + 1, 2 * size + 3, 500):
        check(ranks, layout, num_sink=num_sink, window_size=window)


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
@pytest.mark.parametrize("world", [2, 4])
def test_gradients_that_ranks_share_are_rounded_once(ranks: Ranks, world: int, order: Any) -> None:
    """In bf16; without ``dout``, that of keys does not depend on how the output was rounded."""
    layout = SequenceLayout(192, world, order, PACKED["packed"])
    cu = torch.tensor(layout.cu_seqlens, dtype=torch.int32)
    mask = {"num_sink": 4, "window_size": 17}
    for name, silent in (("dk", "dout"), ("dv", "dlse")):
        whole = draw(layout)
        whole[silent].zero_()
        arrays = {key: x.numpy() for key, x in whole.items()}
        found = together(layout, ranks.run(world, cases.attend, layout, mask, arrays, BF16))
        upstream = {key: whole.pop(key) for key in ("dout", "dlse")}
        exact = sink_flash_attention_reference(
            **whole, **mask, cu_seqlens_q=cu, cu_seqlens_k=cu, **upstream
        )
        want = dict(zip(("out", "lse", "dq", "dk", "dv"), exact, strict=False))[name]
        exponent = torch.frexp(want).exponent
        half_step = torch.ldexp(torch.ones_like(want), exponent - 9)
        assert ((found[name] - want).abs() <= 1.001 * half_step + 1e-6).all(), name


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
def test_no_message_waits_beside_a_window(ranks: Ranks, order: Any) -> None:
    """On a GPU it would hold multiprocessors until its peer is as far."""
    due = ["send", "wait", "attend", "attend", "send", "wait"]
    layout = SequenceLayout(64, 4, order)
    assert ranks.run(4, cases.windows_in_order, layout, [1, 16, 2, 8]) == [due] * 4


def test_first_rank_attends_its_own_keys_in_place() -> None:
    whole = slice(0, 16)
    (call,) = plan_halo(SequenceLayout(64, 4), 0, num_sink=4, window_size=9, batch=1).calls
    assert (call.rows, call.pieces) == ((whole,), (Piece(0, whole),))


@pytest.mark.parametrize("cu_seqlens", PACKED.values(), ids=PACKED)
@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_ring(ranks: Ranks, world: int, order: Any, cu_seqlens: tuple[int, ...] | None) -> None:
    layout = SequenceLayout(192, world, order, cu_seqlens)
    for causal in (True, False):
        check(ranks, layout, causal=causal)


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
def test_batches(ranks: Ranks, order: Any) -> None:
    layout = SequenceLayout(64, 4, order)
    check(ranks, layout, batch=3, num_sink=5, window_size=9)
    check(ranks, layout, batch=3, sinks=False)


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_any_layout(ranks: Ranks, data: st.DataObject) -> None:
    world = data.draw(st.sampled_from([2, 4]))
    tokens = 2 * world * data.draw(st.integers(1, 24))
    cuts = data.draw(st.lists(st.integers(0, tokens), max_size=6))
    deal = st.permutations([*range(world)] * 2).map(tuple)
    order: Any = data.draw(st.one_of(st.sampled_from(["contiguous", "zigzag"]), deal))
    layout = SequenceLayout(tokens, world, order, (0, *sorted(cuts), tokens))
    window = data.draw(st.one_of(st.none(), st.integers(1, tokens + 2)))
    check(ranks, layout, num_sink=data.draw(st.integers(0, 20)), window_size=window)


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
def test_shard_and_back(ranks: Ranks, order: Any) -> None:
    layout = SequenceLayout(24, 4, order, (0, 5, 24))
    for stream, positions in ranks.run(4, cases.round_trip, layout):
        assert np.array_equal(stream[1, :, 2], np.arange(24))
        assert np.array_equal(positions[:, 0], [*range(5), *range(19)])


BAD = {  # what one rank passes, or all (-1): the error, the argument that it names
    "shorter shard": ({1: {"q": torch.randn(1, 7, 2, 8)}}, ValueError, "q: expected 8 tokens"),
    "all shorter": (
        {-1: {name: torch.randn(1, 7, 2, 8) for name in "qkv"}},
        ValueError,
        "q: expected 8 tokens",
    ),
    "other batch": (
        {1: {name: torch.randn(2, 8, 2, 8) for name in "qkv"}},
        ValueError,
        "q: expected the same on all ranks",
    ),
    "other dtype": ({0: {"k": torch.randn(1, 8, 2, 8).half()}}, TypeError, "k: expected dtype"),
    "other window": ({1: {"window_size": 5}}, ValueError, "window_size: expected the same"),
    "window 0": ({1: {"window_size": 0}}, ValueError, "window_size: expected an integer >= 1"),
    "other sinks": ({0: {"num_sink": 3}}, ValueError, "num_sink: expected the same"),
    "sinks of other heads": ({1: {"sinks": torch.randn(3)}}, ValueError, "sinks: expected shape"),
    "window of no causality": (
        {-1: {"causal": False}},
        ValueError,
        "window_size: expected None with causal=False",
    ),
    "mesh size": ({-1: {"layout": SequenceLayout(24, 3)}}, ValueError, "mesh: expected 3 ranks"),
    "mesh size on one rank": (
        {1: {"layout": SequenceLayout(24, 3)}},
        ValueError,
        "mesh: expected 3 ranks",
    ),
    "no layout": ({-1: {"layout": "zigzag"}}, TypeError, "layout: expected a SequenceLayout"),
    "no layout on one rank": ({0: {"layout": None}}, TypeError, "layout: expected a Sequence"),
    "other layout": (
        {1: {"layout": SequenceLayout(16, 2, "zigzag")}},
        ValueError,
        "layout: expected the same",
    ),
    "batch of packed": (
        {
            -1: {
                **{name: torch.randn(2, 8, 2, 8) for name in "qkv"},
                "layout": SequenceLayout(16, 2, "contiguous", (0, 3, 16)),
            }
        },
        ValueError,
        "q: expected batch size 1",
    ),
}


@pytest.mark.parametrize(("changed", "error", "message"), BAD.values(), ids=BAD)
def test_bad_argument_is_an_error_on_every_rank(
    ranks: Ranks, changed: Any, error: type[Exception], message: str
) -> None:
    check_refused(ranks, changed, error, message)


def check_refused(ranks: Ranks, changed: Any, error: type[Exception], message: str) -> None:
    """Both ranks raise the error, and go on with a good call."""
    for done, what in ranks.outcomes(2, cases.call_with, changed):
        assert not done
        assert what[0] == error.__name__
        assert what[1].startswith(message), what[1]
    assert all(done for done, _ in ranks.outcomes(2, cases.call_with, {}))  # and they go on


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((10, 4), "num_tokens: expected a multiple of 4"),
        ((12, 4, "zigzag"), "num_tokens: expected a multiple of 8"),
        ((8, 2, "striped"), "order: expected"),
        ((8, 2, (0, 1, 1)), "order: expected"),
        ((8, 2, (0, 2, 2, 0)), "order: expected"),
        ((8, 2, "zigzag", (0, 5)), "cu_seqlens: expected"),
        ((8, 2, "zigzag", (0, 5, 3, 8)), "cu_seqlens: expected"),
    ],
)
def test_bad_layout(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SequenceLayout(*arguments)


def test_plans_are_made_on_the_host_whatever_the_default_device(ranks: Ranks) -> None:
    ranks.run(2, cases.call_by_default_elsewhere)


@pytest.mark.parametrize(("where", "world"), [("before", 2), ("within", 2), ("backward", 4)])
def test_dead_rank_is_an_error_and_no_hang(where: str, world: int) -> None:
    group = Ranks(world, timeout=20.0)
    try:
        for done, what in group.outcomes(world, cases.die, where)[:-1]:
            assert not done
            assert what[0] == "RuntimeError"
            assert what[1].startswith(f"mesh: expected an answer of all {world} ranks")
            assert "timeout of 20 s" in what[1]
    finally:
        group.close()
