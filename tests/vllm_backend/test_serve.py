"""A real ``vllm serve`` process, driven by the OpenAI client."""

from __future__ import annotations

import os
import re
import runpy
import signal
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import processes
from tests.ports import hold_port
from tests.processes import SECONDS, wait_until
from tests.vllm_backend.dashboard import (
    LABELS_OF_A_SCRAPE,
    dashboard_queries,
    rule_queries,
    selected,
)
from tests.vllm_backend.nsa_models import CONFIG, complete, make_model
from tests.vllm_backend.servers import (
    DTYPE,
    MODEL,
    ROOT,
    Server,
    command,
    group_members,
    server_environment,
)
from tests.vllm_backend.tiny_models import VOCABULARY, write_tokenizer

pytestmark = pytest.mark.serve


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return server_environment(tmp_path_factory.mktemp("environment"))


@pytest.fixture(scope="module")
def server(
    smollm2: Path, environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    blocks = '"num_sink": 64, "window_size": 64, "top_k": 2, "decode_tokens": 128'
    settings = f'{{"sparsek": {{{blocks}, "dense_below": 128}}}}'
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
    share = "3.1" if "float32" in DTYPE else "4.7"  # of pages twice as large
    assert (
        "SPARSEK layers 0-29: block_topk, 1 sink block + window 64 + 2 blocks of 64 per KV head, "
        "decoded tokens choose 128 by records, dense below 128, last 64 to 1024 tokens of a "
        f"prompt dense, {share} % summaries" in line
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
    with urllib.request.urlopen(server.url("/metrics"), timeout=SECONDS) as page:
        lines = page.read().decode().splitlines()
    values = {}
    for line in lines:
        if line.startswith("sparsek_"):
            name, value = line.rsplit(" ", 1)
            phase = re.search('phase="([a-z]+)"', name)
            values[name.split("{")[0], phase and phase[1]] = float(value)
    for phase in ("prefill", "decode"):
        attended, context = (
            values[f"sparsek_{name}_tokens_total", phase] for name in ("attended", "context")
        )
        assert 0 < attended < context, phase


def test_dashboard_and_alerts_read_what_the_metrics_page_has(server: Server) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    with urllib.request.urlopen(server.url("/metrics"), timeout=SECONDS) as page:
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


def test_a_natively_sparse_folder_is_served_when_another_was_killed_in_mid_stream(
    server: Server, environment: dict[str, str], tmp_path: Path
) -> None:
    """Last test of the server that is killed, with its engine: another one serves at once.

    What that one serves was trained and saved, and answers the module's own tokens.
    """
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
    os.killpg(server.process.pid, signal.SIGKILL)  # vLLM's engine would outlive its server
    server.process.wait()
    import httpx

    with pytest.raises((APIError, httpx.HTTPError)):
        for _ in chunks:
            pass
    wait_until(lambda: not group_members(server.process.pid))

    model = make_model(CONFIG, tmp_path)
    write_tokenizer(tmp_path)
    prompt = torch.randint(3, VOCABULARY, (300,), generator=torch.Generator().manual_seed(0))
    again = Server(tmp_path, environment, tmp_path / "again.log", "--dtype", "float32")
    try:
        again.wait_until_healthy()
        answer = again.client().completions.create(
            model=MODEL,
            prompt=prompt.tolist(),
            max_tokens=8,
            temperature=0,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
    finally:
        again.stop()
    assert answer.choices[0].token_ids == complete(model, prompt.tolist(), 8)
    assert "SPARSEK layers 0-1: nsa, mlp of 16 tokens every 8 + 5 blocks of 32" in again.text()


def test_a_bad_setting_ends_the_process_with_one_message(
    smollm2: Path, environment: dict[str, str]
) -> None:
    """That every bad setting is one error of the front end: ``test_settings_stop_the_start``."""
    setting = ("--additional-config", '{"sparsek": {"sel_block_size": 96}}')
    with hold_port() as held:
        start = command(smollm2, held.getsockname()[1], *setting)
        done = processes.run(*start, env=environment)
    assert done.returncode != 0
    text = done.stdout + done.stderr
    assert text.count("SPARSEK setting sel_block_size") == 1
    assert "remedy: --block-size 192" in text  # of whole records too
    assert "Engine core" not in text
