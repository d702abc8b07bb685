"""A server of a byte-level model, with the routes that the evaluation uses."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Endpoint(BaseHTTPRequestHandler):
    """The three routes that the evaluation uses, over a byte-level model."""

    logprobs = True
    models: object = {"data": [{"id": "served"}]}
    width = 1  # bytes of a token
    # what it finds in a prompt, of which the last group is its answer
    answer = r"(?s)number of the (\S+)\?.*number of the \1 is (\d+)\."

    def do_GET(self) -> None:
        self._send(self.models)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            begin = [1] if body["add_special_tokens"] else []
            text = body["prompt"].encode()
            parts = [text[i : i + self.width] for i in range(0, len(text), self.width)]
            self._send({"tokens": begin + [int.from_bytes(part, "big") for part in parts]})
            return
        if len(body["prompt"]) > 5000:
            self._send({"error": "too long for this model"}, 400)
            return
        found = re.search(self.answer, text_of(body["prompt"]))
        said = found[found.re.groups] if found else "12345"
        choice: dict[str, Any] = {"text": f" {said}. ok"}
        if "prompt_logprobs" in body and self.logprobs:
            tokens = body["prompt"]
            found = [{str(t): {"logprob": -t}, "0": {"logprob": -0.1}} for t in tokens[1:]]
            choice["prompt_logprobs"] = [None, *found]
        self._send({"choices": [choice]})

    def _send(self, answer: object, status: int = 200) -> None:
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        """Keep the test's output clean."""


def text_of(tokens: Sequence[int]) -> str:
    """The text of token ids."""
    return b"".join(t.to_bytes((t.bit_length() + 7) // 8, "big") for t in tokens).decode()


@contextmanager
def serving() -> Iterator[str]:
    """The address of a running server."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()
