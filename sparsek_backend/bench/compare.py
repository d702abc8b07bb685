"""Compare two result files row by row."""

from __future__ import annotations

from dataclasses import dataclass

from sparsek_backend.bench.registry import OURS
from sparsek_backend.bench.results import Row


@dataclass(frozen=True)
class Pair:
    """A row of either file: `ratio` is B's time over A's, None where one has no time.

    It regressed if it is slower than the tolerance allows, or lost its green gate.
    """

    key: tuple[str, str, str, str]
    verdict: str
    a_ms: float | None = None
    b_ms: float | None = None
    ratio: float | None = None
    regressed: bool = False


def compare_rows(a_rows: list[Row], b_rows: list[Row], tolerance: float) -> list[Pair]:
    """Our rows matched by op, case and spec, those of one file last.

    Args:
        tolerance: slower by more than this share is a regression; 0.05 is five per cent.

    Raises:
        ValueError: a negative tolerance, or no row in common.
    """
    if tolerance < 0:
        raise ValueError(f"tolerance: expected a number >= 0, got {tolerance}")
    a, b = ({row.key: row for row in rows if row.provider == OURS} for rows in (a_rows, b_rows))
    common = [key for key in a if key in b]
    if not common:
        raise ValueError(f"results: the two files have no row of {OURS!r} in common")
    return [
        *(_pair(a[key], b[key], tolerance) for key in common),
        *(Pair(key, "only in A", a_ms=row.ms) for key, row in a.items() if key not in b),
        *(Pair(key, "only in B", b_ms=row.ms) for key, row in b.items() if key not in a),
    ]


def _pair(a: Row, b: Row, tolerance: float) -> Pair:
    if not a.is_timed or a.ms is None or not b.is_timed or b.ms is None:
        lost = a.is_timed and not b.is_timed
        return Pair(a.key, f"{a.status} -> {b.status}", a.ms, b.ms, None, lost)
    ratio = b.ms / a.ms
    slower = ratio > 1 + tolerance
    verdict = "slower" if slower else "faster" if ratio < 1 - tolerance else "same"
    return Pair(a.key, verdict, a.ms, b.ms, ratio, slower)
