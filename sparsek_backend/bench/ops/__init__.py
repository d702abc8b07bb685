"""The ops that `sparsek bench kernels` measures; importing a module registers its ops."""

from __future__ import annotations

from sparsek_backend.bench.registry import BenchOp, registered


def all_ops() -> list[BenchOp]:
    """Every op, by name."""
    return list(_ops().values())


def get_op(name: str) -> BenchOp:
    """The op of that name; ValueError that lists the known ones otherwise."""
    ops = _ops()
    if name not in ops:
        raise ValueError(f"op: expected one of {', '.join(ops)}, got {name!r}")
    return ops[name]


def _ops() -> dict[str, BenchOp]:
    from sparsek_backend.bench.ops import block_sparse, nsa_decode, paged, sink_window  # noqa: F401

    return registered()
