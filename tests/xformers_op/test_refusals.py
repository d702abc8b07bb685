"""What the pair does not support it refuses with a reason, and never computes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.xformers_op.cases import DECODING, ab, fmha, inputs

from sparsek_backend.patterns import BlockSparsePattern  # isort: skip
from sparsek_backend.xformers_op import BlockSparseMask, BwOp, FwOp, SinkWindowMask  # isort: skip


class _Derived(SinkWindowMask):
    """A subclass may mean anything: types match exactly."""


def _reasons(op: Any = FwOp, *, dtype: torch.dtype = torch.float32, **fields: Any) -> list[str]:
    shape = {"dim": fields.pop("dim", 16), "value_dim": fields.pop("value_dim", None)}
    q, k, v = inputs(64, 64, dtype=dtype, **shape)
    found: list[str] = op.not_supported_reasons(fmha.Inputs(q, k, v, **fields))
    return found


def _with_gradient() -> Any:
    return ab.LowerTriangularMaskWithTensorBias(torch.zeros(1, 3, 64, 64, requires_grad=True))


def _blocks(*shape: int) -> BlockSparseMask:
    return BlockSparseMask(BlockSparsePattern.from_mask(torch.ones(shape).bool(), 16), True)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"attn_bias": ab.LocalAttentionFromBottomRightMask(3, 1)}, "window_right=1"),
        ({"attn_bias": _Derived(1, 2)}, "attn_bias type"),
        ({"attn_bias": _with_gradient()}, "passes no gradient"),
        ({"attn_bias": torch.zeros(1, 3, 64, 64, dtype=torch.int32)}, "floating"),
        ({"attn_bias": ab.BlockDiagonalMask.from_seqlens([60])}, "covers 60 queries"),
        ({"attn_bias": ab.BlockDiagonalMask.from_seqlens([64], [60])}, "covers 60 keys"),
        ({"attn_bias": _blocks(4, 5)}, "pattern: expected 4 x 4 blocks of 16"),
        ({"attn_bias": _blocks(2, 4, 4)}, "pattern: expected a number of patterns that divides 3"),
        ({"attn_bias": _blocks(4, 4), "p": 0.1}, "dropout with a block-sparse pattern"),
        ({"dtype": torch.float64}, "torch.float64"),
        ({"dim": 320}, "> 256"),
        ({"value_dim": 320}, "> 256"),
        ({"output_dtype": torch.float16}, "output_dtype"),
        ({"scale": -1.0}, "scale=-1.0"),
        ({"scale": float("nan")}, "scale=nan"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_reasons(fields: dict[str, Any], words: str) -> None:
    for op in (FwOp, BwOp):
        reasons = _reasons(op, **fields)
        assert any(words in reason for reason in reasons), reasons


def test_dropout_over_pages_is_refused() -> None:
    make, num_q, rows = DECODING["paged-causal"]
    q, k, v = inputs(num_q, rows)
    found = FwOp.not_supported_reasons(fmha.Inputs(q, k, v, make(q.device), p=0.1))
    assert found == ["dropout with paged keys"]


_CPU = torch.device("cpu")
_Q, _K = ab._SeqLenInfo, ab._PaddedSeqLenInfo


def _padded(lengths: list[int], padding: int) -> Any:
    """Key lengths that ``from_seqlens_padded`` would refuse."""
    return replace(
        _K.from_seqlens_padded([1] * len(lengths), padding, device=_CPU), seqlen_py=lengths
    )


def _gappy(starts: list[int], lengths: list[int]) -> Any:
    queries = [2] * len(lengths)
    return ab.BlockDiagonalGappyKeysMask.from_seqlens(queries, starts, lengths, device=_CPU)


def _paged(table: list[list[int]], *lengths: int) -> Any:
    mask = ab.PagedBlockDiagonalPaddedKeysMask.from_seqlens(
        [2] * len(lengths), [1] * len(lengths), torch.tensor(table).int(), 32, device=_CPU
    )
    return replace(mask, k_seqinfo=replace(mask.k_seqinfo, seqlen_py=list(lengths)))


def _local(mask: Any, window: int) -> Any:
    return ab.BlockDiagonalCausalLocalAttentionPaddedKeysMask(
        mask.q_seqinfo, mask.k_seqinfo, window
    )


_TWO = _Q.from_seqlens([2, 2], device=_CPU)
MISFITS: dict[str, tuple[Any, int, str]] = {
    **{
        name: (make(_CPU), rows - 1, "page 7, key has 7" if "paged" in name else "key has 255")
        for name, (make, _, rows) in DECODING.items()
        if name != "paged-causal-few-keys"  # whose last sequence has one page of the two
    },
    "padded-by-half": (DECODING["padded"][0](_CPU), 128, "covers 256 keys, key has 128"),
    "paged-by-most": (DECODING["paged"][0](_CPU), 32, "a sequence of 60 keys in pages for 32"),
    "padding": (
        ab.BlockDiagonalPaddedKeysMask(_TWO, _padded([9, 17], 16)),
        32,
        "17 keys in a padd",
    ),
    "past-the-last-start": (_gappy([0, 4, 8], [4, 30]), 32, "covers 34 keys, key has 32"),
    "before-the-first-key": (_gappy([-3, 4, 8], [4, 3]), 32, "a sequence from -3 to 1"),
    "negative-length": (_gappy([0, 4, 8], [4, -1]), 32, "a sequence from 4 to 3"),
    "more-keys-than-queries": (
        ab.BlockDiagonalMask(_TWO, _Q.from_seqlens([8] * 4, device=_CPU)),
        32,
        "2 sequences of queries and 4 of keys",
    ),
    "table-too-narrow": (_paged([[0], [1]], 5, 33), 64, "a sequence of 33 keys in pages for 32"),
    "table-too-short": (_paged([[0, 1]], 5, 33), 64, "1 rows for 2 sequences"),
    "table-past-the-keys": (_paged([[0, 9], [1, 2]], 5, 33), 64, "names page 2, key has 2 pages"),
    "negative-page": (_paged([[0, 9], [1, -1]], 5, 33), 64, "names page -1"),
    "no-window": (_local(DECODING["padded"][0](_CPU), 0), 256, "a window of 0 keys"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_masks_that_do_not_fit_the_tensors_are_refused(name: str) -> None:
    bias, rows, words = MISFITS[name]
    q, k, v = inputs(bias.q_seqinfo.seqstart_py[-1], rows)
    with pytest.raises(ValueError, match=words):
        fmha.memory_efficient_attention_forward(q, k, v, bias, op=FwOp)


@pytest.mark.parametrize("name", [name for name in MISFITS if "page " not in MISFITS[name][2]])
def test_masks_on_a_device_are_checked_by_what_the_host_knows(name: str) -> None:
    """Tensors of the ``meta`` device stand for a GPU's: whoever reads them fails."""
    bias, rows, words = MISFITS[name]
    q, k, v = (x.to("meta") for x in inputs(bias.q_seqinfo.seqstart_py[-1], rows))
    found = FwOp.not_supported_reasons(fmha.Inputs(q, k, v, bias.to(torch.device("meta"))))
    assert any(words in reason for reason in found), found


