"""Scripts in processes of their own, which find torch and Triton's language imported.

Triton decides when it is imported whether kernels are interpreted, and scripts replace what they
please: each is forked from a process that has imported the packages and done nothing else.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import pkgutil
import runpy
import select
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path

from tests import processes

ROOT = Path(__file__).parents[2]


def run(*command: object, interpret: bool = False) -> subprocess.CompletedProcess[str]:
    """What a script says, and its exit status.

    Args:
        command: the script, or ``-m`` and a module, then its arguments.
        interpret: whether Triton interprets kernels.

    Raises:
        AssertionError: it took longer than any command of a test may.
    """
    words = [str(word) for word in command]
    server = _server(interpret)
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        asked = {"words": words, "env": dict(os.environ), "files": [str(out), str(err)]}
        print(json.dumps(asked), file=server.stdin, flush=True)
        if not select.select([server.stdout], [], [], processes.SECONDS)[0]:
            processes.abort(server.pid)
        answer = server.stdout.readline()
        said = [file.read_text(errors="replace") if file.exists() else "" for file in (out, err)]
    if not answer:
        _server.cache_clear()
        raise AssertionError("not ended: {}\n{}\n{}".format(" ".join(words), *said))
    return subprocess.CompletedProcess(words, int(answer), *said)


@functools.cache
def _server(interpret: bool) -> subprocess.Popen[str]:
    """The process that others are forked from; it ends when this one does."""
    path = processes.import_path(ROOT, ROOT / "kernels")
    given = {"PYTHONFAULTHANDLER": "1", "PYTHONPATH": path, "TRITON_INTERPRET": f"{interpret:d}"}
    server = subprocess.Popen(
        [sys.executable, "-m", __name__],
        env={**os.environ, **given},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    atexit.register(server.__exit__, None, None, None)  # closes its input and waits for it
    return server


def _serve() -> None:
    """Run what is asked for, line by line."""
    importlib.import_module("pytest")
    package = importlib.import_module("sparsek_kernels")
    for module in pkgutil.walk_packages(package.__path__, "sparsek_kernels."):
        importlib.import_module(module.name)
    gc.collect()
    gc.freeze()  # no search for garbage looks at what was imported
    kept = {name: os.environ[name] for name in ("PYTHONPATH", "TRITON_INTERPRET")}
    for line in sys.stdin:
        asked = json.loads(line)
        child = os.fork()
        if child == 0:
            _become(asked["words"], {**asked["env"], **kept}, asked["files"])
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _become(words: Sequence[str], env: dict[str, str], files: Sequence[str]) -> None:
    """Be the command, to its end."""
    status = 1
    try:
        os.environ.clear()
        os.environ.update(env)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for stream, file in enumerate(files, 1):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), stream)
        if words[0] == "-m":
            sys.argv = list(words[1:])
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[:1] = list(words), [str(Path(words[0]).parent)]
            runpy.run_path(words[0], run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    _serve()
