"""`sparsek bench serve --rate`: a failure ends both servers; a script stands for `vllm`."""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from sparsek_backend.bench import load
from sparsek_backend.bench.together import Together
from sparsek_backend.machine import Machine
from sparsek_backend.quickstart_server import ServerError

PLAN = load.LoadPlan(
    model="tiny",
    rates=(1.0,),
    mix="documents",
    num_requests=1,
    document_tokens=64,
    settings={},
    baseline="CPU_ATTN",
    tpot_limit_ms=50.0,
    ttft_limit_ms=None,
    engine={},
    side_by_side=True,
)
MACHINE = Machine("", "", "", "", "", "")
VLLM = textwrap.dedent(
    """
    import http.server, importlib.metadata, importlib.util, json, os, pathlib, sys, time

    folder = pathlib.Path(__file__).parent
    plan = json.loads((folder / "plan.json").read_text())
    options = dict(zip(sys.argv, sys.argv[1:]))
    work = "bench" if sys.argv[1] == "bench" else "serve"
    if work == "serve":
        name = options["--attention-backend"]
        (folder / options["--port"]).write_text(name)
    else:
        name = (folder / options["--base-url"].rpartition(":")[2]).read_text()
    (folder / f"{name}.{work}.part").write_text(str(os.getpid()))
    (folder / f"{name}.{work}.part").rename(folder / f"{name}.{work}.pid")
    if plan["fails"] == [name, work]:
        while not (folder / plan["after"]).exists():
            time.sleep(0.01)
        sys.exit(f"{name} cannot {work}")
    if work == "serve" and plan["healthy"]:
        found = [one.value for one in importlib.metadata.entry_points(group="vllm.general_plugins")]
        packages = [bool(importlib.util.find_spec(f"sparsek_{p}")) for p in ("backend", "kernels")]
        (folder / f"{name}.found").write_text(json.dumps([found, packages]))

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(200)
                self.end_headers()

        http.server.HTTPServer(("127.0.0.1", int(options["--port"])), Handler).serve_forever()
    time.sleep(3600)
    """
)


class Stage:
    """The folder of the script, and what it is to do."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "vllm.py").write_text(VLLM)

    def plan(self, **plan: Any) -> None:
        (self.folder / "plan.json").write_text(json.dumps(plan))

    def pids(self) -> dict[str, int]:
        return {path.stem: int(path.read_text()) for path in self.folder.glob("*.pid")}


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    """Two GPUs and a script for `vllm`, without site-packages: it knows what PYTHONPATH names."""
    command = [sys.executable, "-S", str(tmp_path / "vllm.py")]
    monkeypatch.setattr(load, "vllm_command", lambda: command)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    return Stage(tmp_path)


@pytest.mark.parametrize(("failing", "other"), [("SPARSEK", "CPU_ATTN"), ("CPU_ATTN", "SPARSEK")])
@pytest.mark.parametrize("work", ["serve", "bench"])
def test_the_first_failure_ends_both_and_is_told(
    stage: Stage, failing: str, other: str, work: str
) -> None:
    """The other server is never ready, or its measurement takes an hour."""
    stage.plan(fails=[failing, work], after=f"{other}.{work}.pid", healthy=work == "bench")
    began = time.monotonic()
    message = rf"(?s)^{failing}: .*{failing} cannot {work}"
    with pytest.raises(RuntimeError, match=message) as failure:
        load.run_load(PLAN, MACHINE, lambda _line: None)
    assert isinstance(failure.value, ServerError) == (work == "serve")
    assert time.monotonic() - began < 300
    pids = stage.pids()
    assert set(pids) >= {f"{failing}.{work}", f"{other}.{work}"}
    assert not [name for name, pid in pids.items() if psutil.pid_exists(pid)]


def test_servers_find_the_plugin_in_a_checkout(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: ())
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(os.environ, "PYTHONPATH", "")
    stage.plan(fails=["SPARSEK", "bench"], after="SPARSEK.bench.pid", healthy=True)
    with pytest.raises(RuntimeError, match="SPARSEK cannot bench"):
        load.run_load(PLAN, MACHINE, lambda _line: None)
    found, packages = json.loads((stage.folder / "SPARSEK.found").read_text())
    assert found == ["sparsek_backend.plugin:register"]
    assert packages == [True, True]


def test_nothing_starts_after_a_failure() -> None:
    together = Together()

    def fail() -> None:
        raise KeyError("first")

    stopped = []
    with pytest.raises(KeyError, match="first"):
        together.call([fail])
    with (
        pytest.raises(RuntimeError, match="another failed"),
        together.running(lambda: stopped.append(1)),
    ):
        pytest.fail("it ran")
    assert stopped == [1]


def test_results_keep_the_order_of_the_works() -> None:
    assert Together().call([lambda: 1, lambda: 2]) == [1, 2]
    done = Together().run([sys.executable, "-c", "print('said'); exit(3)"])
    assert (done.returncode, done.stdout) == (3, "said\n")
