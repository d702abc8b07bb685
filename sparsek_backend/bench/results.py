"""Result rows and their CSV file, which plots and comparisons read and nothing else."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from pydantic import TypeAdapter

from sparsek_backend.csv_file import write_csv_file


@dataclass(frozen=True)
class Row:
    """One provider on one case.  Numbers are None where nothing was timed.

    Args:
        op: registered op.
        case: workload name.
        spec: batch spec.
        provider: who computed it; `sparsek` is ours.
        status: `ok`, `gate failed`, `unavailable` or `error`; only `ok` rows are timed.
        detail: the gate's worst error and bound, or why there is no time.
        note: how the provider's work differs from ours.
        ms: median milliseconds.
        p20_ms: 20th percentile.
        p80_ms: 80th percentile.
        samples: timed samples.
        method: how the time was taken.
        tflops: TFLOP/s.
        tb_s: TB/s of the least bytes to move.
        roofline: least time by the measured limits over `ms`.
        peak_mib: peak device memory beyond inputs and outputs, MiB.
        params: the op's parameters, `name=value` joined by spaces.
        copy_tb_s: measured copy bandwidth of the device.
        matmul_tflops: measured matmul rate in the case's dtype.
        gpu: device name.
        driver: device driver.
        torch: torch version.
        triton: triton version.
        vllm: vLLM version.
        commit: commit of this project, `+` when it had local changes.
    """

    op: str
    case: str
    spec: str
    provider: str
    status: str
    detail: str = ""
    note: str = ""
    ms: float | None = None
    p20_ms: float | None = None
    p80_ms: float | None = None
    samples: int | None = None
    method: str = ""
    tflops: float | None = None
    tb_s: float | None = None
    roofline: float | None = None
    peak_mib: float | None = None
    params: str = ""
    copy_tb_s: float | None = None
    matmul_tflops: float | None = None
    gpu: str = ""
    driver: str = ""
    torch: str = ""
    triton: str = ""
    vllm: str = ""
    commit: str = ""

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What identifies a row within a file."""
        return self.op, self.case, self.spec, self.provider

    @property
    def is_timed(self) -> bool:
        """Whether the gate was green and a time was taken."""
        return self.status == "ok" and self.ms is not None


_ROW = TypeAdapter(Row)


def write_csv(path: Path, rows: Iterable[Row]) -> None:
    """Write rows, numbers at five significant digits."""
    write_csv_file(path, [asdict(row) for row in rows], digits=5)


def read_csv(path: Path) -> list[Row]:
    """Read rows that `write_csv` wrote.

    Raises:
        ValueError: the file is missing or its columns are not a result file's.
    """
    if not path.is_file():
        raise ValueError(f"results: expected a CSV file, got {str(path)!r} which does not exist")
    names = {field.name for field in fields(Row)}
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        missing = names - set(reader.fieldnames or ())
        if missing:
            raise ValueError(f"results: {path} lacks the columns {sorted(missing)}")
        found = ({name: record[name] for name in names if record[name]} for record in reader)
        return [_ROW.validate_python(row) for row in found]


def speedup(rows: Iterable[Row], ours: Row) -> dict[str, float]:
    """How many times faster ours is than each peer; empty unless both gates are green."""
    if not ours.is_timed or ours.ms is None:
        return {}
    peers = [row for row in rows if row.key[:3] == ours.key[:3] and row.provider != ours.provider]
    return {row.provider: row.ms / ours.ms for row in peers if row.is_timed and row.ms is not None}
