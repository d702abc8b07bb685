"""NSA over pages against the layer itself: prefill, chunks, decode, shared pages."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsek_backend.nn import NSAConfig
from sparsek_kernels import PagedBatch
from sparsek_kernels.nsa.paged import launch
from sparsek_kernels.nsa.paged.api import nsa_paged_attention
from sparsek_kernels.nsa.paged.cache import check_paged_spec
from sparsek_kernels.nsa.paged.problem import PagedProblem
from tests.kernels.nsa.paged_layer import SMALL, PagedLayer, make_layer, make_tokens

CONFIGS: dict[str, NSAConfig] = {
    "independent K and V": SMALL,
    "shared K and V": replace(SMALL, shared_kv=True),
    "mean": replace(SMALL, compression="mean"),
    "shared mean": replace(SMALL, shared_kv=True, compression="mean"),
    "no positions": replace(SMALL, rope_theta=None),
    "no overlap": replace(SMALL, cmp_block_size=16, cmp_stride=16),
    "four strides": replace(SMALL, cmp_block_size=16, cmp_stride=4, sel_block_size=32),
    "no initial block": replace(SMALL, num_init_blocks=0, num_local_blocks=1),
}


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert not found.isnan().any()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_prefill_then_decode_equals_the_layer(config: NSAConfig) -> None:
    layer = make_layer(config)
    tokens = make_tokens(250, layer)
    expected = layer(tokens[None])[0]
    paged = PagedLayer(layer, 32, 10, order=[7, 3, 9, 1, 0, 8, 2, 5])
    close(paged.step({"a": tokens[:201]})[0], expected[:201])
    for place in range(201, 250):
        close(paged.step({"a": tokens[place : place + 1]})[0], expected[place : place + 1])


@pytest.mark.parametrize("length", [1, 7, 8, 9, 15, 16, 17, 63, 64, 65, 100])
@pytest.mark.parametrize("page_size", [16, 48, 64])
def test_every_token_decoded(length: int, page_size: int) -> None:
    """From the first token on, across the first compressed block and page edges."""
    layer = make_layer()
    tokens = make_tokens(length, layer)
    paged = PagedLayer(layer, page_size, 8)
    found = [paged.step({"a": tokens[i : i + 1]})[0] for i in range(length)]
    close(torch.cat(found), layer(tokens[None])[0])


def test_decode_equals_the_contiguous_cache() -> None:
    layer = make_layer()
    tokens = make_tokens(120, layer)
    cache = layer.new_cache(1, 120)
    paged = PagedLayer(layer, 16, 8)
    for first, last in ((0, 90), *((i, i + 1) for i in range(90, 120))):
        expected = layer(tokens[None, first:last], cache=cache)[0]
        close(paged.step({"a": tokens[first:last]})[0], expected)


@settings(max_examples=25, deadline=None)
@given(
    chunks=st.lists(st.integers(1, 60), min_size=1, max_size=5),
    page_size=st.sampled_from([16, 32, 80]),
    seed=st.integers(0, 1000),
)
def test_chunks_and_page_order_change_nothing(chunks: list[int], page_size: int, seed: int) -> None:
    layer = make_layer()
    tokens = make_tokens(sum(chunks), layer, seed)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(seed)).tolist()
    paged = PagedLayer(layer, page_size, 20, order)
    found = [paged.step({"a": part})[0] for part in tokens.split(chunks)]
    close(torch.cat(found), layer(tokens[None])[0])


@settings(max_examples=40, deadline=None)
@given(
    page_size=st.sampled_from([16, 48, 64]),
    stride=st.sampled_from([4, 8, 16]),
    strides=st.integers(1, 4),
    lengths=st.lists(st.integers(1, 150), min_size=1, max_size=3),
    data=st.data(),
)
def test_nothing_is_read_past_the_end_of_a_sequence(
    page_size: int, stride: int, strides: int, lengths: list[int], data: st.DataObject
) -> None:
    """Sequences shorter than a compressed block, a stride or a page, beside longer ones."""
    size = stride * strides
    nested = [n for n in (16, 48, 64, 192) if n >= size and not (page_size % n and n % page_size)]
    config = replace(
        SMALL,
        cmp_block_size=size,
        cmp_stride=stride,
        sel_block_size=data.draw(st.sampled_from(nested)),
    )
    layer = make_layer(config)
    paged = PagedLayer(layer, page_size, 40)
    tokens = {name: make_tokens(n, layer, n) for name, n in zip("abc", lengths, strict=False)}
    found: dict[str, list[torch.Tensor]] = {name: [] for name in tokens}
    cuts = {name: x.tensor_split([data.draw(st.integers(0, len(x)))]) for name, x in tokens.items()}
    for chunk in range(2):
        step = {name: parts[chunk] for name, parts in cuts.items() if len(parts[chunk])}
        step = dict(sorted(step.items(), key=lambda item: len(item[1])))  # decodes come first
        for name, rows in zip(step, paged.step(step) if step else [], strict=True):
            found[name].append(rows)
    for name, rows in tokens.items():
        close(torch.cat(found[name]), layer(rows[None])[0])


def test_batches_of_decodes_and_prefills() -> None:
    layer = make_layer()
    lengths = {"a": 130, "b": 5, "c": 64, "d": 77}
    tokens = {name: make_tokens(n + 1, layer, n) for name, n in lengths.items()}
    paged = PagedLayer(layer, 16, 40)
    for name in "abc":
        paged.step({name: tokens[name][:-1]})
    found = paged.step({**{n: tokens[n][-1:] for n in "abc"}, "d": tokens["d"]})
    for name, rows in zip(lengths, found, strict=True):
        close(rows, layer(tokens[name][None])[0, -rows.shape[0] :])


class InParts(PagedLayer):
    """Attends the decodes of a step, its first prefill and its other prefills apart."""

    def parts(self, batch: PagedBatch) -> list[PagedBatch]:
        ends = [0, batch.num_decodes, batch.num_decodes + 1, batch.num_requests]
        return [batch.part(first, last) for first, last in pairwise(ends) if first < last]


def test_parts_of_a_batch_equal_the_whole() -> None:
    layer = make_layer()
    lengths = {"a": 130, "b": 5, "c": 64, "d": 77}
    tokens = {name: make_tokens(n, layer, n) for name, n in lengths.items()}
    paged = InParts(layer, 16, 40)
    paged.step({"a": tokens["a"][:-1]})
    found = paged.step({"a": tokens["a"][-1:], **{n: tokens[n] for n in "bcd"}})
    for name, rows in zip(lengths, found, strict=True):
        close(rows, layer(tokens[name][None])[0, -rows.shape[0] :])


def test_speculating_decodes_have_several_tokens() -> None:
    layer = make_layer()
    lengths, taken = {"a": 150, "b": 41, "c": 70}, {"a": 3, "b": 1, "c": 2}
    tokens = {name: make_tokens(n, layer, n) for name, n in lengths.items()}
    paged = PagedLayer(layer, 16, 40)
    for name, rows in tokens.items():
        paged.step({name: rows[: -taken[name]]})
    last = {name: rows[-taken[name] :] for name, rows in tokens.items()}
    found = paged.step(last, decode_query_len=3)
    for (name, rows), out in zip(tokens.items(), found, strict=True):
        close(out, layer(rows[None])[0, -taken[name] :])


def test_sequences_share_the_pages_they_begin_with() -> None:
    """A compressed block that reaches into the next page is not in the shared page."""
    layer = make_layer()
    first, other = make_tokens(100, layer), make_tokens(100, layer, 1)
    paged = PagedLayer(layer, 16, 20)
    paged.step({"a": first})
    paged.share("a", "b", 4)
    both = torch.cat([first[:64], other[64:]])
    found = [paged.step({"b": part})[0] for part in (both[64:90], both[90:91], both[91:])]
    close(torch.cat(found), layer(both[None])[0, 64:])
    again = PagedLayer(layer, 16, 20)
    again.step({"a": first[:99]})
    close(again.step({"a": first[99:]})[0], layer(first[None])[0, 99:])


def test_bfloat16() -> None:
    """As far from fp32 as the layer in bfloat16 itself."""
    config = replace(SMALL, top_n=16)  # every block: rounding cannot change the selection
    exact = make_layer(config)
    layer = make_layer(config, dtype=torch.bfloat16)
    tokens = make_tokens(150, layer)
    expected = exact(tokens.float()[None])[0]
    theirs = (layer(tokens[None])[0].float() - expected).abs().max()
    paged = PagedLayer(layer, 32, 8)
    found = [paged.step({"a": part})[0] for part in (tokens[:140], *tokens[140:].split(1))]
    assert (torch.cat(found).float() - expected).abs().max() <= 2 * theirs + 1e-3


BAD: dict[str, tuple[NSAConfig, str]] = {
    "stride": (replace(SMALL, cmp_block_size=12, cmp_stride=12, sel_block_size=48), "cmp_stride"),
    "block": (replace(SMALL, sel_block_size=48), "sel_block_size"),
    "local": (replace(SMALL, num_local_blocks=0), "num_local_blocks"),
    "nothing to choose": (replace(SMALL, top_n=3), "top_n"),
}


@pytest.mark.parametrize(("config", "name"), BAD.values(), ids=BAD.keys())
def test_sizes_that_cannot_be_served(config: NSAConfig, name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: expected"):
        check_paged_spec(config.spec, 32)


def test_bad_arguments() -> None:
    layer = make_layer()
    paged = PagedLayer(layer, 32, 4)
    pages, made = paged.pages, paged.compression
    batch = PagedBatch(
        block_table=torch.zeros(1, 1, dtype=torch.int32),
        seq_lens=torch.tensor([3], dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, 3], dtype=torch.int32),
        num_decodes=0,
        num_decode_tokens=0,
        decode_query_len=1,
        max_query_len=3,
        max_seq_len=3,
    )
    q = torch.zeros(3, 4, 16)
    options = {"window_size": 20}
    with pytest.raises(ValueError, match="q: expected shape"):
        nsa_paged_attention(q[..., :8], pages, batch, SMALL.spec, made, **options)
    out = torch.empty(3, 2, 4, 16)
    with pytest.raises(ValueError, match="out: expected shape"):
        nsa_paged_attention(q, pages, batch, SMALL.spec, made, **options, out=out)
    out = torch.full((3, 3, 4, 16), float("nan"))
    decode = replace(batch, num_decodes=1, num_decode_tokens=3, decode_query_len=3, _derived={})
    for name in ("softmax_scale", "window_size"):
        wrong = {**options, name: 0}
        with pytest.raises(ValueError, match=name):
            nsa_paged_attention(q, pages, decode, SMALL.spec, made, **wrong, out=out)
        assert out.isnan().all(), name  # a GPU's decodes do not come to what else would refuse it
    problem = PagedProblem(q, pages, decode, SMALL.spec, made, 20, 0.25)
    spread = torch.stack((q, q), dim=-1)[..., 0]
    table = torch.zeros(1, 4, dtype=torch.int32)[:, ::2]
    for name, wrong in {
        "q": replace(problem, q=spread),
        "block_table": replace(problem, batch=replace(decode, block_table=table, _derived={})),
        "v_swa": replace(problem, pages=replace(pages, v_swa=pages.v_swa.mT)),
    }.items():
        with pytest.raises(NotImplementedError, match=f"^{name}: on a GPU the last dimension"):
            launch.decode(wrong, out)
    views = replace(pages, v_cmp=pages.v_cmp[:, :1])
    with pytest.raises(ValueError, match="v_cmp: expected shape"):
        nsa_paged_attention(q, views, batch, SMALL.spec, made, **options)
    assert made.phi_v is not None
    with pytest.raises(ValueError, match="phi_v: expected a hidden layer as wide as"):
        replace(made, phi_v=made.phi_v._replace(w1=made.phi_v.w1[:, :1]))
