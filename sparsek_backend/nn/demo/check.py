"""Whether the demo's sparse attention computes what it should, before its speed counts."""

from __future__ import annotations

import torch

from sparsek_backend.nn.demo.model import ModelConfig, sparse_attention
from sparsek_kernels import nsa_attention

LONGEST = 4096
"""Tokens up to which attention is checked: long enough for the kernels of long sequences."""
BOUND = 1e-2
"""Largest relative error, by norms, of an output or gradient in bf16."""


def check_attention(config: ModelConfig, length: int, device: torch.device) -> float:
    """Compare attention of a fresh layer of the demo with fp64, which runs torch operations.

    Inputs are random and in the dtype of training; fp64 takes their selection.

    Args:
        config: sizes of the layer.
        length: tokens of the sequence.
        device: where to run.

    Returns:
        The largest relative error of the output and of the gradients of queries, gates and every
        branch's keys and values.

    Raises:
        FloatingPointError: an error above ``BOUND``.
    """
    on_gpu = device.type == "cuda"
    with torch.random.fork_rng([device] if on_gpu else []):
        torch.manual_seed(0)
        layer = sparse_attention(config, device=device)
        hidden = torch.randn(1, length, config.hidden_size, device=device)
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16, enabled=on_gpu):
            inputs = layer.attention_inputs(hidden)
        upstream = torch.randn_like(inputs["q"])
    tensors = {name: x for name, x in inputs.items() if isinstance(x, torch.Tensor)}
    leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}
    exact = {name: x.detach().double().requires_grad_() for name, x in tensors.items()}
    out, chosen = nsa_attention(**{**inputs, **leaves}, return_block_indices=True)
    given = {**inputs, **exact, "block_indices": chosen}
    wanted, _ = nsa_attention(**given, return_block_indices=True)
    found = torch.autograd.grad(out, list(leaves.values()), upstream)
    expected = torch.autograd.grad(wanted, list(exact.values()), upstream.double())
    names = ("output", *(f"gradient of {name}" for name in leaves))
    worst = 0.0
    for name, have, need in zip(names, (out, *found), (wanted, *expected), strict=True):
        distance, size = (float(x.detach().norm()) for x in (have.double() - need, need))
        error = distance / max(size, 1e-30)
        if not error <= BOUND:
            raise FloatingPointError(
                f"nsa: {name}: expected fp64's over {length} tokens within {BOUND:g} (relative), "
                f"got {error:.1e}; nothing is timed"
            )
        worst = max(worst, error)
    return worst
