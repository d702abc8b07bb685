"""CSV files of results."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path


def write_csv_file(path: Path, rows: Sequence[Mapping[str, object]], digits: int) -> Path:
    """The path, after rows are written: floats at so many significant digits, None as nothing.

    Columns are the names of the rows' values, in the order in which they first come.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        columns = dict.fromkeys(name for row in rows for name in row)
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        for row in rows:
            shown = {k: f"{v:.{digits}g}" if isinstance(v, float) else v for k, v in row.items()}
            writer.writerow(shown)
    return path
