"""What NVIDIA's ``compute-sanitizer`` finds in each family's kernels, at small shapes on a GPU.

    python -m tests.kernels.sanitize --json sanitizer.json
    python -m tests.kernels.sanitize --tool racecheck --family paged --seconds 500

Each command first runs without the tool, so that Triton's cache on disk holds its kernels.
Findings are counted by message and kernel.  Those in kernels of other packages (torch's) are
counted too, and decide nothing; nor do calls of CUDA that failed, such as ``cuFuncSetAttribute`` in
Triton's loader (``loadBinary``).  Exit status 1: a finding in a kernel of ours, or cases that
failed or were cut off; 2: there is no ``compute-sanitizer``, which comes with the CUDA toolkit.

``racecheck`` does not follow all that orders accesses.  These it reports on an H200 with Triton 3.8
though they are ordered; what is not among them is a race until it is explained.

1. At the line of ``def`` of every kernel with ``gl.warp_specialize`` (``sink_window_hopper_*``,
   ``block_sparse_hopper_*``, ``nsa_*_hopper_*``, ``attend_hopper_kernel``,
   ``listed_masses_sm90_kernel``, ``tile_scores_sm90_kernel``): the first warps write what the other
   warps do next, a byte for each, and in ``sink_window_hopper_bwd_kernel`` and
   ``block_sparse_hopper_dkdv_kernel`` also their arguments; the others read them.  Between a write
   and its reads, and between these and the next write, all warps meet at ``barrier.sync 1``.
2. Memory between partitions: warps meet at a barrier of their own, then one thread arrives for them
   at an mbarrier, for which the others wait.  ``sink_window_hopper_bwd_kernel``: ``lse`` and
   ``delta`` (``load_partition``; ``g_full``, and ``g_empty`` before the next).
   ``sink_window_hopper_small_kernel``: the parts that are joined (``parts_full``).
   ``block_sparse_hopper_dkdv_kernel`` with blocks of 64: sums of the second warpgroup
   (``sum_full``).  ``block_sparse_hopper_fwd_kernel``, ``attend_hopper_kernel``: plans
   (``plans_sm90.py``: ``full`` and ``empty``).  ``attend_hopper_kernel``: logs of weights
   (``put_logs``; ``k_full``, and ``k_empty`` before the next).
3. ``lse`` and ``delta`` of ``block_sparse_hopper_dkdv_kernel``: asynchronous copies.  When they end
   they arrive at ``g_full`` (``async_copy.mbarrier_arrive``), for which their readers wait.

Two writes at one offset were a race: two lanes held a sum of two products, each with its own fused
into it, so that the sums differed in their last bits, and both wrote to one place.

Where the tool names no line of an offset, compile the kernel for the same arguments (``aot.py`` of
its family, no GPU needed) and read ``nvdisasm -c -g`` of its cubin.
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
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
        *(
            (*PYTEST, "-k", "not real_sizes and not torch and not many_places", f"{PAGED}/{file}")
            for file in (
                *("test_small.py", "test_attend_sample.py", "test_attend_cells.py"),
                *("test_page_records.py", "test_records.py", "test_rank.py", "test_addresses.py"),
            )
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
_OFFSET = r"\+(0x[0-9a-f]+)(?: in (?:\S*/)?(\S+:\d+))?"
_ACCESS = re.compile(r"\b(Read|Write) access at .*?" + _OFFSET)
_PROGRESS = re.compile(r"[.FEsxX]+ *(\[ *\d+%\])?")
_NUMBER = re.compile(r"\b(?:0x[0-9a-f]+|\d+)\b")


@dataclass(frozen=True)
class Checked:
    """One tool over one family's command: what it found, and how the cases ended.

    ``passed`` counts tests, cases of a script, or what a script checks of its cases.
    """

    family: str
    tool: str
    command: str
    seconds: float
    ended: str
    passed: int
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

    A finding is the first kernel that is named, and either what a race is between or the first line
    less numbers, with offsets in the kernel and their lines where these are known.  A call of CUDA
    that failed is one too, of others.  What the summary counts beyond these was not understood, and
    is held to be of ours.
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
        (ours if kernel in known else others)[f"{kernel}: {_message(block[0], joined)}"] += 1
    missed = counted - sum(ours.values()) - sum(others.values())
    if missed > 0:
        ours["reports that were not understood"] = missed
    return ours, others, summary


def _message(first: str, joined: str) -> str:
    """What a report says, from its first line and from all of them."""
    accesses = _ACCESS.findall(joined)
    if not accesses:
        what, place = _NUMBER.sub("N", first.split(" at ")[0]), re.search(_OFFSET, joined)
        return f"{what} at {_places([place.groups()])}" if place else what
    kind, *place = accesses[0]
    said = [f"{kind} at {_places([place])}"]
    for kind in dict.fromkeys(access[0] for access in accesses[1:]):
        said.append(f"{kind} at {_places(x[1:] for x in accesses[1:] if x[0] == kind)}")
    return f"{first.split(' reported ')[0]}: {' and '.join(said)}"


def _places(places: Iterable[Sequence[str]]) -> str:
    """Offsets, each with its line where the tool knows it."""
    ordered = sorted({tuple(place) for place in places}, key=lambda place: int(place[0], 16))
    return ", ".join(f"{offset} ({line})" if line else offset for offset, line in ordered)


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


def count_passed(said: str) -> int:
    """Return how many tests or cases had passed, by what pytest or a script has printed."""
    lines = said.splitlines()
    tests = sum(line.count(".") for line in lines if _PROGRESS.fullmatch(line))
    return tests + sum(line.startswith(("ran ", "ok ")) for line in lines)


def run_cases(words: Sequence[str], seconds: float) -> tuple[str, int]:
    """Run a command of a family; return how it ended, and how many cases had passed."""
    environment = {
        **os.environ,
        "PYTHONPATH": import_path(ROOT, ROOT / "kernels", ROOT / PAGED),
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",  # so that each tensor ends where its memory does
    }
    try:
        done = run(*words, cwd=ROOT, env=environment, seconds=seconds)
    except AssertionError as error:  # has what the command said
        return f"cut off after {seconds:g} s", count_passed(str(error))
    last = (done.stdout.strip().splitlines() or [done.stderr.strip()[-300:]])[-1]
    ended = "passed" if done.returncode == 0 else f"status {done.returncode}: {last}"
    return ended, count_passed(done.stdout)


def check(program: str, tool: str, family: str, cases: Sequence[str], seconds: float) -> Checked:
    """Run one command under one tool and return what was found."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        words = [program, "--tool", tool, "--target-processes", "all", "--log-file", str(log)]
        words += ["--print-limit", "10000", sys.executable, *cases]
        ended, passed = run_cases(words, seconds)
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    ours, others, summary = read_log(text, our_kernels())
    taken = round(time.monotonic() - begin, 1)
    shown = " ".join(cases)
    return Checked(family, tool, shown, taken, ended, passed, dict(ours), dict(others), summary)


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
    families = arguments.family or FAMILIES
    for family in families:
        for cases in FAMILIES[family]:
            begin = time.monotonic()
            ended, passed = run_cases((sys.executable, *cases), arguments.seconds)
            taken = time.monotonic() - begin
            print(f"no tool, {family}: {passed} passed, {taken:.0f} s, {ended}", flush=True)
    for tool in arguments.tool or TOOLS:
        for family in families:
            for cases in FAMILIES[family]:
                one = check(program, tool, family, cases, arguments.seconds)
                found.append(one)
                print(
                    f"{tool} {family}: {sum(one.ours.values())} findings in our kernels, "
                    f"{sum(one.others.values())} in others, {one.passed} cases passed, "
                    f"{one.seconds:.0f} s, {one.ended}",
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
