"""Types of the settings' fields: each says what a value must be, in one message."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

from sparsek_kernels.paged.policy import CELL, MOST_BLOCKS
from sparsek_kernels.paged.sample import MOST_CELLS

MAX_TOKENS = 2**31 - 1
"""Positions are 32-bit integers."""


def _no_booleans(value: object) -> object:
    """``true`` is an ``int`` to Python, but never a count of tokens."""
    if isinstance(value, bool):
        raise ValueError("expected an integer, got a boolean")
    return value


def _layer_count_or_indices(value: object) -> object:
    """Check ``dense_layers`` as a whole, so that a mistake has one message."""
    if isinstance(value, str) and value.strip().isdecimal():
        value = int(value)
    members = value if isinstance(value, list | tuple) else (value,)
    if not all(isinstance(x, int) and not isinstance(x, bool) and x >= 0 for x in members):
        raise ValueError(
            "expected the number of first layers that attend everything, or a list of layer "
            "indices such as [0, 1, 5]; each is an integer from 0"
        )
    return value


_Integer = Annotated[int, BeforeValidator(_no_booleans)]
Count = Annotated[_Integer, Field(ge=0, le=MAX_TOKENS)]
Positive = Annotated[_Integer, Field(gt=0, le=MAX_TOKENS)]
Pairs = Annotated[_Integer, Field(ge=2, le=CELL * MOST_CELLS)]
Blocks = Annotated[_Integer, Field(gt=0, le=MOST_BLOCKS)]
Layers = Annotated[
    int | tuple[int, ...], BeforeValidator(_layer_count_or_indices), Field(examples=[2, [0, 1, 5]])
]
