"""Rotary position embedding (arXiv 2104.09864) in the half-split layout of Llama checkpoints."""

from __future__ import annotations

from typing import Any

import torch

from sparsek_kernels.common.device import plain
from sparsek_kernels.common.operators import new_like, runs_kernels


def rotary_frequencies(
    head_dim: int,
    theta: float,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> torch.Tensor:
    """Angle per position of each pair: ``theta ** (-2 i / D)``, ``[D / 2]``.

    Args:
        head_dim: elements of a head, D, even.
        theta: base of the frequencies.
        dtype: fp32, or fp64 for fp64 inputs.
        device: where the result lives.
    """
    half = head_dim // 2
    index = torch.arange(half, device=device, dtype=dtype)
    base = torch.full((), theta, dtype=dtype, device=device)  # no copy from the host: it would wait
    return torch.pow(base, -index / half)


def rotate(
    x: torch.Tensor, positions: torch.Tensor, frequencies: torch.Tensor, sign: int = 1
) -> torch.Tensor:
    """Rotate the pairs ``(x[i], x[i + D / 2])`` by ``position * frequencies[i]``; differentiable.

    One kernel on CUDA; torch operations elsewhere, and where a compiler or a transform traces them.

    Args:
        x: ``[B, N, H, D]``, any floating dtype; computed in the dtype of ``frequencies``.
        positions: ``[N]`` or ``[B, N]`` integers; negative ones rotate back.
        frequencies: ``[D / 2]`` of :func:`rotary_frequencies`.
        sign: 1, or -1 to rotate by negative positions.

    Returns:
        The rotated tensor in the dtype of ``x``.
    """
    if runs_kernels(x) and plain(x):
        rotated: torch.Tensor = _Rotation.apply(x, positions, frequencies, sign)  # type: ignore[no-untyped-call]
        return rotated
    compute = frequencies.dtype
    angle = (sign * positions).to(compute)[..., None] * frequencies  # [(B,) N, D / 2]
    cos, sin = angle.cos()[..., None, :], angle.sin()[..., None, :]
    first, second = x.to(compute).split(x.shape[-1] // 2, dim=-1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return turned.to(x.dtype)


class _Rotation(torch.autograd.Function):
    """The rotation on a GPU; its gradient is rotated back."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, positions: torch.Tensor, frequencies: torch.Tensor, sign: int
    ) -> torch.Tensor:
        from sparsek_kernels.common.tape import replayed
        from sparsek_kernels.nsa.compress.launch_rotary import rotate_into

        ctx.save_for_backward(positions, frequencies)
        ctx.sign = sign

        def compute() -> tuple[torch.Tensor]:
            out = new_like(x)
            rotate_into(out, x, positions, frequencies, sign)
            return (out,)

        with torch.cuda.device_of(x):
            return replayed((x, positions, frequencies), ("rotary", sign), compute)[0]

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        positions, frequencies = ctx.saved_tensors
        return rotate(dout, positions, frequencies, -ctx.sign), None, None, None
