"""Checks that the layers of every kind make."""

from __future__ import annotations

import torch


def refuse_quantised_output(
    output_scale: torch.Tensor | None, output_block_scale: torch.Tensor | None
) -> None:
    """Refuse what vLLM passes where it fuses attention with the quantisation of its output.

    Raises:
        NotImplementedError: a scale was given.
    """
    if output_scale is not None or output_block_scale is not None:
        raise NotImplementedError(
            "output_scale: fused output quantisation is not supported; disable the "
            "attention-quantisation fusion pass"
        )
