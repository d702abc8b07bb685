"""SeerAttention-R's gates: the oracle by hand, and the torch path against the oracle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsek_kernels.paged import (
    CellMeans,
    Gates,
    Indexers,
    Seer,
    SelectionPolicy,
    StepPolicy,
    paged_attention,
    select_blocks,
    write_index,
)
from sparsek_kernels.paged.index.seer.gates import view_gate_keys
from sparsek_kernels.paged.reference import (
    gate_scores_reference,
    gather_sequence,
    paged_attention_reference,
    select_blocks_reference,
    select_seer_reference,
)
from tests.kernels.paged.cache_cases import Case, make_case
from tests.kernels.paged.gate_cases import keep_gate_keys, make_gates, make_rotation

SINGLE = partial(SelectionPolicy, query_tile=1)
POLICIES = {
    "own block": SINGLE(num_sink=32, window_size=1, top_k=2, sel_block_size=32),
    "window": SINGLE(num_sink=32, window_size=70, top_k=3, sel_block_size=32),
    "blocks of 64": SINGLE(num_sink=64, window_size=64, top_k=2, sel_block_size=64),
    "dense below": SINGLE(num_sink=32, window_size=1, top_k=2, sel_block_size=32, dense_below=200),
}
TILES = SelectionPolicy(num_sink=32, window_size=1, top_k=2, sel_block_size=32, query_tile=64)


def select_by(gates: Gates, rotation: torch.Tensor | None) -> Callable[..., Any]:
    def select(
        q: torch.Tensor,
        k: torch.Tensor,
        positions: list[int],
        policy: SelectionPolicy,
        scale: float,
    ) -> list[list[int]] | None:
        if len(positions) > 1:  # a tile
            return select_blocks_reference(q, k, positions, policy, scale)
        return select_seer_reference(q, k, positions, policy, gates, rotation)

    return select


def both(policy: SelectionPolicy | StepPolicy) -> StepPolicy:
    """The policy of single tokens for prompts too."""
    return policy if isinstance(policy, StepPolicy) else StepPolicy(policy, policy)


def indexers_of(policy: StepPolicy, gates: Gates) -> Indexers:
    """Gates for single tokens, means for tiles."""
    return Indexers(Seer(gates) if policy.prefill.query_tile == 1 else CellMeans(), Seer(gates))


def attend(case: Case, policy: SelectionPolicy | StepPolicy, gates: Gates) -> torch.Tensor:
    step = both(policy)
    return paged_attention(
        case.q,
        case.k_cache,
        case.v_cache,
        case.batch,
        step,
        k_summary=case.k_summary,
        indexers=indexers_of(step, gates),
        out=torch.full_like(case.q, float("nan")),
    )


def expected(
    case: Case,
    policy: SelectionPolicy | StepPolicy,
    gates: Gates,
    rotation: torch.Tensor | None,
) -> torch.Tensor:
    return paged_attention_reference(
        case.q,
        case.k_cache,
        case.v_cache,
        case.batch,
        both(policy),
        select=select_by(gates, rotation),
    )


@pytest.mark.parametrize("norms", [False, True], ids=["plain", "norms"])
def test_scores_by_dense_arithmetic(norms: bool) -> None:
    """All blocks at once, from keys and queries that were never turned."""
    heads, group, dim, size, position = 2, 3, 16, 32, 200
    gates = make_gates(heads, group, dim, norms=norms)
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(heads * group, dim, generator=generator).double()
    k = torch.randn(position + 1, heads, dim, generator=generator).double()
    rotation = make_rotation(256, dim)

    def turned(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        cos, sin = (x.repeat(1, 2)[:, None] for x in rotation[at].double().chunk(2, -1))
        half = torch.cat([-x[..., dim // 2 :], x[..., : dim // 2]], -1)
        return x * cos + half * sin

    pool = partial(F.max_pool1d, kernel_size=size)
    rows = k[: position // size * size].permute(1, 2, 0)  # [Hkv, D, N]
    pooled = torch.cat([pool(rows), -pool(-rows), F.avg_pool1d(rows, size)], 1)
    keys = torch.einsum("hin,hio->nho", pooled, gates.key.double())
    query = torch.einsum("kgi,kgio->ko", q.view(heads, group, dim), gates.query.double())
    if gates.query_norm is not None and gates.key_norm is not None:
        query = F.rms_norm(query, (dim,), gates.query_norm.double(), 1e-6)
        keys = F.rms_norm(keys, (dim,), gates.key_norm.double(), 1e-6)
    query = turned(query[None], torch.tensor([position]))[0]
    keys = turned(keys, size * torch.arange(len(keys)))
    scores = torch.softmax(torch.einsum("ho,nho->hn", query, keys) / dim**0.5, -1)
    at = torch.tensor([position])
    found = gate_scores_reference(
        turned(q[None], at)[0],
        turned(k, torch.arange(position + 1)),
        position,
        size,
        gates,
        rotation,
    )
    torch.testing.assert_close(found, scores, atol=1e-9, rtol=1e-6)


@pytest.mark.parametrize("positions", ["rotated", "none"])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
def test_attention_and_choice_equal_the_oracle(policy: SelectionPolicy, positions: str) -> None:
    case = make_case([500, 33, 290, 410], [2, 1, 40, 9], 2, page_size=64)
    rotation = make_rotation(512, 32) if positions == "rotated" else None
    case.batch = replace(case.batch, rotation=rotation, _derived={})
    gates = make_gates(2, 2, 32)
    keep_gate_keys(case, policy, gates)
    found = attend(case, policy, gates)
    torch.testing.assert_close(
        found.double(), expected(case, policy, gates, rotation), atol=2e-6, rtol=1e-5
    )
    step = both(policy)
    chosen = select_blocks(
        case.q,
        case.k_cache,
        case.batch,
        step,
        k_summary=case.k_summary,
        indexers=indexers_of(step, gates),
    )
    starts, lengths = case.batch.cu_seqlens_q.tolist(), case.batch.seq_lens.tolist()
    for request, length in enumerate(lengths):
        keys = gather_sequence(case.k_cache, case.batch.block_table[request], length)
        row, position = starts[request + 1] - 1, length - 1  # the last token of each
        one = case.q[row : row + 1]
        wanted = select_seer_reference(one, keys, [position], policy, gates, rotation)
        last = chosen[request][-1]
        assert bool((last == -1).all()) if wanted is None else last.tolist() == wanted


@pytest.mark.parametrize("prefill", [SelectionPolicy(), TILES], ids=["dense", "cell_means"])
def test_tiles_do_without_gates(prefill: SelectionPolicy) -> None:
    """Decoded tokens alone select by them; where prefills select, they do by means."""
    policy = StepPolicy(prefill, TILES.per_token(None, 32))
    case = make_case([500, 290, 410], [1, 290, 70], 1, page_size=64)
    gates = make_gates(2, 2, 32)
    keep_gate_keys(case, policy.decode, gates)
    found = attend(case, policy, gates).double()
    wanted = expected(case, policy, gates, None)
    torch.testing.assert_close(found, wanted, atol=2e-6, rtol=1e-5)
    dense = paged_attention(case.q, case.k_cache, case.v_cache, case.batch, SelectionPolicy())
    same = torch.isclose(found.float(), dense, atol=2e-6, rtol=1e-5).flatten(1).all(1)
    assert bool(same[1:].all()) == prefill.is_dense
    assert not torch.allclose(found[0].float(), dense[0], atol=1e-3)


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=3),
    sizes=st.lists(st.integers(1, 150), min_size=1, max_size=4),
    group=st.sampled_from([1, 3, 4, 8]),
    page_size=st.sampled_from([32, 64, 128]),
    layout=st.sampled_from(["interleaved", "apart"]),
    seed=st.integers(0, 1000),
)
def test_chunks_and_groups(
    lengths: list[int], sizes: list[int], group: int, page_size: int, layout: str, seed: int
) -> None:
    policy = POLICIES["own block"]
    case = make_case(
        lengths,
        [1] * len(lengths),
        len(lengths),
        heads=2 * group,
        page_size=page_size,
        layout=layout,
        seed=seed,
    )
    rotation = make_rotation(512, 32)
    case.batch = replace(case.batch, rotation=rotation, _derived={})
    gates = make_gates(2, group, 32, norms=bool(seed % 2), seed=seed)
    keep_gate_keys(case, policy, gates, sizes)
    chunked = view_gate_keys(case.k_summary, page_size, 32, 32).clone()
    found = attend(case, policy, gates)
    torch.testing.assert_close(
        found.double(), expected(case, policy, gates, rotation), atol=5e-6, rtol=1e-5
    )
    keep_gate_keys(case, policy, gates)
    whole = view_gate_keys(case.k_summary, page_size, 32, 32)
    torch.testing.assert_close(chunked, whole, atol=1e-5, rtol=1e-5, equal_nan=True)


def test_a_prefix_hit_finds_its_gate_keys() -> None:
    """Pages that another request has filled are not written again."""
    policy, gates = POLICIES["own block"], make_gates(2, 2, 32)
    case = make_case([290, 290], [1, 1], 2, page_size=64)
    table = case.batch.block_table
    for page in range(3):  # the second sequence begins with the first one's pages
        table[1, page] = table[0, page]
    keep_gate_keys(case, policy, gates)
    before = attend(case, policy, gates)
    case.k_summary[table[1, 3:5].long()] = 255
    keep_gate_keys(case, policy, gates, [50], starts=[192, 192])
    torch.testing.assert_close(attend(case, policy, gates), before, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(
        before.double(), expected(case, policy, gates, None), atol=2e-6, rtol=1e-5
    )


def test_tokens_that_were_rejected_leave_no_trace() -> None:
    """A block that completes a second time has the key of the tokens that stayed."""
    policy, gates = POLICIES["own block"], make_gates(2, 2, 32)
    case = make_case([290], [1], 1, page_size=64)
    keep_gate_keys(case, policy, gates, [70])
    before = case.k_summary.clone()
    page = int(case.batch.block_table[0, 1])
    kept = case.k_cache[page].clone()
    case.k_cache[page, :, -5:] = 9.0  # drafted tokens
    keep_gate_keys(case, policy, gates, [37], starts=[100])
    assert not torch.equal(case.k_summary, before)
    case.k_cache[page] = kept
    keep_gate_keys(case, policy, gates, [1], starts=[123])
    torch.testing.assert_close(
        view_gate_keys(case.k_summary, 64, 32, 32),
        view_gate_keys(before, 64, 32, 32),
        atol=1e-5,
        rtol=1e-5,
        equal_nan=True,
    )


def test_a_covering_budget_is_dense_attention() -> None:
    policy = SINGLE(num_sink=32, window_size=1, top_k=20, sel_block_size=32)
    case = make_case([500, 33, 290], [2, 1, 40], 2, page_size=64)
    gates = make_gates(2, 2, 32)
    keep_gate_keys(case, policy, gates)
    dense = paged_attention(case.q, case.k_cache, case.v_cache, case.batch, SelectionPolicy())
    torch.testing.assert_close(attend(case, policy, gates), dense, atol=2e-6, rtol=1e-5)


def test_a_single_token_keeps_the_trained_blocks() -> None:
    policy = replace(TILES, dense_last=8).per_token(5, 32)
    assert (policy.sel_block_size, policy.top_k, policy.dense_last) == (32, 5, 0)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"query": (2, 3, 32, 32)}, ValueError, r"gates.query: expected shape \[2, 2, 32, 32\]"),
        ({"key": (2, 64, 32)}, ValueError, r"gates.key: expected shape \[2, 96, 32\], got"),
        ({"query_norm": (16,)}, ValueError, r"gates.query_norm: expected shape \[32\], got \[16\]"),
        ({"key_norm": (16,)}, ValueError, r"gates.key_norm: expected shape \[32\], got \[16\]"),
        ({"dtype": torch.bfloat16}, TypeError, "gates.query: expected dtype torch.float32"),
        ({"page_size": 16}, ValueError, "page_size: expected a multiple of sel_block_size=32"),
    ],
    ids=["query", "key", "query_norm", "key_norm", "dtype", "page"],
)
def test_gates_that_do_not_fit(change: dict[str, Any], error: type[Exception], words: str) -> None:
    case = make_case([100], [1], 1, page_size=change.pop("page_size", 64))
    gates: Any = make_gates(2, 2, 32)
    if "dtype" in change:
        gates = replace(gates, query=gates.query.to(change["dtype"]))
    else:
        gates = replace(gates, **{name: torch.ones(shape) for name, shape in change.items()})
    with pytest.raises(error, match=words):
        attend(case, POLICIES["own block"], gates)


def test_gates_are_of_single_tokens() -> None:
    case, gates = make_case([500], [40], 0, page_size=64), make_gates(2, 2, 32)
    step = StepPolicy(TILES, TILES.per_token(None, 32))
    words = "policy: expected query_tile = 1 with Seer, got 64"
    with pytest.raises(ValueError, match=words):
        paged_attention(
            case.q, case.k_cache, case.v_cache, case.batch, step,
            k_summary=case.k_summary, indexers=Indexers(Seer(gates), Seer(gates)),
        )  # fmt: skip
    with pytest.raises(ValueError, match=words):
        write_index(case.k_cache, case.v_cache, case.k_summary, case.batch, TILES, Seer(gates))


def test_gates_rank_no_small_blocks() -> None:
    case, gates = make_case([100], [1], 1), make_gates(2, 2, 32)
    with pytest.raises(ValueError, match="sel_block_size of at least 32 with gates, got 16"):
        attend(case, SINGLE(window_size=1, top_k=2, sel_block_size=16), gates)
