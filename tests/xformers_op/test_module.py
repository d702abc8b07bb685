"""SparseKAttention: masks, modes, and the contract of xFormers' components."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.xformers_op.cases import ab, assert_close, reference

from sparsek_backend.patterns import BlockSparsePattern  # isort: skip
from sparsek_backend.xformers_op import (  # isort: skip
    AttentionMask,
    BlockSparseMask,
    SinkWindowMask,
    SparseKAttention,
)


def _inputs(*heads: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 20, *heads, 16) for _ in range(3)]


@pytest.mark.parametrize("heads", [(), (3,), (2, 3)], ids=["3-D", "4-D", "5-D"])
def test_own_masks(heads: tuple[int, ...]) -> None:
    q, k, v = _inputs(*heads)
    causal = ab.LowerTriangularMask()
    assert_close("full", SparseKAttention()(q, k, v), reference(q, k, v, None)[0], 2e-5)
    found = SparseKAttention(causal=True)(q, k, v)
    assert_close("causal", found, reference(q, k, v, causal)[0], 2e-5)
    local = SparseKAttention(causal=True, num_sink=2, window_size=5)
    assert_close("local", local(q, k, v), reference(q, k, v, SinkWindowMask(2, 5))[0], 2e-5)


def _masks() -> dict[str, Any]:
    lower = torch.ones(20, 20, dtype=torch.bool).tril()
    additive = torch.zeros(20, 20).masked_fill(~lower, float("-inf"))
    return {
        "bias": ab.LowerTriangularMask(),
        "causal": AttentionMask.make_causal(20),
        "pattern": AttentionMask.from_bool(lower),
        "additive": AttentionMask(additive),
        "batched": AttentionMask(additive.expand(2, 20, 20)),
        "boolean tensor": lower,
        "floating tensor": additive,
        "longer": AttentionMask.make_causal(31),
    }


@pytest.mark.parametrize("heads", [(), (3,)], ids=["3-D", "4-D"])
@pytest.mark.parametrize("name", _masks())
def test_mask_arguments(name: str, heads: tuple[int, ...]) -> None:
    q, k, v = _inputs(*heads)
    found = SparseKAttention()(q, k, v, _masks()[name])
    assert_close(name, found, reference(q, k, v, ab.LowerTriangularMask())[0], 2e-5)


def test_masks_join_the_modules_own() -> None:
    q, k, v = _inputs()
    padding = torch.ones(2, 1, 20, dtype=torch.bool)
    padding[0, :, :4] = False
    found = SparseKAttention(causal=True, num_sink=1, window_size=6)(q, k, v, padding)
    own = SinkWindowMask(1, 6).materialize((20, 20)).double()
    wanted = own + torch.zeros(2, 20, 20).double().masked_fill(~padding, float("-inf"))
    assert_close("joined", found, reference(q, k, v, wanted)[0], 2e-5)


def test_block_sparse_mask_of_heads_in_the_batch() -> None:
    q, k, v = _inputs()
    blocks = torch.tensor([[True, False], [True, True]])
    mask = BlockSparseMask(BlockSparsePattern.from_mask(blocks, 16), causal=True)
    found = SparseKAttention()(q, k, v, mask)
    wanted = mask.materialize((2, 20, 20)).double()
    assert_close("3-D", found, reference(q, k, v, wanted)[0], 2e-5)


def test_gradients_reach_the_inputs() -> None:
    tensors = [x.requires_grad_() for x in _inputs()]
    SparseKAttention(causal=True)(*tensors).sum().backward()
    assert all(x.grad is not None and x.grad.abs().sum() > 0 for x in tensors)


def test_dropout_only_while_training() -> None:
    q, k, v = _inputs()
    module = SparseKAttention(dropout=0.5)
    assert not torch.equal(module(q, k, v), module(q, k, v))
    module.eval()
    assert torch.equal(module(q, k, v), module(q, k, v))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"dropout": 1.5}, "dropout"),
        ({"window_size": 4}, "window_size"),
        ({"causal": True, "num_sink": 4}, "num_sink"),
        ({"causal": True, "window_size": 0}, "window_size"),
    ],
)
def test_invalid_settings(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SparseKAttention(**fields)


def test_invalid_masks() -> None:
    q, k, v = _inputs()
    with pytest.raises(TypeError, match="att_mask"):
        SparseKAttention()(q, k, v, "causal")
    with pytest.raises(TypeError, match=r"att_mask: .* floating tensor, got torch.int64"):
        SparseKAttention(causal=True)(q, k, v, torch.ones(20, 20, dtype=torch.int64))
    with pytest.raises(TypeError, match="key_padding_mask"):
        SparseKAttention()(q, k, v, key_padding_mask=torch.ones(2, 20).bool())
    with pytest.raises(TypeError, match="window"):
        SparseKAttention(causal=True, window=5)
    with pytest.raises(ValueError, match="att_mask"):
        SparseKAttention(causal=True)(q, k, v, ab.LowerTriangularMask())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(), (3,)], ids=["3-D", "4-D"])
def test_masks_of_another_shape(heads: tuple[int, ...], causal: bool) -> None:
    module, wide = SparseKAttention(causal=causal), (1,) * max(len(heads), 1)
    for shape in ((12, 20), (5, 20, 20), (2, *wide, 20, 7), (1, 1, 1, 1, 20, 20)):
        with pytest.raises(ValueError, match=r"att_mask: expected a shape that .* \[2, "):
            module(*_inputs(*heads), torch.ones(shape, dtype=torch.bool))


def test_contract_of_the_components_package() -> None:
    module = SparseKAttention()
    assert isinstance(module, torch.nn.Module)
    assert module.supports_attention_mask
    assert not module.requires_head_dimension
    components = pytest.importorskip(
        "xformers.components.attention", reason="xFormers > 0.0.33 has no components package"
    )
    if not hasattr(components, "build_attention"):
        pytest.skip("xFormers > 0.0.33 has no attention registry")
    assert isinstance(module, components.Attention)
    built = components.build_attention(
        {"name": "sparsek", "dropout": 0.0, "causal": True, "num_sink": 1, "window_size": 4}
    )
    assert isinstance(built, SparseKAttention)
    assert built.local_mask == SinkWindowMask(1, 4)
