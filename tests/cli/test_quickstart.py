"""The quickstart's own parts, against a small HTTP server that stands in for vLLM."""

from __future__ import annotations

import json
import os
import socket
import sys
import textwrap
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest

from sparsek_backend import quickstart, quickstart_client, quickstart_server
from sparsek_backend.machine import cpu_dtype
from sparsek_backend.quickstart_server import Server, ServerError, check_port
from tests.ports import hold_port
from tests.processes import SECONDS, wait_until

METRICS = """\
# HELP sparsek_attended_tokens_total Keys attended
# TYPE sparsek_attended_tokens_total counter
sparsek_attended_tokens_total{pid="1"} 30.0
sparsek_attended_tokens_total{pid="2"} 10.0
sparsek_context_tokens_total 1.6e+02
sparsek_context_tokens_created 9.0
"""


@pytest.fixture
def free_port() -> Iterator[int]:
    with hold_port() as held:
        yield int(held.getsockname()[1])


class Handler(BaseHTTPRequestHandler):
    """/metrics and a streamed chat completion of two pieces."""

    def do_GET(self) -> None:
        self._reply("text/plain", METRICS)

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if request["model"] != "tiny":
            self.send_response(404)
            self.end_headers()
            return
        pieces = [{"choices": [{"index": 0, "delta": {"content": text}}]} for text in ("Pa", "ris")]
        usage = {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}
        events = [*pieces, {"choices": [], "usage": usage}]
        body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        self._reply("text/event-stream", body)

    def _reply(self, kind: str, body: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_arguments: object) -> None:
        """Stay quiet."""


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_an_answer_is_streamed_and_timed(url: str) -> None:
    pytest.importorskip("openai")
    pieces: list[str] = []
    answer = quickstart_client.ask(url, "tiny", "Hello", max_tokens=8, write=pieces.append)
    assert pieces == ["Pa", "ris"]
    assert (answer.text, answer.prompt_tokens, answer.completion_tokens) == ("Paris", 7, 2)
    assert 0 < answer.first_token_seconds <= answer.total_seconds


def test_a_refused_request_is_one_error(url: str) -> None:
    pytest.importorskip("openai")
    with pytest.raises(RuntimeError, match="the server did not answer"):
        quickstart_client.ask(url, "other", "Hello", max_tokens=8, write=lambda _text: None)


def test_the_share_is_summed_over_processes(url: str) -> None:
    counted = quickstart_client.read_attended(url)
    assert (counted.attended, counted.context) == (40.0, 160.0)
    assert counted.share == 0.25


def test_no_growth_means_that_another_backend_served(url: str) -> None:
    counted = quickstart_client.read_attended(url)
    with pytest.raises(ValueError, match="SPARSEK served no attention"):
        _ = (counted - counted).share


def test_prompt_and_answer_are_counted_apart() -> None:
    counts = [quickstart_client.Attended(*pair) for pair in ((10, 10), (60, 110), (70, 150))]
    parts = quickstart._parts(counts[0], [counts[1]], counts[2])
    assert [(name, counted.share) for name, counted in parts] == [("prompt", 0.5), ("answer", 0.25)]
    for marks in ([], [counts[2]]):
        ((name, counted),) = quickstart._parts(counts[0], marks, counts[2])
        assert (name, counted.attended, counted.context) == ("prompt", 60, 140)


def test_speed_excludes_the_first_token() -> None:
    answer = quickstart_client.Answer("x", 1, 11, first_token_seconds=1.0, total_seconds=3.0)
    assert answer.tokens_per_second == 5.0
    single = quickstart_client.Answer("x", 1, 1, first_token_seconds=1.0, total_seconds=1.0)
    assert single.tokens_per_second == 0.0


def test_a_port_in_use_is_named_with_the_option() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ServerError, match=rf"port {port} cannot be used.*--port"):
            check_port(port)


def test_a_server_that_dies_is_reported_at_once_with_its_log(
    tmp_path: Path, free_port: int
) -> None:
    command = [sys.executable, "-c", "import sys; print('out of luck'); sys.exit(3)"]
    server = Server(command, {}, free_port, tmp_path / "serve.log")
    with pytest.raises(ServerError, match=r"(?s)exit status 3 .*out of luck"):
        server.wait_until_healthy(SECONDS, lambda _line: None)
    server.stop()


