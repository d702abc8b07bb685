"""Compare two result files row by row."""

from __future__ import annotations

from dataclasses import dataclass

from sparsek_backend.bench.registry import OURS
from sparsek_backend.bench.results import Row

Key = tuple[str, str, str, str]


@dataclass(frozen=True)
class Pair:
    """A row of both files: `ratio` is B's time over A's, None where either has no time."""

    key: Key
    a_ms: float | None
    b_ms: float | None
    ratio: float | None
    verdict: str
    regressed: bool


@dataclass(frozen=True)
class Comparison:
    """Rows of both files, and the keys that only one has."""

    pairs: list[Pair]
    only_a: list[Key]
    only_b: list[Key]

    @property
    def regressions(self) -> list[Pair]:
        """Pairs that got slower than the tolerance, or lost their green gate."""
        return [pair for pair in self.pairs if pair.regressed]


def compare_rows(a_rows: list[Row], b_rows: list[Row], tolerance: float) -> Comparison:
    """Match our rows by op, case and spec.

    Args:
        a_rows: the baseline.
        b_rows: what is judged.
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
    return Comparison(
        pairs=[_pair(a[key], b[key], tolerance) for key in common],
        only_a=[key for key in a if key not in b],
        only_b=[key for key in b if key not in a],
    )


def _pair(a: Row, b: Row, tolerance: float) -> Pair:
    if not a.is_timed or a.ms is None or not b.is_timed or b.ms is None:
        lost = a.is_timed and not b.is_timed
        verdict = f"{a.status} -> {b.status}"
        return Pair(a.key, a.ms, b.ms, None, verdict, lost)
    ratio = b.ms / a.ms
    if ratio > 1 + tolerance:
        return Pair(a.key, a.ms, b.ms, ratio, "slower", True)
    verdict = "faster" if ratio < 1 - tolerance else "same"
    return Pair(a.key, a.ms, b.ms, ratio, verdict, False)
