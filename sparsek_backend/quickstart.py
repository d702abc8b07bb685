"""`python -m sparsek_backend.quickstart`: serve, ask, measure, stop (deploy/quickstart.sh)."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

import torch

from sparsek_backend import quickstart_client as client
from sparsek_backend.machine import cpu_dtype
from sparsek_backend.models import cache_root, fetch_model, fetch_texts, verify_model
from sparsek_backend.quickstart_server import HOST, Server, ServerError, check_port, vllm_command

START_TIMEOUT_SECONDS = 600.0
# Small enough that a document of 6,000 tokens is attended sparsely: 1,600 tokens per query.
SETTINGS = {
    "mode": "block_topk",
    "num_sink": 64,
    "window_size": 512,
    "top_k": 16,
    "decode_tokens": 1024,
    "dense_below": 1024,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the quickstart; return its exit status (0 when both answers are right)."""
    options = _parse(arguments)
    signal.signal(signal.SIGTERM, _stop_on_signal)
    exempt = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
    os.environ["no_proxy"] = ",".join(filter(None, (exempt, HOST)))  # pip may need a proxy
    try:
        return _run(options)
    except (ServerError, ValueError, RuntimeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def serve_command(model: Path, name: str, port: int, gpu: bool) -> list[str]:
    """Return the `vllm serve` command line; it is the one a user would type."""
    command = [*vllm_command(), "serve", str(model), "--attention-backend", "SPARSEK"]
    command += ["--additional-config", json.dumps({"sparsek": SETTINGS})]
    command += ["--served-model-name", name, "--host", HOST, "--port", str(port)]
    return command if gpu else [*command, "--dtype", cpu_dtype(), "--enforce-eager"]


def serve_environment(gpu: bool, metrics: Path) -> dict[str, str]:
    """Return the variables that the server gets where the user has not set them.

    Args:
        gpu: whether it runs on a GPU; on a CPU its KV cache is kept to 1 GiB.
        metrics: an empty folder, through which /metrics sees the counters of every process.
    """
    wanted = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": HOST,
        "PROMETHEUS_MULTIPROC_DIR": str(metrics),
    }
    if not gpu:
        wanted["VLLM_CPU_KVCACHE_SPACE"] = "1"
    return {name: value for name, value in wanted.items() if name not in os.environ}


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="quickstart", description=__doc__)
    parser.add_argument("--port", type=int, default=8000, help="port on 127.0.0.1")
    parser.add_argument("--keep", action="store_true", help="leave the server running")
    parser.add_argument("--model", type=Path, help="a Hugging Face folder")
    options = parser.parse_args(arguments)
    if not 1 <= options.port <= 65535:
        parser.error(f"--port must be 1 to 65535, got {options.port}")
    return options


def _stop_on_signal(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _run(options: argparse.Namespace) -> int:
    check_port(options.port)
    if options.model is None:
        model, name = fetch_model(progress=_say), "smollm2-135m-instruct"
    else:
        verify_model(options.model)
        model, name = options.model, options.model.name
    texts = fetch_texts(progress=_say)

    gpu = torch.cuda.is_available()
    command = serve_command(model, name, options.port, gpu)
    log = cache_root() / f"serve-{options.port}.log"
    metrics = cache_root() / f"serve-{options.port}.metrics"
    shutil.rmtree(metrics, ignore_errors=True)
    metrics.mkdir(parents=True)
    _say(f"==> starting the server on the {'GPU' if gpu else 'CPU'} (log: {log})")
    _say("    " + shlex.join(command))
    server = Server(command, serve_environment(gpu, metrics), options.port, log)
    keep = False
    try:
        seconds = server.wait_until_healthy(START_TIMEOUT_SECONDS, _say)
        _say(f"    ready after {seconds:.0f} s")
        right = _converse(server, name, texts, check_answers=options.model is None)
        keep = bool(options.keep)
    finally:
        if not keep:
            server.stop()
    if keep:
        _say_how_to_go_on(server, name)
    else:
        _say("==> the server is stopped")
    return 0 if right else 1


def _converse(server: Server, name: str, texts: Path, *, check_answers: bool) -> bool:
    _say(f"\n==> chat: {client.CHAT_QUESTION}")
    chat = _ask(server, name, client.CHAT_QUESTION)
    _report(chat)

    _say(f"\n==> a long document with one planted sentence: {client.PLANTED}")
    _say(f"    {client.DOCUMENT_QUESTION}")
    _say("    (the model reads the document first; on a CPU this takes a minute or two)")
    before = client.read_attended(server.url)
    marks: list[client.Attended] = []
    document = _ask(
        server,
        name,
        client.document_prompt(texts),
        on_first=lambda: marks.append(client.read_attended(server.url)),
    )
    _report(document)
    after = client.read_attended(server.url)
    for part, counted in _parts(before, marks, after):
        _say(f"    attended {counted.share:.1%} of what dense attention reads for the {part}")

    if not check_answers:
        return True
    wrong = [
        f"expected {expected!r} in the answer {answer.text!r}"
        for expected, answer in ((client.CHAT_ANSWER, chat), (client.DOCUMENT_ANSWER, document))
        if expected not in answer.text
    ]
    for line in wrong:
        print(f"error: {line}", file=sys.stderr)
    return not wrong


def _parts(
    before: client.Attended, marks: list[client.Attended], after: client.Attended
) -> list[tuple[str, client.Attended]]:
    """Split what was counted at the answer's first piece; an answer of one token has no part."""
    if not marks or after.context == marks[0].context:
        return [("prompt", after - before)]
    return [("prompt", marks[0] - before), ("answer", after - marks[0])]


def _ask(
    server: Server, name: str, content: str, on_first: Callable[[], object] | None = None
) -> client.Answer:
    """Ask, print the answer as it comes, and run ``on_first`` when its first piece is there."""
    waiting = [] if on_first is None else [on_first]

    def write(text: str) -> None:
        print(text, end="", flush=True)
        if waiting:
            waiting.pop()()

    print("    ", end="")
    answer = client.ask(server.url, name, content, max_tokens=48, write=write)
    print(flush=True)
    return answer


def _report(answer: client.Answer) -> None:
    _say(
        f"    {answer.prompt_tokens} prompt tokens, first token after "
        f"{answer.first_token_seconds:.2f} s, then {answer.tokens_per_second:.1f} tokens/s"
    )


def _say_how_to_go_on(server: Server, name: str) -> None:
    messages = [{"role": "user", "content": client.CHAT_QUESTION}]
    body = {"model": name, "messages": messages, "temperature": 0}
    _say(f"\n==> the server goes on at {server.url}; talk to it:")
    _say(
        f"    curl -s {server.url}/v1/chat/completions -H 'Content-Type: application/json' "
        f"-d {shlex.quote(json.dumps(body))}"
    )
    _say(f"    and stop it with: kill {server.pid}")


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
