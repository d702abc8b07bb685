"""`sparsek bench serve --rate`: lengths, prompts, commands, rows; no server runs.

Servers that fail are in ``test_load_failures.py``.
"""

from __future__ import annotations

import itertools
import json
import socket
import statistics
import subprocess
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from typer.testing import CliRunner

from sparsek_backend.bench import load
from sparsek_backend.bench.cli import app
from sparsek_backend.bench.load_mix import (
    Lengths,
    draw_lengths,
    longest,
    write_number_tokenizer,
    write_prompts,
)
from sparsek_backend.bench.together import Together

RUNNER = CliRunner()
first_prompts: list[str] = []
TIMES = ["p50_ttft_ms", "p99_ttft_ms", "p50_tpot_ms", "p99_tpot_ms"]


def test_lengths_are_of_the_mix_and_the_seed() -> None:
    chats = draw_lengths("sharegpt", 400, 1, 0)
    assert 100 < statistics.median(one.prompt for one in chats) < 170
    assert max(one.prompt for one in chats) > 1000
    documents = draw_lengths("documents", 400, 32768, 0)
    assert all(24576 <= one.prompt <= 40960 for one in documents)
    assert statistics.mean(one.prompt for one in documents) == pytest.approx(32768, rel=0.02)
    assert documents == draw_lengths("documents", 400, 32768, 0) != chats
    assert longest(documents) < 40960 + 512 + 17
    with pytest.raises(ValueError, match="mix: expected one of sharegpt, documents, got 'chat'"):
        draw_lengths("chat", 1, 1, 0)
    with pytest.raises(ValueError, match="num_requests: expected at least 1, got 0"):
        draw_lengths("sharegpt", 0, 1, 0)


def test_prompts_of_a_large_vocabulary_are_not_too_long_for_vllm(tmp_path: Path) -> None:
    """vLLM refuses text of more characters than tokens of the longest word would have."""
    from transformers import AutoTokenizer

    write_number_tokenizer(tmp_path, 128256)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    longest_word = max(map(len, tokenizer.get_vocab()))
    path = tmp_path / "prompts.jsonl"
    write_prompts(path, [Lengths(2000, 1)] * 2, len(tokenizer), tokenizer.decode, 0)
    for line in path.read_text().splitlines():
        prompt = json.loads(line)["prompt"]
        assert len(tokenizer(prompt).input_ids) == 2000
        assert len(prompt) <= 2000 * longest_word


class FakeServer:
    """Stands for a server process; keeps its commands and environments."""

    commands: ClassVar[list[list[str]]] = []
    environments: ClassVar[list[dict[str, str]]] = []
    url = "http://127.0.0.1:1"

    def __init__(self, command: list[str], environment: dict[str, str], port: int, *_: Any) -> None:
        assert command[-2:] == ["--port", str(port)]
        self.commands.append(command)
        self.environments.append(environment)
        self.port = port

    def wait_until_healthy(self, *_: Any) -> float:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", self.port))  # kept for the server
        with socket.socket() as own:
            own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            own.bind(("127.0.0.1", self.port))
        return 0.0

    def stop(self) -> None:
        """Nothing runs."""

    def log_tail(self) -> str:
        return "the log"


