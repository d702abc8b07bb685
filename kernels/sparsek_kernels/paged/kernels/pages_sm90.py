"""What the kernels for Hopper say of a page that a sequence does not have."""

from __future__ import annotations

from triton.experimental.gluon import language as gl

NO_ROW: gl.constexpr = gl.constexpr(0x70000000)
