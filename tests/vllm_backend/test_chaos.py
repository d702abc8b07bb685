"""A server outlives what clients do to it, and ends when its engine does."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from tests.processes import SECONDS, wait_until
from tests.vllm_backend import storm
from tests.vllm_backend.servers import (
    Server,
    group_members,
    server_environment,
)
from tests.vllm_backend.tiny_models import make_tiny_model

pytestmark = pytest.mark.serve

MOST_GROWTH = 32.0
"""MiB that a storm of 100 requests may leave behind."""
ANSWERS = 4 * storm.AT_ONCE
"""Answers in one stream: a client that is slow to read still breaks in before the last."""
STORMS = 8
"""The first ones fill the pools of the interpreter and of malloc; a leak grows in every one."""


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
    sizes = [storm.memory(server)]
    for seed in range(1, STORMS + 1):
        report = storm.storm(server, 100, seed)
        assert report.faults == []
        assert sum(report.answers.values()) == 100
        wait_until(lambda: storm.unfinished(server) == 0)
        assert storm.ask(server) == expected
        sizes.append(storm.memory(server))
        before, after = sizes[-2:]
        if seed > 1 and all(after[place] - before[place] < MOST_GROWTH for place in after):
            return
    raise AssertionError(f"MiB before and after each storm: {sizes}")


def worker(server: Server) -> int:
    """The process of the server's group that computes: a worker of the engine, or the engine."""
    titles = {}
    for process in group_members(server.process.pid):
        with suppress(OSError):  # it ended meanwhile
            titles[process] = Path(f"/proc/{process}/cmdline").read_bytes()
    for name in (b"VLLM::Worker", b"VLLM::EngineCore"):
        for process, title in titles.items():
            if title.startswith(name):
                return process
    raise AssertionError(f"no worker among {titles}")


def test_a_worker_killed_in_mid_stream_ends_the_server(server: Server) -> None:
    """Last test of this server.  The client is told, and nothing hangs or stays behind."""
    tokens = storm.MAX_LEN - len(storm.PROMPT)
    asked = storm.fine(prompt=[storm.PROMPT] * ANSWERS, max_tokens=tokens, stream=True)
    lines: list[str] = []
    victim = worker(server)
    url = server.url(storm.COMPLETIONS)
    with httpx.stream("POST", url, json=asked, timeout=SECONDS) as response:
        assert response.status_code == 200
        try:
            for line in response.iter_lines():
                if not lines:
                    os.kill(victim, signal.SIGKILL)
                lines.append(line)
        except httpx.HTTPError:
            pass
        else:
            assert any("error" in line for line in lines), lines[-3:]
    server.process.wait(SECONDS)
    assert "EngineDeadError" in server.text()
    wait_until(lambda: not group_members(server.process.pid))
