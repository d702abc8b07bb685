"""What a trained model of the demo attends to: inputs and selections for benchmarks.

    inputs = torch.load("inputs.pt")                  # `sparsek train-demo --save-inputs inputs.pt`
    nsa_attention(inputs["q"], inputs["k"], inputs["v"], ...)
    selected_attention(q, k, v, inputs["block_indices"])

The tensors of a file are bf16 on the CPU: ``q [1, N, Hq, D]``, ``k``, ``v``, ``k_swa``, ``v_swa``
``[1, N, Hkv, D]``, ``k_cmp``, ``v_cmp [1, C, Hkv, D]``, ``g_cmp``, ``g_slc``, ``g_swa [1, N, Hq]``;
``block_indices [1, N, Hkv, top_n]`` is int32.  Every KV head, with its group of query heads, is
taken from another layer or another sequence.
"""

from __future__ import annotations

from pathlib import Path

import torch

from sparsek_backend.nn.demo.data import make_batch
from sparsek_backend.nn.demo.model import Block
from sparsek_backend.nn.demo.train import EVAL_STEP, Trainer
from sparsek_backend.nn.native_sparse_attention import NativeSparseAttention
from sparsek_kernels import nsa_attention

SPAN = 64  # neighbouring tokens whose blocks are counted together


@torch.no_grad()
def trained_inputs(trainer: Trainer, length: int, sequences: int) -> dict[str, torch.Tensor]:
    """Attention inputs and selections of every sparse layer over unseen sequences.

    Args:
        trainer: holds the model.
        length: tokens of a sequence.
        sequences: how many.

    Returns:
        The tensors of a file (see above) on the trainer's device, with ``Hkv = layers * sequences``
        times the KV heads of a layer.

    Raises:
        ValueError: the model is dense.
    """
    if trainer.kind != "nsa":
        raise ValueError(f"trainer: expected a model of kind 'nsa', got {trainer.kind!r}")
    config = trainer.config
    tokens = make_batch(config.task, sequences, length, config.seed, EVAL_STEP).tokens
    seen: list[dict[str, torch.Tensor]] = []

    def capture(layer: NativeSparseAttention, hidden: tuple[torch.Tensor]) -> None:
        inputs = layer.attention_inputs(hidden[0])
        _, indices = nsa_attention(**inputs, return_block_indices=True)
        found = {name: x for name, x in inputs.items() if isinstance(x, torch.Tensor)}
        seen.append({**found, "block_indices": indices})

    blocks = [block for block in trainer.model.blocks if isinstance(block, Block)]
    hooks = [block.attention.register_forward_pre_hook(capture) for block in blocks]
    try:
        for row in tokens.split(1):
            trainer.logits(row.to(trainer.device))
    finally:
        for hook in hooks:
            hook.remove()
    stacked = {name: torch.cat([part[name] for part in seen], dim=2) for name in seen[0]}
    indices = stacked.pop("block_indices")
    return {**{name: x.bfloat16() for name, x in stacked.items()}, "block_indices": indices}


def save_inputs(trainer: Trainer, path: Path, length: int, sequences: int) -> None:
    """Write :func:`trained_inputs` for ``torch.load``."""
    tensors = trained_inputs(trainer, length, sequences)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({name: x.cpu() for name, x in tensors.items()}, path)


def overlap(block_indices: torch.Tensor) -> dict[str, float]:
    """Share of selected blocks that neighbouring tokens have in common.

    Args:
        block_indices: ``[B, N, Hkv, S]``, ``-1`` where a token selected fewer.

    Returns:
        ``shared``: the share of a token's blocks that the token before selected too; ``union``:
        distinct blocks that ``SPAN`` neighbours selected together, per block of one of them.
        Both over tokens with ``S`` blocks; NaN where there are none.
    """
    batch, length, heads, slots = block_indices.shape
    chosen = torch.zeros(batch, heads, length, int(block_indices.max()) + 2, dtype=torch.bool)
    by_head = block_indices.cpu().long().transpose(1, 2) + 1  # column 0 takes the -1
    chosen.scatter_(3, by_head, True)
    chosen = chosen[..., 1:]
    full = (by_head > 0).all(-1)
    pairs = full[:, :, 1:] & full[:, :, :-1]
    both = (chosen[:, :, 1:] & chosen[:, :, :-1]).sum(-1)[pairs]
    whole = length // SPAN * SPAN
    spans = chosen[:, :, :whole].unflatten(2, (-1, SPAN)).any(3).sum(-1)
    complete = full[:, :, :whole].unflatten(2, (-1, SPAN)).all(-1)
    return {
        "shared": float(both.double().mean()) / slots,
        "union": float(spans[complete].double().mean()) / slots,
    }
