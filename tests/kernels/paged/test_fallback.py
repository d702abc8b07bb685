"""The SDPA fallback against a direct evaluation of each mask."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sparsek_kernels.fallback import FallbackMask, fallback_counts, paged_fallback, sdpa_fallback
from sparsek_kernels.paged import PagedBatch


def expected_attention(q, k, v, seen, bias=0.0, cap=None, sinks=None):
    group = q.shape[1] // k.shape[1]
    k, v = (t.double().repeat_interleave(group, 1) for t in (k, v))
    logits = torch.einsum("nhd,khd->hnk", q.double(), k) * q.shape[-1] ** -0.5
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    logits = (logits + bias).masked_fill(~seen, float("-inf"))
    weights = logits.exp()
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + sinks.double().exp().view(-1, 1, 1)
    weights = torch.where(total > 0, weights / total, 0.0)
    return torch.einsum("hnk,khd->nhd", weights, v)


def masks(rows: int, keys: int):
    i = torch.arange(keys - rows, keys)[:, None]
    j = torch.arange(keys)[None]
    return i, j


SLOPES = torch.tensor([0.5, 0.25, 0.1, 0.01])
CASES = {
    "alibi": {"alibi_slopes": SLOPES},
    "soft_cap": {"logits_soft_cap": 1.5},
    "sinks": {"sinks": torch.tensor([1.0, -1.0, 0.0, 2.0])},
    "encoder": {"causal": False},
    "encoder_window": {"causal": False, "window_size": 5},
    "window_soft_cap": {"window_size": 7, "logits_soft_cap": 2.0},
    "prefix": {"bidirectional_ranges": [[(2, 9)]]},
}


def reference(options, q, k, v):
    i, j = masks(q.shape[0], k.shape[0])
    seen = j <= i if options.get("causal", True) else torch.ones_like(j - i, dtype=torch.bool)
    window = options.get("window_size")
    if window:
        seen = seen & ((j - i).abs() < window)
    for low, high in options.get("bidirectional_ranges", [[]])[0]:
        seen = seen | ((i >= low) & (i <= high) & (j >= low) & (j <= high))
    bias = 0.0
    if "alibi_slopes" in options:
        bias = options["alibi_slopes"].double().view(-1, 1, 1) * (j - i)
    return expected_attention(
        q, k, v, seen, bias, options.get("logits_soft_cap"), options.get("sinks")
    )


@pytest.mark.parametrize("rows", [1, 12, 40])
@pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
def test_packed_and_paged(options: dict, rows: int) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(rows, 4, 16), torch.randn(40, 2, 16), torch.randn(40, 2, 16)
    expected = reference(options, q, k, v)
    fields = {name: x for name, x in options.items() if name != "bidirectional_ranges"}
    given = {"reason": "a test", "bidirectional_ranges": options.get("bidirectional_ranges")}
    mask = FallbackMask(**fields)
    packed = sdpa_fallback(q, k, v, mask, cu_seqlens_q=[0, rows], cu_seqlens_k=[0, 40], **given)
    torch.testing.assert_close(packed.double(), expected, atol=1e-5, rtol=1e-4)
    k_cache = torch.full((5, 2, 16, 16), float("nan"))
    v_cache = k_cache.clone()
    table = torch.tensor([[4, 1, 2, 0]], dtype=torch.int32)
    for token in range(40):
        page = table[0, token // 16]
        k_cache[page, :, token % 16], v_cache[page, :, token % 16] = k[token], v[token]
    batch = PagedBatch(
        block_table=table,
        seq_lens=torch.tensor([40]),
        cu_seqlens_q=torch.tensor([0, rows]),
        num_decodes=0,
        num_decode_tokens=0,
        decode_query_len=1,
        max_query_len=rows,
        max_seq_len=40,
    )
    paged = paged_fallback(q, k_cache, v_cache, batch, mask, **given)
    torch.testing.assert_close(paged.double(), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("head_major", [True, False], ids=["head by head", "token by token"])
@pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
def test_pages_on_a_device_stay_there(options: dict, head_major: bool) -> None:
    batch = PagedBatch(
        block_table=torch.zeros(1, 4, dtype=torch.int32),
        seq_lens=torch.tensor([40], dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, 12], dtype=torch.int32),
        num_decodes=0,
        num_decode_tokens=0,
        decode_query_len=1,
        max_query_len=12,
        max_seq_len=40,
    )
    ranges = options.get("bidirectional_ranges")
    with FakeTensorMode(allow_non_fake_inputs=True):  # refuses to mix devices, as a GPU does
        fields = {
            name: torch.empty(x.shape, device="meta") if isinstance(x, torch.Tensor) else x
            for name, x in options.items()
            if name != "bidirectional_ranges"
        }
        q, cache = torch.empty(12, 4, 16, device="meta"), torch.empty(5, 2, 16, 16, device="meta")
        if not head_major:
            cache = torch.empty(5, 16, 2, 16, device="meta").transpose(1, 2)
        table = torch.zeros(1, 4, dtype=torch.int32, device="meta")
        here = replace(batch, block_table=table, _derived={})
        mask = FallbackMask(**fields)
        found = paged_fallback(
            q, cache, cache, here, mask, reason="a test", bidirectional_ranges=ranges
        )
    assert (found.shape, found.device.type) == (q.shape, "meta")


@pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
def test_autocast_changes_nothing(options: dict) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(12, 4, 16), torch.randn(40, 2, 16), torch.randn(40, 2, 16)
    fields = {name: x for name, x in options.items() if name != "bidirectional_ranges"}
    offsets = {"cu_seqlens_q": [0, 12], "cu_seqlens_k": [0, 40]}
    given = {"bidirectional_ranges": options.get("bidirectional_ranges"), **offsets}
    wanted = sdpa_fallback(q, k, v, FallbackMask(**fields), reason="a test", **given)
    with torch.autocast("cpu", torch.bfloat16):
        found = sdpa_fallback(q, k, v, FallbackMask(**fields), reason="a test", **given)
    assert torch.equal(found, wanted)


def test_sequences_do_not_mix_and_empty_ones_work() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(9, 2, 16), torch.randn(9, 2, 16), torch.randn(9, 2, 16)
    offsets = [0, 4, 4, 9]
    mask = FallbackMask(logits_soft_cap=5.0)
    both = sdpa_fallback(q, k, v, mask, reason="a test", cu_seqlens_q=offsets, cu_seqlens_k=offsets)
    alone = sdpa_fallback(
        q[4:],
        k[4:],
        v[4:],
        mask,
        reason="a test",
        cu_seqlens_q=[0, 5],
        cu_seqlens_k=[0, 5],
    )
    torch.testing.assert_close(both[4:], alone)


def test_logged_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    q = torch.randn(3, 1, 16)
    before = fallback_counts().get("logged once", 0)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            sdpa_fallback(q, q, q, reason="logged once", cu_seqlens_q=[0, 3], cu_seqlens_k=[0, 3])
    assert fallback_counts()["logged once"] == before + 3
    assert sum("logged once" in record.message for record in caplog.records) == 1


def test_bad_offsets() -> None:
    q = torch.randn(3, 1, 16)
    with pytest.raises(ValueError, match="cu_seqlens_q: expected offsets from 0 to 3"):
        sdpa_fallback(q, q, q, reason="a test", cu_seqlens_q=[0, 4], cu_seqlens_k=[0, 3])
    with pytest.raises(ValueError, match="cu_seqlens_k: expected offsets from 0 to 3"):
        sdpa_fallback(q, q, q, reason="a test", cu_seqlens_q=[0, 1, 3], cu_seqlens_k=[0, 3, 2])
    with pytest.raises(ValueError, match="cu_seqlens_k: expected 2 offsets, got 3"):
        sdpa_fallback(q, q, q, reason="a test", cu_seqlens_q=[0, 3], cu_seqlens_k=[0, 1, 3])
