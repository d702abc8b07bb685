"""A scorer and a tokenizer over an OpenAI endpoint of vLLM."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from http.client import HTTPException
from threading import Semaphore
from typing import Any

from sparsek_backend.eval.prompt import Prompt, Tokenizer, Tokens
from sparsek_backend.eval.scoring import Reply
from sparsek_backend.eval.stats import TOP
from sparsek_backend.malformed import expecting

_CONCURRENCY = 8
_TIMEOUT = 600.0
_READ_AT_A_TIME = Semaphore(2)
"""Prompts whose log-probabilities are on their way: of 128k tokens some hundred megabytes each."""


class ServerError(RuntimeError):
    """The server is down, refused a request, or cannot do what the evaluation needs."""


class ServedScorer(Tokenizer):
    """Scores through `/v1/completions` with `prompt_logprobs` and through `/tokenize`.

    Args:
        base_url: such as `http://127.0.0.1:8000/v1`.
        model: served model name; None takes the first that the server lists.

    Raises:
        ServerError: no server answers, or it does not list the model.
    """

    def __init__(self, base_url: str, model: str | None = None) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise ServerError(
                f"base-url: expected a URL such as http://127.0.0.1:8000/v1, got {base_url!r}"
            )
        self._root = base_url.rstrip("/").removesuffix("/v1")
        with self._reading("/v1/models"):
            listed = [entry["id"] for entry in self._call("/v1/models", None).get("data", ())]
        if not listed:
            raise ServerError(
                f"base-url: expected an OpenAI server, {self._root}/v1/models lists no model"
            )
        if model is not None and model not in listed:
            raise ServerError(f"model: expected one of {listed} at {base_url}, got {model!r}")
        self.model: str = model or listed[0]

    def read(self, text: str, *, special: bool = False) -> Tokens:
        body = {"model": self.model, "prompt": text, "add_special_tokens": special}
        with self._reading("/tokenize"):
            found = tuple(int(token) for token in self._call("/tokenize", body)["tokens"])
            if text.strip() and not found:  # prompts would be filled without end
                raise ValueError(f"{text[:20]!r} has no tokens")
        return found

    def reply(self, prompts: Sequence[Prompt]) -> list[Reply]:
        """Answer prompts greedily, and read their targets as ends of prompts.

        A server forces no tokens, so what it finds likely along a target comes from its prefill.
        """
        with ThreadPoolExecutor(_CONCURRENCY) as pool:
            return list(pool.map(self._reply, prompts))

    def _reply(self, prompt: Prompt) -> Reply:
        with self._reading("/v1/completions"):
            asks = prompt.variant != "text"
            text = str(self._complete(prompt.ids, prompt.max_tokens)["text"]) if asks else ""
            tokens = [*prompt.ids, *prompt.target]
            with _READ_AT_A_TIME:
                read = self._complete(tokens, 1, prompt_logprobs=TOP).get("prompt_logprobs") or ()
                size, read = len(read), read[-len(prompt.target) :]
            if size != len(tokens):
                raise ServerError(
                    f"{self._root}: the server returned no prompt_logprobs for {self.model!r}; the "
                    "evaluation needs a vLLM server whose model supports them"
                )
            likely = [{int(x): float(y["logprob"]) for x, y in place.items()} for place in read]
        return Reply(None, text, likely)

    def _reading(self, path: str) -> AbstractContextManager[None]:
        """Let what an answer lacks say where it came from."""
        return expecting(f"{self._root}{path}: expected the answer of a vLLM server", ServerError)

    def _complete(self, tokens: Sequence[int], max_tokens: int, **more: Any) -> dict[str, Any]:
        body = {"model": self.model, "prompt": list(tokens), "max_tokens": max_tokens}
        body |= {"temperature": 0.0, "seed": 0, **more}
        return dict(self._call("/v1/completions", body)["choices"][0])

    def _call(self, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._root + path, data)
        request.add_header("Content-Type", "application/json")
        if key := os.environ.get("OPENAI_API_KEY"):
            request.add_header("Authorization", f"Bearer {key}")
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT) as response:
                answer: dict[str, Any] = json.load(response)
            if not isinstance(answer, dict):
                raise ValueError(f"expected a JSON object, got {type(answer).__name__}")
        except urllib.error.HTTPError as error:
            detail = error.read(2000).decode(errors="replace")
            raise ServerError(f"{self._root}{path}: status {error.code}: {detail}") from error
        except (OSError, ValueError, HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise ServerError(
                f"base-url: no OpenAI server answers at {self._root} ({reason}); start one with "
                "`vllm serve MODEL --attention-backend SPARSEK`"
            ) from error
        return answer
