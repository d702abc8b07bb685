"""Add the stack of this machine to the table "tested together", from results of its GPU tests.

    python -m pytest -m gpu --junitxml gpu.xml tests
    python benchmarks/tested_together.py gpu.xml            # several files where tests ran in parts
                                                            # or again: the last result counts
    python deploy/site/tables.py                            # the table in README.md and docs/

A row of the same stack is replaced.  Exit status 1, and no row, where a test failed or none passed.
"""

from __future__ import annotations

import argparse
import csv
import platform
import sys
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from sparsek_backend.csv_file import write_csv_file
from sparsek_backend.machine import Machine, choose_device, describe_machine

FILE = Path(__file__).parents[1] / "sparsek_backend" / "tested_together.csv"
STACK = ("gpu", "driver", "torch", "triton", "vllm", "python")


def passed(reports: Sequence[Path]) -> int:
    """Return how many tests passed, each counted once, by the last report that has it.

    Raises:
        ValueError: one failed or could not run, or none passed.
    """
    ended = {}
    for case in (case for report in reports for case in ET.parse(report).iter("testcase")):
        name = f"{case.get('classname')}::{case.get('name')}"
        ended[name] = {child.tag for child in case} & {"failure", "error", "skipped"}
    failed = [name for name, ends in ended.items() if ends & {"failure", "error"}]
    if failed:
        raise ValueError(f"reports: expected no failed test, got {', '.join(sorted(failed))}")
    count = sum(not ends for ends in ended.values())
    if not count:
        raise ValueError("reports: expected tests that passed, got none")
    return count


def add_row(file: Path, machine: Machine, tests: int) -> dict[str, str]:
    """Write the row of a machine, in place of an earlier one of the same stack; return it."""
    known = asdict(machine) | {"python": ".".join(platform.python_version_tuple()[:2])}
    row = {name: known[name] for name in STACK}
    row |= {"date": datetime.now(UTC).date().isoformat(), "tests": str(tests)}
    with file.open(newline="", encoding="utf-8") as lines:
        others = [
            one for one in csv.DictReader(lines) if any(one[name] != row[name] for name in STACK)
        ]
    write_csv_file(file, [*others, row], digits=6)
    return row


def main() -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("reports", type=Path, nargs="+", help="pytest's --junitxml files")
    parser.add_argument("--file", type=Path, default=FILE, help="the table's file")
    arguments = parser.parse_args()
    try:
        device = choose_device("cuda")
        row = add_row(arguments.file, describe_machine(device), passed(arguments.reports))
    except (OSError, ValueError, ET.ParseError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(", ".join(f"{name} {value}" for name, value in row.items() if value))
    return 0


if __name__ == "__main__":
    sys.exit(main())
