"""What NVIDIA's ``compute-sanitizer`` finds in each family's kernels, at small shapes on a GPU.

    python -m tests.kernels.sanitize --json sanitizer.json
    python -m tests.kernels.sanitize --tool racecheck --family paged --seconds 500

Findings are counted by message and kernel.  Those in kernels of other packages (torch's) are
counted too, and decide nothing.  Exit status 1: a finding in a kernel of ours, or cases that failed
or were cut off; 2: there is no ``compute-sanitizer``, which comes with the CUDA toolkit.

``racecheck`` reports two things of the sink-window kernels that are ordered by means it does not
follow: see ``sink_window/sanitize.py``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from sparsek_backend.machine import choose_device, describe_machine
from tests.processes import import_path, run

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("memcheck", "racecheck", "initcheck")
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
PAGED = "tests/kernels/paged_gpu"
FAMILIES: dict[str, tuple[tuple[str, ...], ...]] = {
    "paged": (
        (
            *(*PYTEST, "-k", "not real_sizes and not torch and not many_places"),
            *(f"{PAGED}/test_{name}.py" for name in ("small", "attend_sample", "attend_cells")),
            *(f"{PAGED}/test_{name}.py" for name in ("page_records", "records", "rank")),
        ),
        (*PYTEST, f"{PAGED}/test_hopper.py", "-k", "layouts or lists or sinks or dense_below"),
    ),
    "sink_window": (("-m", "tests.kernels.sink_window.sanitize"),),
    "nsa": (("tests/kernels/nsa/kernel_cases.py", "--device", "cuda", "--size", "hopper"),),
    "block_sparse": (
        (
            *(*PYTEST, "tests/kernels/block_sparse/test_gpu.py"),
            *("-k", "bitwise or strides or columns_in_parts or portable_kernels"),
        ),
    ),
}
"""The cases of each family, as arguments of Python: small shapes alone."""
_AT = re.compile(r"\b(?:at|by|in)\s+([A-Za-z_]\w*)\s*(?:\(.*?\))?\+0x[0-9a-f]+")
_NUMBER = re.compile(r"\b(?:0x[0-9a-f]+|\d+)\b")


@dataclass(frozen=True)
class Checked:
    """One tool over one family's command: what it found, and how the cases ended."""

    family: str
    tool: str
    command: str
    seconds: float
    ended: str
    ours: dict[str, int]
    others: dict[str, int]
    summary: list[str]