class Clock:
    """Stands for the module ``time``: only sleeping takes time."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_server_that_never_answers_runs_out_of_time(
    tmp_path: Path, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quickstart_server, "time", Clock())
    server = Server(
        [sys.executable, "-c", "import time; time.sleep(3600)"], {}, free_port, tmp_path / "l"
    )
    progress: list[str] = []
    try:
        with pytest.raises(ServerError, match="not ready after 30 s"):
            server.wait_until_healthy(30, progress.append)
    finally:
        server.stop()
    assert progress == ["    ... 10 s", "    ... 20 s", "    ... 30 s"]
    assert not _alive(server.pid)


def test_stop_ends_children_that_ignore_the_polite_signal(tmp_path: Path, free_port: int) -> None:
    script = textwrap.dedent(
        """
        import os, signal, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = os.fork()
        if child:
            print(child, flush=True)
        time.sleep(3600)
        """
    )
    server = Server([sys.executable, "-c", script], {}, free_port, tmp_path / "log")
    try:
        wait_until(lambda: server.log.read_text().endswith("\n"), server.log_tail)
        child = int(server.log.read_text())
    finally:
        server.stop(grace_seconds=0.5)
    assert not _alive(server.pid)
    wait_until(lambda: not _alive(child))  # signalled, and about to end


def test_environment_reaches_the_server_and_health_ends_the_wait(
    tmp_path: Path, free_port: int
) -> None:
    script = textwrap.dedent(
        """
        import http.server, os
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(200 if self.path == "/health" else 404)
                self.end_headers()
        print(os.environ["SOME_SETTING"], flush=True)
        http.server.HTTPServer(("127.0.0.1", int(os.environ["PORT"])), Handler).serve_forever()
        """
    )
    environment = {"SOME_SETTING": "heard", "PORT": str(free_port)}
    server = Server([sys.executable, "-c", script], environment, free_port, tmp_path / "log")
    try:
        assert server.wait_until_healthy(SECONDS, lambda _line: None) >= 0
        assert "heard" in server.log_tail()
    finally:
        server.stop()


def test_a_server_that_dies_names_the_error_of_its_engine(tmp_path: Path, free_port: int) -> None:
    script = """
        import sys
        print("(EngineCore pid=7) ERROR [core.py:1] ValueError: Free memory is 1 GiB")
        print("\\n".join(f"(APIServer pid=6) frame {n}" for n in range(60)))
        sys.exit("(APIServer pid=6) RuntimeError: Engine core initialization failed.")
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    server = Server(command, {}, free_port, tmp_path / "log")
    try:
        with pytest.raises(ServerError, match=r"(?s)Free memory is 1 GiB.*initialization failed"):
            server.wait_until_healthy(SECONDS, lambda _line: None)
    finally:
        server.stop()


def test_the_server_listens_on_this_machine_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quickstart, "vllm_command", lambda: ["vllm"])
    command = quickstart.serve_command(Path("/models/tiny"), "tiny", 8123, gpu=False)
    assert command[:3] == ["vllm", "serve", "/models/tiny"]
    options = dict(zip(command[3::2], command[4::2], strict=False))
    assert options["--host"] == "127.0.0.1"
    assert options["--port"] == "8123"
    assert options["--attention-backend"] == "SPARSEK"
    assert options["--dtype"] == cpu_dtype()


def test_the_settings_are_valid_and_sparse_on_the_document() -> None:
    from sparsek_backend.config import resolve_config

    config = resolve_config(quickstart.SETTINGS, {}).config
    policy = config.policy_for(0)
    assert policy.selects_blocks
    assert not policy.prefill.sees_all(quickstart_client.DOCUMENT_CHARACTERS // 6)


def test_settings_of_the_user_win(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "8")
    assert "VLLM_CPU_KVCACHE_SPACE" not in quickstart.serve_environment(False, tmp_path)


def test_the_document_holds_the_sentence_once_and_ends_with_the_question(tmp_path: Path) -> None:
    text = "\n".join("line of text" for _ in range(4000))
    (tmp_path / quickstart_client.DOCUMENT_NAME).write_text(text)
    prompt = quickstart_client.document_prompt(tmp_path)
    assert prompt.count(quickstart_client.PLANTED) == 1
    assert prompt.endswith(quickstart_client.DOCUMENT_QUESTION)


def test_a_proxy_is_not_asked_for_the_server(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("openai")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("NO_PROXY", "example.com")
    monkeypatch.setattr(urllib.request, "_opener", None)  # a new process has asked nothing yet

    def run(_options: object) -> int:
        assert quickstart_client.read_attended(url).share == 0.25
        return len(quickstart_client.ask(url, "tiny", "?", max_tokens=2, write=str).text)

    monkeypatch.setattr(quickstart, "_run", run)
    assert quickstart.main([]) == len("Paris")
    assert os.environ["no_proxy"] == "example.com,127.0.0.1"


@pytest.mark.parametrize("port", ["0", "65536", "http"])
def test_a_wrong_port_is_a_usage_error(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        quickstart.main(["--port", port])
    assert "--port" in capsys.readouterr().err


def test_a_half_downloaded_model_is_named_before_anything_starts(
    tmp_path: Path, free_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00{")
    assert quickstart.main(["--model", str(tmp_path), "--port", str(free_port)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: model folder")
    assert "model.safetensors is cut off" in error


def _alive(pid: int) -> bool:
    """Whether a process runs; one that has ended but was not waited for does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
