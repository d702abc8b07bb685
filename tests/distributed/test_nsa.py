"""The NSA layer on several ranks against one rank and the fp64 oracle."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsek_backend.distributed import SequenceLayout
from tests.distributed import cases
from tests.distributed.group import Ranks
from tests.distributed.test_attention import together
from tests.nn.test_native_sparse_attention import oracle


def gradients(module: Any, x: torch.Tensor, out: torch.Tensor, dout: torch.Tensor) -> list[Any]:
    """Output, gradient of the tokens, then of every weight (zeros where it has no part)."""
    leaves = [x, *module.parameters()]
    found = torch.autograd.grad(out, leaves, dout, allow_unused=True)
    filled = (torch.zeros_like(a) if g is None else g for a, g in zip(leaves, found, strict=True))
    return [out.detach(), *filled]


def check(
    ranks: Ranks,
    layout: SequenceLayout,
    dtype: torch.dtype = torch.float32,
    batch: int = 1,
    shut: list[bool] | None = None,
    recompute: bool = False,
    **options: Any,
) -> None:
    """Output and every gradient, within twice the error of one rank."""
    torch.manual_seed(layout.num_tokens)
    x, dout = (torch.randn(batch, layout.num_tokens, 24, dtype=dtype) for _ in range(2))
    whole = {"x": x.numpy(), "dout": dout.numpy()}
    given = (layout, options, whole, shut, recompute)
    shards = ranks.run(layout.world_size, cases.run_layer, *given)
    tokens = together(layout, [{name: y[name] for name in ("out", "dx")} for y in shards])
    names = [name for name in shards[0] if name not in tokens]
    shares = [sum(torch.from_numpy(y[name]) for y in shards) for name in names]
    found = [*tokens.values(), *shares]

    module, x = cases.build(options, dtype), x.requires_grad_()
    only = None if shut is None else torch.tensor(shut)
    packed = {"cu_seqlens": torch.tensor(layout.edges, dtype=torch.int32)} if layout.packed else {}
    single = gradients(module, x, module(x, compressed_only=only, **packed), dout)

    exact = [y.double() for y in single]
    if shut is None:
        module, x = cases.build(options, torch.float64), x.detach().double().requires_grad_()
        module.load_state_dict(cases.build(options, dtype).state_dict())
        rows = [x[i : i + 1, lo:hi] for i in range(batch) for lo, hi in pairwise(layout.edges)]
        parts = [oracle(module, part) for part in rows if part.shape[1]]
        out = torch.cat(parts, 1).view_as(x)
        exact = gradients(module, x, out, dout.double())
    for name, have, one, true in zip(["out", "dx", *names], found, single, exact, strict=True):
        error = (have - true).abs().max()
        floor = 2e-6 if dtype == torch.float32 else 1e-14
        bound = 2 * (one - true).abs().max() + floor * max(1.0, float(true.abs().max()))
        assert error <= bound, f"{name}: {error:.2e} > {bound:.2e}"


PACKED = {"one": None, "packed": (0, 3, 3, 40, 101, 104)}  # cuts of 104 tokens fall into blocks


@pytest.mark.parametrize("cu_seqlens", PACKED.values(), ids=PACKED)
@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_layer(ranks: Ranks, world: int, order: Any, cu_seqlens: tuple[int, ...] | None) -> None:
    layout = SequenceLayout(104, world, order, cu_seqlens)
    check(ranks, layout)
    check(ranks, layout, torch.float64, shared_kv=True, compression="mean")


def test_batch(ranks: Ranks) -> None:
    check(ranks, SequenceLayout(48, 4, "zigzag"), batch=2, window_size=30)
    check(ranks, SequenceLayout(48, 2), batch=2, shut=[True, False])


def test_activation_checkpointing(ranks: Ranks) -> None:
    layout = SequenceLayout(104, 4, "zigzag", PACKED["packed"])
    check(ranks, layout, recompute=True)


def test_compressed_only_of_packed_sequences(ranks: Ranks) -> None:
    layout = SequenceLayout(104, 4, "zigzag", PACKED["packed"])
    check(ranks, layout, shut=[False, True, True, False, True])


@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_any_layout(ranks: Ranks, data: st.DataObject) -> None:
    world = data.draw(st.sampled_from([2, 4]))
    tokens = 2 * world * data.draw(st.integers(1, 12))
    cuts = data.draw(st.lists(st.integers(0, tokens), max_size=5))
    order: Any = data.draw(st.sampled_from(["contiguous", "zigzag"]))
    layout = SequenceLayout(tokens, world, order, (0, *sorted(cuts), tokens))
    check(ranks, layout, torch.float64)


BAD = {
    "other length": (
        {1: {"hidden_states": torch.randn(1, 11, 24)}},
        "hidden_states: expected the same on all ranks",
    ),
    "other width": (
        {0: {"hidden_states": torch.randn(1, 12, 23)}},
        "hidden_states: expected shape",
    ),
    "offsets": (
        {1: {"cu_seqlens": torch.tensor([0, 12], dtype=torch.int32)}},
        "cu_seqlens: expected None with a mesh",
    ),
    "layout of other tokens": (
        {0: {"layout": SequenceLayout(26, 2)}},
        "hidden_states: expected 13 tokens",
    ),
    "mesh size": ({0: {"layout": SequenceLayout(36, 3)}}, "mesh: expected 3 ranks"),
}


@pytest.mark.parametrize(("changed", "message"), BAD.values(), ids=BAD)
def test_bad_argument_is_an_error_on_every_rank(ranks: Ranks, changed: Any, message: str) -> None:
    for done, what in ranks.outcomes(2, cases.call_layer_with, changed):
        assert not done
        assert what[0] == "ValueError"
        assert what[1].startswith(message), what[1]


def test_a_map_for_other_blocks_is_an_error_on_every_rank(ranks: Ranks) -> None:
    for done, what in ranks.outcomes(2, cases.compress_with_another_map):
        assert not done
        assert what[1].startswith("compression.phi_v.position: expected shape [8, 8]"), what[1]


def test_layout_without_mesh() -> None:
    with pytest.raises(ValueError, match="layout: expected None without a mesh"):
        cases.build({}, torch.float32)(torch.randn(1, 4, 24), layout=SequenceLayout(4, 1))
