"""The public function on CPU: values, gradients, operators, compilation and every refusal."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsek_kernels import block_sparse_attention
from sparsek_kernels.block_sparse import structure
from sparsek_kernels.block_sparse.structure import BlockStructure
from tests.kernels.block_sparse.cases import Case, make, oracle, problems, structure_of_mask

CASES = [
    Case(70, 70, 4, 2, 8, 2),
    Case(70, 70, 4, 2, 8, 2, causal=True),
    Case(50, 90, 6, 2, 8, block=32, patterns=2, causal=True),
    Case(90, 50, 6, 2, 8, patterns=6, causal=True),
    Case(60, 60, 4, 4, 8, patterns=2, density=1.0),
    Case(60, 60, 4, 4, 8, density=0.0),
    Case(0, 40, 2, 2, 8),
    Case(40, 0, 2, 2, 8),
    Case(50, 90, 6, 2, 8, 2, block=32, patterns=2, causal=True, padded="qk"),
    Case(70, 50, 4, 2, 8, 2, dropout=0.3),
    Case(50, 70, 4, 2, 8, 2, patterns=4, causal=True, padded="k", dropout=0.7),
]


def options(case: Case, t: Any) -> dict[str, Any]:
    """What the public function takes besides tensors and pattern."""
    return {
        "causal": case.causal,
        "key_mask": t.key_mask,
        "query_mask": t.query_mask,
        "dropout_p": case.dropout,
        "rng_state": t.rng_state,
    }


def run(t: Any, causal: bool, **more: Any) -> dict[str, torch.Tensor]:
    """Output, LSE and gradients of the public function."""
    leaves = [x.detach().requires_grad_() for x in (t.q, t.k, t.v)]
    out, lse = block_sparse_attention(*leaves, t.structure, causal=causal, return_lse=True, **more)
    dlse = t.dlse.masked_fill(lse == float("-inf"), 0.0).to(lse.dtype)
    grads = torch.autograd.grad((out, lse), leaves, (t.dout, dlse))
    found = (out.detach(), lse.detach(), *grads)
    return dict(zip(("out", "lse", "dq", "dk", "dv"), found, strict=True))


def check(case: Case) -> None:
    t = make(case)
    found = run(t, **options(case, t))
    bad = problems(found, oracle(case, t, torch.float64), oracle(case, t, case.dtype))
    assert not bad, f"{case}: " + "; ".join(bad)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)
def test_matches_the_oracle(case: Case, dtype: torch.dtype) -> None:
    check(Case(**{**vars(case), "dtype": dtype}))


@settings(max_examples=40, deadline=None)
@given(
    nq=st.integers(0, 100),
    nk=st.integers(0, 100),
    heads=st.sampled_from([(2, 2, 1), (4, 2, 2), (6, 2, 3), (6, 2, 6)]),
    block=st.sampled_from([16, 48]),
    density=st.floats(0, 1),
    causal=st.booleans(),
)
def test_shapes(
    nq: int, nk: int, heads: tuple[int, int, int], block: int, density: float, causal: bool
) -> None:
    check(Case(nq, nk, heads[0], heads[1], 8, 1, block, heads[2], density, causal, torch.float64))


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"causal": True},
        {"padded": "k"},
        {"padded": "q"},
        {"dropout": 0.4},
        {"causal": True, "padded": "qk", "dropout": 0.4, "patterns": 2},
    ],
    ids=str,
)
def test_gradcheck(more: dict[str, Any]) -> None:
    case = Case(34, 50, 2, 1, 4, 2, dtype=torch.float64, **more)
    t = make(case)
    leaves = [x.detach().clone().requires_grad_() for x in (t.q, t.k, t.v)]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        out, lse = block_sparse_attention(
            q, k, v, t.structure, softmax_scale=0.3, return_lse=True, **options(case, t)
        )
        return out, lse.clamp(min=-9)  # -inf where a query sees no key

    assert torch.autograd.gradcheck(attend, leaves, fast_mode=True)


def test_padding_may_hold_anything() -> None:
    case = Case(50, 70, 4, 2, 8, 2, causal=True, padded="qk")
    t = make(case)
    want = run(t, **options(case, t))
    for x, mask in (
        (t.q, t.query_mask),
        (t.dout, t.query_mask),
        (t.k, t.key_mask),
        (t.v, t.key_mask),
    ):
        x[~mask] = float("nan")
    found = run(t, **options(case, t))
    torch.testing.assert_close(found, want, equal_nan=False)
    assert (found["out"][~t.query_mask] == 0).all()
    assert (found["dq"][~t.query_mask] == 0).all()
    assert (found["dk"][~t.key_mask] == 0).all()
    assert (found["dv"][~t.key_mask] == 0).all()


def test_dropout_keeps_its_share_and_follows_its_state() -> None:
    everything = structure_of_mask(torch.ones(1, 8, 8, dtype=torch.bool), 16)
    eye = torch.eye(128).expand(2, 4, 128, 128).transpose(1, 2)

    def weights(state: tuple[int, int] | None) -> torch.Tensor:
        q = torch.zeros(2, 128, 4, 128)
        rng_state = None if state is None else torch.tensor(state)
        out = block_sparse_attention(q, q, eye, everything, dropout_p=0.25, rng_state=rng_state)
        assert isinstance(out, torch.Tensor)
        return out * 128  # [B, N, H, M], 0 or 1 / 0.75

    first = weights((1, 2))
    assert torch.equal(first, weights((1, 2)))
    torch.testing.assert_close(first.unique(), torch.tensor([0.0, 4 / 3]))
    assert (first > 0).float().mean().item() == pytest.approx(0.75, abs=0.01)
    others = [weights(x) for x in ((2, 2), (1, 3), (1 + (1 << 32), 2))]
    for other in (*others, first.flip(0), first.roll(1, 1), first.roll(1, 2), first.roll(1, 3)):
        assert ((first > 0) == (other > 0)).float().mean().item() == pytest.approx(0.625, abs=0.01)
    torch.manual_seed(3)
    drawn = [weights(None) for _ in range(2)]
    assert not torch.equal(*drawn)
    torch.manual_seed(3)
    assert torch.equal(drawn[0], weights(None))


def test_all_blocks_equal_dense_attention() -> None:
    t = make(Case(70, 70, 4, 2, 8, 2, causal=True, dtype=torch.float64))
    everything = structure_of_mask(torch.ones(1, 5, 5, dtype=torch.bool), 16)
    out = block_sparse_attention(t.q, t.k, t.v, everything, causal=True)
    dense = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (t.q, t.k, t.v)), is_causal=True, enable_gqa=True
    ).transpose(1, 2)
    torch.testing.assert_close(out, dense)


def test_rows_without_keys() -> None:
    t = make(Case(48, 48, 2, 1, 8))
    t.structure = structure_of_mask(torch.tensor([[[1, 0, 0], [0, 0, 0], [1, 1, 1]]]).bool(), 16)
    found = run(t, causal=False)
    assert (found["out"][:, 16:32] == 0).all()
    assert (found["dq"][:, 16:32] == 0).all()
    assert found["lse"][:, :, 16:32].isneginf().all()
    assert found["lse"][:, :, 32:].isfinite().all()


@pytest.mark.parametrize("more", [{}, {"padded": "qk", "dropout": 0.4}], ids=["plain", "options"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiles_without_graph_breaks(backend: str, more: dict[str, Any]) -> None:
    case = Case(40, 40, 2, 1, 8, causal=True, **more)
    t = make(case)
    leaves = [x.detach().clone().requires_grad_() for x in (t.q, t.k, t.v)]

    def loss(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out, lse = block_sparse_attention(q, k, v, t.structure, return_lse=True, **options(case, t))
        return out.pow(2).sum() + lse.clamp(min=-9).sum()

    compiled = torch.compile(loss, fullgraph=True, backend=backend)
    want = torch.autograd.grad(loss(*leaves), leaves)
    found = torch.autograd.grad(compiled(*leaves), leaves)
    torch.testing.assert_close(found, want)


def test_operators_pass_torchs_own_checks() -> None:
    t = make(Case(40, 40, 2, 1, 8, dtype=torch.float64))
    s = t.structure
    indices = (s.crow_indices, s.col_indices, s.ccol_indices, s.row_indices)
    leaves = [x.detach().clone().requires_grad_() for x in (t.q, t.k, t.v)]
    operators = torch.ops.sparsek
    forward = (*leaves, *indices, 16, True, 0.3)
    torch.library.opcheck(operators.block_sparse_fwd.default, forward)
    plain = [x.detach() for x in leaves]
    out, lse = operators.block_sparse_fwd(*plain, *indices, 16, True, 0.3)
    for dlse in (None, t.dlse.double()):
        backward = (t.dout, dlse, *plain, out, lse, *indices, 16, True, 0.3)
        torch.library.opcheck(operators.block_sparse_bwd.default, backward)
    mask, state = torch.arange(40)[None] < 30, torch.tensor([1, 2])
    torch.library.opcheck(operators.block_sparse_fwd.default, (*forward, mask, mask, state, 0.5))


def test_strided_inputs_are_read_and_not_changed() -> None:
    t = make(Case(50, 50, 4, 2, 8, 2, causal=True, dtype=torch.float64))
    before = [x.clone() for x in (t.q, t.k, t.v)]
    want = run(t, causal=True)
    for x, y in zip((t.q, t.k, t.v), before, strict=True):
        assert torch.equal(x, y)
    t.q, t.k, t.v, t.dout = (
        x.transpose(1, 3).contiguous().transpose(1, 3) for x in (t.q, t.k, t.v, t.dout)
    )
    for name, value in run(t, causal=True).items():
        torch.testing.assert_close(value, want[name])


def plain(s: BlockStructure, **changes: Any) -> SimpleNamespace:
    """An object that has the attributes of a pattern and nothing else."""
    fields = {"block_size": s.block_size, "crow_indices": s.crow_indices}
    return SimpleNamespace(**{**fields, "col_indices": s.col_indices, **changes})


def test_takes_any_object_with_bsr_attributes() -> None:
    t = make(Case(50, 70, 2, 1, 8))
    want = block_sparse_attention(t.q, t.k, t.v, t.structure)
    one_row = plain(t.structure, crow_indices=t.structure.crow_indices[0])
    for pattern in (plain(t.structure), one_row):
        torch.testing.assert_close(block_sparse_attention(t.q, t.k, t.v, pattern), want)


def test_such_an_object_is_transposed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    t = make(Case(50, 70, 2, 1, 8))
    built = []
    real = structure._transpose
    monkeypatch.setattr(structure, "_transpose", lambda *a: built.append(1) or real(*a))
    pattern = plain(t.structure)
    first = block_sparse_attention(t.q, t.k, t.v, pattern)
    assert torch.equal(block_sparse_attention(t.q, t.k, t.v, pattern), first)
    assert len(built) == 1
    pattern.col_indices = pattern.col_indices.clone()
    pattern.col_indices[-1] = 4 - pattern.col_indices[-1].clamp(max=0)
    block_sparse_attention(t.q, t.k, t.v, pattern)
    assert len(built) == 2, "a changed pattern is another one"


def test_such_an_object_from_inference_mode_is_read_at_every_call() -> None:
    """Its tensors do not count their changes."""
    t = make(Case(50, 70, 2, 1, 8))
    want = block_sparse_attention(t.q, t.k, t.v, t.structure)
    with torch.inference_mode():
        pattern = plain(t.structure, crow_indices=t.structure.crow_indices.clone())
        pattern.col_indices = t.structure.col_indices.clone()
        torch.testing.assert_close(block_sparse_attention(t.q, t.k, t.v, pattern), want)
        pattern.crow_indices.zero_()
        with pytest.raises(ValueError, match="crow_indices: expected to end at"):
            block_sparse_attention(t.q, t.k, t.v, pattern)


def test_such_an_object_serves_training_after_inference_mode() -> None:
    t = make(Case(50, 70, 2, 1, 8))
    pattern = plain(t.structure)
    q, k, v = (x.detach().requires_grad_() for x in (t.q, t.k, t.v))
    with torch.inference_mode():
        block_sparse_attention(q, k, v, pattern)
    out = block_sparse_attention(q, k, v, pattern)
    assert isinstance(out, torch.Tensor)
    out.sum().backward()
    assert q.grad is not None


def test_structures_of_dropped_objects_are_dropped() -> None:
    gc.collect()
    held = len(structure._structures)
    t = make(Case(50, 70, 2, 1, 8))
    block_sparse_attention(t.q, t.k, t.v, plain(t.structure))
    assert len(structure._structures) == held + 1
    del t
    gc.collect()
    assert len(structure._structures) == held


z = torch.zeros
GRID = structure_of_mask(torch.ones(1, 3, 3, dtype=torch.bool), 16)
REFUSED: list[tuple[str, type[Exception], str, dict[str, Any]]] = [
    ("not a tensor", TypeError, "q: expected a torch.Tensor, got list", {"q": [1]}),
    ("rank", ValueError, r"q: expected shape \[B, N, Hq, D\]", {"q": z(40, 4, 8)}),
    ("dtype", TypeError, "q: expected dtype", {"q": z(1, 40, 4, 8, dtype=torch.int8)}),
    ("mixed dtypes", TypeError, "k: expected dtype torch.float32", {"k": z(1, 40, 2, 8).half()}),
    ("devices", ValueError, "v: expected device cpu", {"v": z(1, 40, 2, 8, device="meta")}),
    ("batch", ValueError, "k: expected shape", {"k": z(2, 40, 2, 8)}),
    ("head_dim", ValueError, "k: expected shape", {"k": z(1, 40, 2, 4)}),
    ("k and v", ValueError, "v: expected shape", {"v": z(1, 39, 2, 8)}),
    ("groups", ValueError, "q: expected a multiple of num_kv_heads=2", {"q": z(1, 40, 5, 8)}),
    (
        "large head_dim",
        ValueError,
        "q: expected head_dim from 1 to 256, got 320",
        {name: z(1, 40, 1, 320) for name in "qkv"},
    ),
    ("key mask", ValueError, r"key_mask: expected shape \[1, 40\]", {"key_mask": z(1, 39).bool()}),
    (
        "mask of floats",
        TypeError,
        "query_mask: expected dtype torch.bool",
        {"query_mask": z(1, 40)},
    ),
    ("dropout", ValueError, "dropout_p: expected a probability below 1", {"dropout_p": 1.0}),
    ("state", TypeError, "rng_state: expected dtype torch.int64", {"rng_state": z(2)}),
    ("scale", ValueError, "softmax_scale: expected a finite", {"softmax_scale": float("nan")}),
    ("rows", ValueError, "pattern: expected 4 x 3 blocks of 16", {"q": z(1, 50, 4, 8)}),
    ("columns", ValueError, "pattern: expected 3 x 4 blocks", {x: z(1, 50, 2, 8) for x in "kv"}),
    (
        "patterns",
        ValueError,
        "pattern: expected a number of patterns that divides 4 query heads, got 3",
        {"pattern": structure_of_mask(torch.ones(3, 3, 3, dtype=torch.bool), 16)},
    ),
    ("no pattern", TypeError, "pattern: expected a BlockSparsePattern", {"pattern": 3}),
    (
        "list of offsets",
        TypeError,
        "crow_indices: expected a torch.Tensor, got list",
        {"pattern": plain(GRID, crow_indices=[0, 1, 2, 3])},
    ),
]


@pytest.mark.parametrize(("error", "message", "changes"), [r[1:] for r in REFUSED],
                         ids=[r[0] for r in REFUSED])  # fmt: skip
def test_refuses(error: type[Exception], message: str, changes: dict[str, Any]) -> None:
    fine = {"q": z(1, 40, 4, 8), "k": z(1, 40, 2, 8), "v": z(1, 40, 2, 8), "pattern": GRID}
    block_sparse_attention(**fine)
    with pytest.raises(error, match=message):
        block_sparse_attention(**{**fine, **changes})
