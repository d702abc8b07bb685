"""A storm of malformed and greedy requests against a server, and what is left of it afterwards.

``python -m tests.vllm_backend.storm --requests 5000`` starts a server of a tiny model, storms it
and prints the answers by kind, the memory before and after, and what went wrong; the exit status is
1 if anything did.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch

from tests.processes import SECONDS
from tests.vllm_backend.servers import (
    MODEL,
    Server,
    group_members,
    server_environment,
)
from tests.vllm_backend.tiny_models import VOCABULARY, make_tiny_model

MAX_LEN = 4096
"""Tokens of a sequence; an answer of this length takes seconds, so clients can break in on it."""
AT_ONCE = 8
"""Requests that the server runs together; ten times as many are sent together."""
OPTIONS = (
    *("--max-model-len", str(MAX_LEN), "--max-num-seqs", str(AT_ONCE)),
    *("--max-num-batched-tokens", "64", "--dtype", "float32", "--block-size", "64"),
    "--additional-config",
    '{"sparsek": {"num_sink": 16, "window_size": 32, "sel_block_size": 32, "top_k": 1, '
    '"decode_tokens": 64, "dense_below": 0}}',
)
"""Of a server of a tiny model, which selects blocks beyond the first hundred tokens."""
PROMPT = list(range(3, 123))
COMPLETIONS = "/v1/completions"

GOOD, BAD, ANY = "good", "bad", "any"
"""Answers that a kind may get: 200; 4xx or 5xx; either."""

WRONG: dict[str, list[Any]] = {
    "model": [3, [], "absent"],
    "prompt": [17.5, True, {"a": 1}, [[], ["x"]], [[[1]]], [None], "", [], [[]], [-1], [1 << 40]],
    "max_tokens": ["many", -1, 1.5, [8], {}],
    "temperature": ["hot", -1, [], "NaN"],
    "top_p": [0, 7, "x"],
    "n": [0, -3, 1 << 20, "two"],
    "logprobs": [-5, 1 << 20, "x"],
    "stop": [3, {"a": 1}, [[1]]],
    "stream": ["perhaps", 9],
    "seed": ["x", 1 << 80],
    "logit_bias": [{"x": "y"}, {"1": "y"}, [1]],
    "min_tokens": [-1, 1 << 40],
    "response_format": ["x", {"type": "x"}],
    "prompt_logprobs": [1 << 20, "x"],
    "echo": ["x"],
}
"""Values that a field may not have."""
NO_JSON = (b"", b"{", b"[1, 2", b"null", b"7", b"\xff\xfe", b"{" * 2000, b'{"prompt": "1"}x')


@dataclass(frozen=True)
class Shot:
    """One request.

    Args:
        kind: what is wrong with it.
        expected: ``GOOD``, ``BAD`` or ``ANY``.
        body: what is posted.
        path: where.
        hang_up: whether the client closes the connection at the first token.
    """

    kind: str
    expected: str
    body: bytes
    path: str = COMPLETIONS
    hang_up: bool = False


def fine(**changes: Any) -> dict[str, Any]:
    """A valid request with some fields changed.

    It has no seed: with one, and a temperature, a prompt that is cut into chunks ends vLLM's engine
    on a CPU, whatever its attention backend ("CPU Generator does not use offset").
    """
    asked = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4, "temperature": 0}
    return {**asked, "ignore_eos": True, "return_token_ids": True, **changes}


def _shot(kind: str, expected: str, hang_up: bool = False, **changes: Any) -> Shot:
    body = json.dumps(fine(**changes)).encode()
    return Shot(kind, expected, body, hang_up=hang_up)


def draw(number: random.Random) -> Shot:
    """A request of a random kind."""

    def tokens(length: int) -> list[int]:
        return number.choices(range(3, VOCABULARY), k=length)

    def wrong_type() -> Shot:
        name = number.choice(list(WRONG))
        value = number.choice(WRONG[name])
        # The server reads some of them leniently, such as an empty list of stop words.
        return _shot(f"wrong {name}", ANY if value in ("NaN", {}) else BAD, **{name: value})

    def no_json() -> Shot:
        return Shot("no JSON", BAD, number.choice(NO_JSON))

    def wrong_path() -> Shot:
        path = number.choice(["/v1/nothing", "/v1/models", "/v1/embeddings", "/score"])
        return Shot("wrong path", BAD, b"{}", path)

    kinds: dict[str, Callable[[], Shot]] = {
        "wrong type": wrong_type,
        "no JSON": no_json,
        "wrong path": wrong_path,
        "fine": lambda: _shot("fine", GOOD, prompt=tokens(number.randrange(1, 150))),
        "too long": lambda: _shot(
            "too long", BAD, prompt=tokens(number.choice([MAX_LEN + 1, 5000]))
        ),
        "huge max_tokens": lambda: _shot(
            "huge max_tokens", ANY, max_tokens=number.choice([1 << 20, 1 << 62, 1 << 80])
        ),
        "hang up": lambda: _shot(
            "hang up", GOOD, hang_up=True, max_tokens=100, stream=True, prompt=tokens(60)
        ),
        "several samples": lambda: _shot("several samples", GOOD, n=3, temperature=1),
    }
    weights = {"wrong type": 8, "fine": 3, "huge max_tokens": 0.5}
    chosen = number.choices(list(kinds), [weights.get(name, 1) for name in kinds])[0]
    return kinds[chosen]()


@dataclass
class Report:
    """Answers of a storm.

    Args:
        answers: how often each kind got each status.
        faults: what a server may not do, in words.
    """

    answers: Counter[tuple[str, int]]
    faults: list[str]


async def _answer(client: httpx.AsyncClient, shot: Shot) -> int:
    headers = {"Content-Type": "application/json"}
    post: dict[str, Any] = {"content": shot.body, "headers": headers}
    if not shot.hang_up:
        return (await client.post(shot.path, **post)).status_code
    async with client.stream("POST", shot.path, **post) as response:
        async for _ in response.aiter_lines():
            break  # closes the connection
        return response.status_code


async def _storm(url: str, count: int, seed: int) -> Report:
    report = Report(Counter(), [])
    number = random.Random(seed)
    shots = iter([draw(number) for _ in range(count)])
    # A connection that is kept may be closed by the server just as the next request takes it.
    limits = httpx.Limits(max_connections=10 * AT_ONCE, max_keepalive_connections=0)

    async def shoot(client: httpx.AsyncClient) -> None:
        for shot in shots:
            try:
                status = await asyncio.wait_for(_answer(client, shot), SECONDS)
            except (TimeoutError, httpx.HTTPError) as error:
                report.faults.append(f"{shot.kind}: {error!r} to {shot.body[:200]!r}")
                continue
            report.answers[shot.kind, status] += 1
            good = status == 200
            if (good and shot.expected == BAD) or (not good and shot.expected == GOOD):
                report.faults.append(f"{shot.kind}: status {status} to {shot.body[:200]!r}")

    async with httpx.AsyncClient(base_url=url, timeout=SECONDS, limits=limits) as client:
        workers: list[Awaitable[None]] = [shoot(client) for _ in range(10 * AT_ONCE)]
        await asyncio.gather(*workers)
    return report


def storm(server: Server, count: int, seed: int = 0) -> Report:
    """Send ``count`` random requests, ten times as many together as the server runs together."""
    return asyncio.run(_storm(server.url(""), count, seed))


def ask(server: Server) -> list[int]:
    """The tokens of a valid request."""
    answer = httpx.post(server.url(COMPLETIONS), json=fine(max_tokens=16), timeout=SECONDS)
    answer.raise_for_status()
    return list(answer.json()["choices"][0]["token_ids"])


def unfinished(server: Server) -> float:
    """Requests that the engine still runs or keeps waiting."""
    page = httpx.get(server.url("/metrics"), timeout=SECONDS).text
    found = re.findall(r"^vllm:num_requests_(?:running|waiting)\{.*\} (\S+)$", page, re.MULTILINE)
    return sum(map(float, found))


def memory(server: Server) -> dict[str, float]:
    """MiB that the server's processes hold, and that the GPU has given to anyone."""
    size, pages = os.sysconf("SC_PAGE_SIZE"), 0
    for process in group_members(server.process.pid):
        with suppress(OSError):  # it ended meanwhile
            pages += int(Path(f"/proc/{process}/statm").read_text().split()[1])
    found = {"host": pages * size / 2**20}
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        found["device"] = (total - free) / 2**20
    return found


def main() -> int:
    """Storm a server of a tiny model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_tiny_model("llama", folder / "model")
        server = Server(model, server_environment(folder), folder / "server.log", *OPTIONS)
        try:
            server.wait_until_healthy()
            expected = ask(server)
            faults = storm(server, asked.requests // 5, asked.seed + 1).faults  # fills the caches
            before = memory(server)
            report = storm(server, asked.requests, asked.seed)
            after = memory(server)
            faults += report.faults
            if ask(server) != expected:
                faults.append("another answer than before the storm")
        finally:
            server.stop()
    for (kind, status), times in sorted(report.answers.items()):
        print(f"{kind:24} {status} {times:6}")
    for place, size in after.items():
        print(f"{place} memory: {before[place]:.0f} MiB before, {size:.0f} MiB after")
    print("\n".join(faults) or "no fault")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
