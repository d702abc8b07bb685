"""A server outlives what clients do to it, and ends when its engine does."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.vllm_backend import storm
from tests.vllm_backend.servers import Server, group_members, server_environment
from tests.vllm_backend.tiny_models import make_tiny_model

pytestmark = pytest.mark.serve

MOST_GROWTH = 32.0
"""MiB that a storm of 100 requests may leave behind: pools of the interpreter and of malloc."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("chaos")
    model = make_tiny_model("llama", folder / "model")
    server = Server(model, server_environment(folder), folder / "server.log", *storm.OPTIONS)
    try:
        server.wait_until_healthy()
        yield server
    finally:
        server.stop()


def test_a_storm_of_malformed_requests(server: Server) -> None:
    """Each is answered, bad ones with an error; then the server holds nothing of them."""
    expected = storm.ask(server)
    assert storm.storm(server, 100, seed=1).faults == []
    before = storm.memory(server)
    report = storm.storm(server, 100, seed=2)
    assert report.faults == []
    assert sum(report.answers.values()) == 100
    deadline = time.monotonic() + 60
    while storm.unfinished(server) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert storm.unfinished(server) == 0
    assert storm.ask(server) == expected
    after = storm.memory(server)
    assert all(after[place] - before[place] < MOST_GROWTH for place in after), (before, after)


def worker(server: Server) -> int:
    """The process of the server's group that computes: a worker of the engine, or the engine."""
    titles = {
        process: Path(f"/proc/{process}/cmdline").read_bytes()
        for process in group_members(server.process.pid)
    }
    for name in (b"VLLM::Worker", b"VLLM::EngineCore"):
        for process, title in titles.items():
            if title.startswith(name):
                return process
    raise AssertionError(f"no worker among {titles}")


def test_a_worker_killed_in_mid_stream_ends_the_server(server: Server) -> None:
    """Last test of this server.  The client is told, and nothing hangs or stays behind."""
    asked = storm.fine(max_tokens=storm.MAX_LEN - len(storm.PROMPT), stream=True)
    lines: list[str] = []
    with httpx.stream("POST", server.url(storm.COMPLETIONS), json=asked, timeout=60) as response:
        assert response.status_code == 200
        try:
            for line in response.iter_lines():
                if not lines:
                    os.kill(worker(server), signal.SIGKILL)
                lines.append(line)
        except httpx.HTTPError:
            pass
        else:
            assert any("error" in line for line in lines), lines[-3:]
    server.process.wait(60)
    assert "EngineDeadError" in server.text()
    deadline = time.monotonic() + 60
    while group_members(server.process.pid) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert group_members(server.process.pid) == []
