"""A `tasks.Scorer` over an OpenAI endpoint of vLLM."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any


class ServerError(RuntimeError):
    """The server is down, refused a request, or cannot do what the evaluation needs."""


class ServedScorer:
    """Scores through `/v1/completions` with `prompt_logprobs` and through `/tokenize`.

    Args:
        base_url: e.g. `http://127.0.0.1:8000/v1`.
        model: served model name; None takes the first that the server lists.
        timeout: seconds for one request.

    Raises:
        ServerError: no server answers, or it does not list the model.
    """

    def __init__(self, base_url: str, model: str | None = None, timeout: float = 600.0) -> None:
        parts = urllib.parse.urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ServerError(
                f"base-url: expected a URL such as http://127.0.0.1:8000/v1, got {base_url!r}"
            )
        self._root = base_url.rstrip("/").removesuffix("/v1")
        self._timeout = timeout
        listed = [entry["id"] for entry in self._call("/v1/models", None).get("data", ())]
        if not listed:
            raise ServerError(
                f"base-url: expected an OpenAI server, {self._root}/v1/models lists no model"
            )
        if model is not None and model not in listed:
            raise ServerError(f"model: expected one of {listed} at {base_url}, got {model!r}")
        self.model: str = model or listed[0]

    def tokenize(self, text: str) -> list[int]:
        """Token ids without special tokens."""
        body = {"model": self.model, "prompt": text, "add_special_tokens": False}
        return [int(token) for token in self._call("/tokenize", body)["tokens"]]

    def prompt_logprobs(self, tokens: Sequence[int]) -> list[float]:
        """Log-probability of each token but the first."""
        entries = self._complete(tokens, 1, prompt_logprobs=0).get("prompt_logprobs")
        if not entries or len(entries) != len(tokens):
            raise ServerError(
                f"{self._root}: the server returned no prompt_logprobs for {self.model!r}; the "
                "evaluation needs a vLLM server whose model supports them"
            )
        return [
            float(entry[str(token)]["logprob"])
            for token, entry in zip(tokens[1:], entries[1:], strict=True)
        ]

    def generate(self, tokens: Sequence[int], max_tokens: int) -> str:
        """Greedy continuation as text."""
        return str(self._complete(tokens, max_tokens)["text"])

    def _complete(self, tokens: Sequence[int], max_tokens: int, **more: Any) -> dict[str, Any]:
        body = {"model": self.model, "prompt": list(tokens), "max_tokens": max_tokens}
        body |= {"temperature": 0.0, "seed": 0, **more}
        choice: dict[str, Any] = self._call("/v1/completions", body)["choices"][0]
        return choice

    def _call(self, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        request = urllib.request.Request(
            self._root + path,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        if key := os.environ.get("OPENAI_API_KEY"):
            request.add_header("Authorization", f"Bearer {key}")
        try:
            with urllib.request.urlopen(request, timeout=self._timeout) as response:
                answer: dict[str, Any] = json.load(response)
            if not isinstance(answer, dict):
                raise ValueError(f"expected a JSON object, got {type(answer).__name__}")
        except urllib.error.HTTPError as error:
            detail = error.read(2000).decode(errors="replace")
            raise ServerError(f"{self._root}{path}: status {error.code}: {detail}") from error
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise ServerError(
                f"base-url: no OpenAI server answers at {self._root} ({reason}); start one with "
                "`vllm serve MODEL --attention-backend SPARSEK`"
            ) from error
        return answer
