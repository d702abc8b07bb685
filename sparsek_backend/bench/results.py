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
    """One provider on one case.  Numbers are None where nothing was timed."""

    op: str
    case: str  # name of the workload
    spec: str
    provider: str  # who computed it; `sparsek` is ours
    status: str  # `ok`, `gate failed`, `unavailable` or `error`; only `ok` rows are timed
    detail: str = ""  # the gate's worst error and bound, or why there is no time
    note: str = ""  # how the provider's work differs from ours
    ms: float | None = None  # median milliseconds
    p20_ms: float | None = None  # 20th percentile
    p80_ms: float | None = None  # 80th percentile
    samples: int | None = None  # timed samples
    method: str = ""  # how the time was taken
    tflops: float | None = None
    tb_s: float | None = None  # TB/s of the least bytes to move
    roofline: float | None = None  # least time by the measured limits over `ms`
    peak_mib: float | None = None  # peak device memory beyond inputs and outputs, MiB
    params: str = ""  # the op's parameters, `name=value` joined by spaces
    copy_tb_s: float | None = None  # measured copy bandwidth of the device
    matmul_tflops: float | None = None  # measured matmul rate in the case's dtype
    gpu: str = ""
    driver: str = ""
    torch: str = ""
    triton: str = ""
    vllm: str = ""
    commit: str = ""  # commit of this project, `+` when it had local changes

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
        ValueError: the file is missing or cut off, or its columns are not a result file's.
    """
    if not path.is_file():
        raise ValueError(f"results: expected a CSV file, got {str(path)!r} which does not exist")
    names = {field.name for field in fields(Row)}
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        missing = names - set(reader.fieldnames or ())
        if missing:
            raise ValueError(f"results: {path} lacks the columns {sorted(missing)}")
        found = []
        for record in reader:
            if None in record.values():
                raise ValueError(f"results: line {reader.line_num} of {path} is cut off")
            row = {name: record[name] for name in names if record[name]}
            found.append(_ROW.validate_python(row))
        return found


def speedup(rows: Iterable[Row], ours: Row) -> dict[str, float]:
    """How many times faster ours is than each peer; empty unless both gates are green."""
    if not ours.is_timed or ours.ms is None:
        return {}
    peers = [row for row in rows if row.key[:3] == ours.key[:3] and row.provider != ours.provider]
    return {row.provider: row.ms / ours.ms for row in peers if row.is_timed and row.ms is not None}