@pytest.fixture
def stood_in(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The `vllm bench serve` commands that were run; SPARSEK keeps twice the rate."""
    commands: list[list[str]] = []

    def run(_: Together, command: list[str]) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        option = dict(itertools.pairwise(command))
        ours = "SPARSEK" in FakeServer.commands[-1]
        limit = 4.0 if ours else 2.0
        rate = float(option["--request-rate"])
        count = int(option["--num-prompts"])
        prompts = Path(option["--dataset-path"]).read_text().splitlines()
        first_prompts.append(prompts[0])
        result = {
            "completed": count,
            "failed": 0,
            "request_throughput": min(rate, limit),
            "request_goodput": min(rate, limit),
            "total_input_tokens": sum(len(json.loads(p)["prompt"].split()) for p in prompts),
            **{
                f"p{p}_{m}_ms": 60.0 if rate > limit else 20.0
                for p in (50, 99)
                for m in ("ttft", "tpot")
            },
        }
        Path(option["--result-dir"], option["--result-filename"]).write_text(json.dumps(result))
        return subprocess.CompletedProcess(command, 0, "", "")

    FakeServer.commands, FakeServer.environments = [], []
    first_prompts.clear()
    monkeypatch.setattr(load, "Server", FakeServer)
    monkeypatch.setattr(load, "vllm_command", lambda: ["vllm"])
    monkeypatch.setattr(Together, "run", run)
    return commands


def test_both_backends_bear_every_rate(stood_in: list[list[str]], tmp_path: Path) -> None:
    options = ["serve", "--model", "tiny", "--out", str(tmp_path), "--rate", "2", "--rate", "4"]
    options += ["--document-tokens", "1k", "--num-requests", "6", "--sparsek", '{"top_k": 4}']
    options += ["--ttft-limit-ms", "500", "--eager", "--name", "load", "--baseline", "CPU_ATTN"]
    result = RUNNER.invoke(app, options)
    assert result.exit_code == 0, result.output
    assert "CPU_ATTN: goodput 2 requests/s at p99 TPOT <= 50 ms" in result.output
    assert "SPARSEK: goodput 4 requests/s at p99 TPOT <= 50 ms" in result.output
    assert (tmp_path / "load.png").read_bytes().startswith(b"\x89PNG")
    rows = json.loads((tmp_path / "load.json").read_text())
    assert [(row["rate"], row["backend"]) for row in rows] == [
        (rate, backend) for rate in (2, 4) for backend in ("CPU_ATTN", "SPARSEK")
    ]
    assert rows[1]["mean_prompt_tokens"] == pytest.approx(1024, rel=0.25)
    theirs, ours = FakeServer.commands
    assert "--additional-config" in ours
    assert "--additional-config" not in theirs
    for command in (ours, theirs):
        assert {"--load-format", "dummy", "--enforce-eager"} <= set(command)
    assert len(stood_in) == 6, "each server is warmed up once"
    prompts = [command[command.index("--dataset-path") + 1] for command in stood_in]
    assert prompts[:3] == prompts[3:], "the same for both backends"
    assert len(set(first_prompts)) == 3, "others for each rate: the prefix cache helps none"
    assert stood_in[1][stood_in[1].index("--goodput") + 1 :][:2] == ["tpot:50", "ttft:500"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rate", "0"], "rate: expected requests a second above 0, got 0"),
        (["--rate", "1", "--mix", "chat"], "mix: expected one of"),
        (["--rate", "1", "--context", "2k"], "rate: requests come as --mix says; drop --context"),
        (["--num-requests", "4"], "rate: expected with options of a load; drop --num-requests"),
        (["--side-by-side"], "rate: expected with options of a load; drop --side-by-side"),
        (["--rate", "1", "--document-tokens", "x"], "document-tokens: expected a size such as 8k"),
    ],
)
def test_wrong_options_start_no_server(
    options: list[str], message: str, stood_in: list[list[str]], tmp_path: Path
) -> None:
    result = RUNNER.invoke(app, ["serve", "--model", "tiny", "--out", str(tmp_path), *options])
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    assert FakeServer.commands == []


def test_side_by_side_each_server_has_a_gpu(
    stood_in: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["serve", "--model", "tiny", "--out", str(tmp_path), "--rate", "1", "--side-by-side"]
    options += ["--document-tokens", "1k", "--num-requests", "2"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    result = RUNNER.invoke(app, options)
    assert result.exit_code == 2
    assert "side_by_side: expected 2 GPUs, got 1" in " ".join(result.output.split())
    assert FakeServer.commands == []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    result = RUNNER.invoke(app, options)
    assert result.exit_code == 0, result.output
    gpus = {
        "SPARSEK" in command: environment["CUDA_VISIBLE_DEVICES"]
        for command, environment in zip(FakeServer.commands, FakeServer.environments, strict=True)
    }
    assert gpus == {False: "3", True: "5"}
    assert len(stood_in) == 4


def test_a_failed_request_is_an_error(
    stood_in: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Together, command: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "it broke", "")

    monkeypatch.setattr(Together, "run", fail)
    result = RUNNER.invoke(app, ["serve", "--model", "tiny", "--out", str(tmp_path), "--rate", "1"])
    assert result.exit_code == 2
    assert "vLLM's own: vllm bench serve failed" in result.output
    assert "it broke" in result.output
    assert len(FakeServer.commands) == 1, "the other backend is not started"
