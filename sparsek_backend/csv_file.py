"""CSV files of results."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

from sparsek_backend.whole_file import write_whole


def write_csv_file(path: Path, rows: Sequence[Mapping[str, object]], digits: int) -> Path:
    """The path, after rows are written: floats at so many significant digits, None as nothing.

    Columns are the names of the rows' values, in the order in which they first come.
    """
    columns = dict.fromkeys(name for row in rows for name in row)

    def write(beside: Path) -> None:
        with beside.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, columns, lineterminator="\n")
            writer.writeheader()
            for row in rows:
                writer.writerow(
                    {k: f"{v:.{digits}g}" if isinstance(v, float) else v for k, v in row.items()}
                )

    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, write)
    return path
