"""The C functions of the CPU path as one library, built on its first use."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

logger = logging.getLogger(__name__)

_FLAGS = (
    "-O3",
    "-march=native",
    "-fno-math-errno",
    "-fno-strict-aliasing",
    "-fno-signed-zeros",
    "-fno-trapping-math",
    "-fassociative-math",
    "-fopenmp",
    "-fPIC",
)
_SOURCES = ("decode.c", "records.c")
_HEADERS = ("choose.h", "decode.h", "lanes.h", "record.h")


@cache
def library() -> ctypes.CDLL | None:
    """The compiled functions, or ``None`` where it cannot be built: the log then says why.

    The library is kept in ``$XDG_CACHE_HOME/sparsek`` under a name that depends on the sources, the
    compiler and the processor.
    """
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC", ""), "cc", "gcc"))), None)
    if compiler is None:
        logger.warning("no C compiler (cc, gcc): the CPU takes the slower torch path")
        return None
    try:
        return _build(compiler)
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("the CPU takes the slower torch path: %s", error)
        return None


def _build(compiler: str) -> ctypes.CDLL:
    processor = Path("/proc/cpuinfo")
    flags = _instructions(processor.read_text()) if processor.exists() else ""
    folder = Path(__file__).parent
    texts = ((folder / file).read_text() for file in (*_SOURCES, *_HEADERS))
    parts = (*texts, compiler, flags, str(_FLAGS))
    name = f"cpu-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:16]}.so"
    path = _cache_folder() / name
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            made = Path(scratch) / name
            objects = [str(Path(scratch) / f"{source}.o") for source in _SOURCES]
            for source, into in zip(_SOURCES, objects, strict=True):
                _run([compiler, *_FLAGS, "-c", "-o", into, str(folder / source)])
            _run([compiler, "-fopenmp", "-shared", "-o", str(made), *objects, "-lm"])
            made.replace(path)
    found = ctypes.CDLL(str(path))
    for function in (found.sparsek_decode, found.sparsek_records):
        function.argtypes = (ctypes.c_void_p,)
        function.restype = None
    return found


def _instructions(cpuinfo: str) -> str:
    """Lines of the first processor that say which code it runs; x86 and ARM have other names."""
    names = ("model name", "flags", "CPU part", "Features")
    return "".join(x for x in cpuinfo.split("\n\n")[0].splitlines() if x.startswith(names))


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()[-500:]}")


def _cache_folder() -> Path:
    """``$XDG_CACHE_HOME/sparsek``, or a new folder where that cannot be written."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sparsek"
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):  # RuntimeError: a user without a home
        pass
    return Path(tempfile.mkdtemp(prefix="sparsek-"))