def find_sanitizer(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the program on ``PATH`` or in the CUDA toolkit."""
    folders = [Path(environ.get(name, "")) for name in ("CUDA_HOME", "CUDA_PATH")]
    folders = [folder for folder in folders if folder.name] + [Path("/usr/local/cuda")]
    places = [environ.get("PATH", "")]
    places += [str(folder / inner) for folder in folders for inner in ("bin", "compute-sanitizer")]
    return shutil.which("compute-sanitizer", path=os.pathsep.join(places))


def our_kernels() -> set[str]:
    """Return the names of the kernels that this repository compiles."""
    names = set()
    for file in (ROOT / "kernels").rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        names.update(re.findall(r"\.jit\b[^\n]*\n(?:@[^\n]*\n)*def (\w+)\(", text))
    return names


def read_log(text: str, known: set[str]) -> tuple[Counter[str], Counter[str], list[str]]:
    """Return the findings in our kernels, those in others, and the lines of the summary.

    A finding is its first line less numbers, and the first kernel that is named: with its offsets,
    by which ``nvdisasm`` tells the line.  A call of CUDA that failed is one too, of others.  What
    the summary counts beyond these was not understood, and is held to be of ours.
    """
    ours: Counter[str] = Counter()
    others: Counter[str] = Counter()
    summary = []
    counted = 0
    for block in _blocks(text):
        if "SUMMARY" in block[0]:
            summary.append(block[0])
            counted += int((_NUMBER.findall(block[0]) or ["0"])[0])
            continue
        joined = " ".join(block)
        at = _AT.findall(joined)
        if block[0].startswith("Program hit"):
            others[_NUMBER.sub("N", block[0])] += 1
            continue
        if not at and not re.match(r"(Error|Warning|Invalid|Uninit|Race|Potential)", block[0]):
            continue  # the tool's name, or where the host launched it
        kernel = at[0] if at else "no kernel named"
        places = sorted(set(re.findall(r"\+(0x[0-9a-f]+)", joined)))[:4]
        message = f"{kernel}: {_NUMBER.sub('N', block[0].split(' at ')[0])} [{', '.join(places)}]"
        (ours if kernel in known else others)[message] += 1
    missed = counted - sum(ours.values()) - sum(others.values())
    if missed > 0:
        ours["reports that were not understood"] = missed
    return ours, others, summary


def _blocks(text: str) -> Iterator[list[str]]:
    """Yield the lines of each report: the details behind its first line are indented."""
    block: list[str] = []
    for line in text.splitlines():
        said = line.removeprefix("========= ")
        if said == line:
            continue
        if block and not said.startswith(" "):
            yield block
            block = []
        block.append(said.strip())
    if block:
        yield block


def check(program: str, tool: str, family: str, cases: Sequence[str], seconds: float) -> Checked:
    """Run one command under one tool and return what was found."""
    begin = time.monotonic()
    environment = {
        **os.environ,
        "PYTHONPATH": import_path(ROOT, ROOT / "kernels", ROOT / PAGED),
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",  # so that each tensor ends where its memory does
    }
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        words = [program, "--tool", tool, "--target-processes", "all", "--log-file", str(log)]
        words += ["--print-limit", "10000", sys.executable, *cases]
        try:
            done = run(*words, cwd=ROOT, env=environment, seconds=seconds)
            last = (done.stdout.strip().splitlines() or [done.stderr.strip()[-300:]])[-1]
            ended = "passed" if done.returncode == 0 else f"status {done.returncode}: {last}"
        except AssertionError:
            ended = f"cut off after {seconds:g} s"
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    ours, others, summary = read_log(text, our_kernels())
    taken = round(time.monotonic() - begin, 1)
    shown = " ".join(cases)
    return Checked(family, tool, shown, taken, ended, dict(ours), dict(others), summary)


def main() -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tool", choices=TOOLS, action="append", help="default: all")
    parser.add_argument("--family", choices=FAMILIES, action="append", help="default: all")
    parser.add_argument("--seconds", type=float, default=600.0, help="of each command at most")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit", default="", help="to record where there is no git")
    arguments = parser.parse_args()
    program = find_sanitizer()
    if program is None:
        print(
            "error: compute-sanitizer: expected it on PATH, or in bin of CUDA_HOME or of "
            "/usr/local/cuda; it comes with the CUDA toolkit (nvcc), not with torch",
            file=sys.stderr,
        )
        return 2
    found: list[Checked] = []
    for tool in arguments.tool or TOOLS:
        for family in arguments.family or FAMILIES:
            for cases in FAMILIES[family]:
                one = check(program, tool, family, cases, arguments.seconds)
                found.append(one)
                print(
                    f"{tool} {family}: {sum(one.ours.values())} findings in our kernels, "
                    f"{sum(one.others.values())} in others, {one.seconds:.0f} s, {one.ended}",
                    *(f"    {count} x {message}" for message, count in one.ours.items()),
                    sep="\n",
                    flush=True,
                )
                if arguments.json is not None:  # after each, so that a run cut off leaves its part
                    machine = asdict(describe_machine(choose_device(), arguments.commit))
                    result = {"machine": machine, "checked": [asdict(each) for each in found]}
                    arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return int(any(one.ours or one.ended != "passed" for one in found))


if __name__ == "__main__":
    sys.exit(main())