def test_keys_past_the_mask_are_not_read() -> None:
    for name in DECODING:
        make, num_q, rows = DECODING[name]
        q, k, v = inputs(num_q, rows)
        longer = [torch.cat([x, torch.full_like(x, float("nan"))], 1) for x in (k, v)]
        found, wanted = (
            fmha.memory_efficient_attention_forward(q, *kv, make(q.device), op=FwOp)
            for kv in (longer, (k, v))
        )
        assert torch.equal(found, wanted), name


def test_quantised_inputs_are_refused() -> None:
    class Quantised(fmha.Inputs):  # type: ignore[misc]
        pass

    q, k, v = inputs(64, 64)
    assert "Quantised" in FwOp.not_supported_reasons(Quantised(q, k, v))[0]


def test_xformers_raises_with_our_reason() -> None:
    q, k, v = inputs(64, 64)
    with pytest.raises(ValueError, match="window_right=1"):
        fmha.memory_efficient_attention(
            q, k, v, ab.LocalAttentionFromBottomRightMask(3, 1), op=(FwOp, BwOp)
        )


def test_decoding_biases_have_no_gradient() -> None:
    make, num_q, rows = DECODING["padded-causal"]
    q, k, v = inputs(num_q, rows)
    bias = make(q.device)
    assert any("attn_bias type" in reason for reason in _reasons(BwOp, attn_bias=bias))
    out = fmha.memory_efficient_attention(q.requires_grad_(), k, v, bias, op=(FwOp, BwOp))
    with pytest.raises(NotImplementedError, match="for decoding"):
        out.sum().backward()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((-1, 4), ValueError),
        ((0, 0), ValueError),
        ((True, 4), TypeError),
        ((0, 2.0), TypeError),
    ],
)
def test_sink_window_mask_checks_its_fields(
    arguments: tuple[Any, Any], error: type[Exception]
) -> None:
    with pytest.raises(error, match=r"num_sink|window_size"):
        SinkWindowMask(*arguments)


def test_sink_window_mask_by_hand() -> None:
    seen = SinkWindowMask(1, 2).materialize((3, 5)).isfinite().int().tolist()
    assert seen == [[1, 1, 1, 0, 0], [1, 0, 1, 1, 0], [1, 0, 0, 1, 1]]
    assert SinkWindowMask(1, 2).materialize((2, 4, 3, 5), dtype=torch.float16).shape == (2, 4, 3, 5)


def test_block_sparse_mask_checks_its_fields() -> None:
    pattern = BlockSparsePattern.local((2, 2), 16, window=1)
    for arguments, words in (
        ((torch.ones(2, 2),), "pattern: expected a BlockSparsePattern, got Tensor"),
        ((pattern, 1), "causal: expected a bool, got int"),
    ):
        with pytest.raises(TypeError, match=words):
            BlockSparseMask(*arguments)


def test_block_sparse_mask_by_hand() -> None:
    blocks = torch.tensor([[[True, False]], [[False, True]]])
    mask = BlockSparseMask(BlockSparsePattern.from_mask(blocks, 16), causal=True)
    seen = mask.materialize((3, 4, 2, 18), dtype=torch.float16).isfinite()
    assert seen.shape == (3, 4, 2, 18)
    assert seen[0, 0].int().tolist() == seen[2, 1].int().tolist() == [[1] * 16 + [0, 0]] * 2
    assert seen[0, 3].int().tolist() == [[0] * 16 + [1, 0], [0] * 16 + [1, 1]]
    assert torch.equal(mask.materialize((3, 2, 2, 2, 18)).isfinite().flatten(1, 2), seen)
    with pytest.raises(ValueError, match="expected 1 x 2 blocks of 16, got 2 queries and 40"):
        mask.materialize((1, 2, 2, 40))
    with pytest.raises(ValueError, match="divisible by 2 patterns"):
        mask.materialize((1, 3, 2, 18))


def test_block_sparse_mask_moves_its_pattern() -> None:
    mask = _blocks(2, 2)
    assert mask.to("cpu").pattern is mask.pattern
    assert mask.to(torch.device("cpu")).causal
