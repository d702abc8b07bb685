"""What a page keeps of each complete segment of 64 tokens, for one KV head: a record.

A record lies in the page that holds its 64 keys, one a segment in their order.  Sections, for
``D`` channels (``11.25 D + 36`` bytes, rounded up to 16):

| section | byte | what |
| --- | --- | --- |
| levels | 0 | ``[32, D / 4]``: a sign and a size of each channel of a vector, the mean of 2 keys less the segment's |
| mean | 8 D | ``[D]`` bf16: the segment's mean key |
| spread | 10 D | ``[D / 2]`` e4m3: root of the keys' variance about their vector, one a RoPE pair |
| value | 10.5 D | ``[D / 2]``: the mean value in 4 bits a channel |
| pairs | 11 D | ``[D / 4]``: the size of each RoPE pair: 4 bits, steps below the largest |
| scales | 11.25 D | ``[32]``: each vector's size, 4 bits of exponent and 4 of mantissa |
| base | 11.25 D + 32 | the largest pair's size: 7 bits of exponent, 1 of mantissa |
| value scale | 11.25 D + 34 | fp16 |

Channels ``d`` and ``d + D / 2`` are a RoPE pair.  Byte ``b`` of a row of levels has the channels
``b + p D / 4``: of channel ``p`` the sign in bit ``7 - p`` and the size, 1 or 4, in bit ``3 - p``.
Byte ``b`` of the value has ``b`` and ``b + D / 2``; byte ``b`` of the pairs has the pairs ``b`` and
``b + D / 4``.
"""

from __future__ import annotations

SEGMENT = 64
"""Tokens of a record."""
CELL = VECTOR = 2
"""Keys that are chosen together, which share one vector."""
VECTORS = SEGMENT // VECTOR
"""Vectors of a record."""

ALIGNMENT = 16


def record_bytes(head_dim: int) -> int:
    """Bytes of a record."""
    return -(-(45 * head_dim // 4 + 36) // ALIGNMENT) * ALIGNMENT
