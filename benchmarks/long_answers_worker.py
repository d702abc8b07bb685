"""Worker of `long_answers.py`: answers every document twice, freely and token by token.

Dense attention leads: its second answer never ends, and what it gave to each token is kept.  The
others are led along that answer, and the KL divergence from dense attention is taken on the way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from sparsek_backend.eval.engine import backend_report, close_engine
from sparsek_backend.eval.local import open_scoring_engine
from sparsek_backend.eval.prompt_file import load_prompts
from sparsek_backend.eval.workers import report_progress, serve_job

LIKELIEST = 512
"""Tokens of a distribution that are kept one by one; the others are kept as one sum."""
BIN = 64
"""Positions that a mean is over."""
_FOLLOWED = "sparsek_followed_document"
_SMALLEST = 1e-7
_STRIDE = 1 << 20  # seeds of a document: generators of a CPU take 32 bits

Reference = Mapping[str, Any]
"""``tokens`` of an answer, and at each the likeliest ``ids`` ``[T, K]`` with ``logprobs``."""


class Follower(Protocol):
    """What is done with the logits of one answer's tokens, in turn."""

    def step(self, generated: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        """Take the logits behind the tokens so far; returns those to choose by."""


FOLLOWERS: dict[str, Follower] = {}
"""Of this process, by request."""


class Free:
    """Samples: noise that a seed and the position decide makes the sampled token the likeliest.

    Args:
        seed: of the noise.
        temperature: of the sampling; 0 samples the likeliest token.
    """

    def __init__(self, seed: int, temperature: float) -> None:
        self._seed, self._temperature = seed, temperature

    def step(self, generated: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        """Add the noise."""
        if not self._temperature:
            return logits
        generator = torch.Generator(logits.device)
        generator.manual_seed(self._seed * _STRIDE + len(generated))
        noise = torch.empty_like(logits).exponential_(generator=generator)
        return logits / self._temperature - noise.log()


class Lead(Free):
    """Keeps what the model gives to every token, and lets it sample any but the last of an answer.

    Args:
        seed, temperature: of :class:`Free`.
        count: tokens of the answer.
        stops: tokens that end answers.
    """

    def __init__(self, seed: int, temperature: float, count: int, stops: Sequence[int]) -> None:
        super().__init__(seed, temperature)
        self._count, self._stops = count, stops
        self._ids = self._logprobs = torch.empty(0)

    def step(self, generated: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        """Keep the likeliest tokens, and forbid those that end the answer."""
        logprobs, ids = logits.float().log_softmax(-1).topk(min(LIKELIEST, len(logits)))
        if not len(self._ids):
            shape = (self._count, len(ids))
            self._ids = torch.zeros(shape, dtype=torch.int32, device=logits.device)
            self._logprobs = torch.zeros(shape, device=logits.device)
        self._ids[len(generated)], self._logprobs[len(generated)] = ids, logprobs
        for stop in self._stops:
            logits[stop] = float("-inf")
        return super().step(generated, logits)

    def reference(self, tokens: Sequence[int]) -> Reference:
        """What others are compared with."""
        kept = {"ids": self._ids.cpu(), "logprobs": self._logprobs.cpu()}
        return {"tokens": list(tokens), **kept}


class Led:
    """Forces a reference's tokens, and measures how far the model is from it at each.

    Args:
        reference: of :class:`Lead`.
    """

    def __init__(self, reference: Reference) -> None:
        self._tokens: Sequence[int] = reference["tokens"]
        self._ids, self._logprobs = reference["ids"], reference["logprobs"]
        self._divergence = self._same = torch.empty(0)

    def step(self, generated: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        """Take the divergence, and leave only the next token possible."""
        if not len(self._divergence):
            self._ids, self._logprobs = (x.to(logits.device) for x in (self._ids, self._logprobs))
            self._divergence = torch.zeros(len(self._tokens), device=logits.device)
            self._same = torch.zeros_like(self._divergence)
        at = len(generated)
        token = self._tokens[at]
        found = logits.float().log_softmax(-1)[self._ids[at].long()]
        self._divergence[at] = divergence(self._logprobs[at], found)
        self._same[at] = logits.argmax() == self._ids[at, 0]
        only = torch.full_like(logits, float("-inf"))
        only[token] = 0.0
        return only

    def means(self) -> dict[str, list[float]]:
        """Mean KL divergence of each bin, and how often both find one token likeliest."""
        return {"kl": binned(self._divergence), "same": binned(self._same)}


def divergence(wanted: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """KL(wanted || found) of log-probabilities of the same tokens, all others taken as one token.

    Args:
        wanted: ``[K]``.
        found: ``[K]``.
    """
    both = torch.stack([wanted, found])
    rest = (1.0 - both.exp().sum(1, keepdim=True)).clamp(min=_SMALLEST).log()
    wanted, found = torch.cat([both, rest], dim=1)
    return (wanted.exp() * (wanted - found)).sum()


def binned(values: torch.Tensor) -> list[float]:
    """Means of bins of ``BIN`` values; the last may have fewer."""
    return [round(part.mean().item(), 7) for part in values.cpu().split(BIN)]


class Followed(AdapterLogitsProcessor):  # type: ignore[misc]
    """Hands the logits of a followed answer to its follower."""

    def is_argmax_invariant(self) -> bool:
        """It decides the greedy token."""
        return False

    def new_req_logits_processor(
        self, params: Any
    ) -> Callable[[Sequence[int], torch.Tensor], torch.Tensor] | None:
        """The follower of one request, ``None`` where there is none."""
        follower = FOLLOWERS.get((params.extra_args or {}).get(_FOLLOWED, ""))
        return None if follower is None else follower.step


def work(job: Mapping[str, Any]) -> dict[str, Any]:
    """Answer all documents by one budget."""
    documents = load_prompts(Path(job["prompts"])).prompts
    # files of earlier versions have texts, of which the second half is a target
    texts = [(document.name, (*document.ids, *document.target)) for document in documents]
    count, kept = job["tokens"], job["reference"]
    longest = max(len(ids) for _, ids in texts) + count
    engine = open_scoring_engine(
        job["model"],
        settings=job["settings"],
        max_model_len=longest,
        logits_processors=[Followed],
        **job["engine"],
    )
    report_progress("the engine is ready")
    leads, temperature, stops = job["settings"] is None, job["temperature"], job["stops"]
    known = {} if leads else torch.load(kept)
    greedy = partial(SamplingParams, temperature=0.0, max_tokens=count, detokenize=False)
    requests, params, followers = [], [], []
    for seed, (name, ids) in enumerate(texts):
        FOLLOWERS[f"{name} free"] = Free(seed, temperature)
        follower = Lead(seed, temperature, count, stops) if leads else Led(known[name])
        FOLLOWERS[f"{name} led"] = follower
        followers.append(follower)
        requests += [{"prompt_token_ids": list(ids)}] * 2
        params.append(greedy(stop_token_ids=stops, extra_args={_FOLLOWED: f"{name} free"}))
        params.append(greedy(ignore_eos=True, extra_args={_FOLLOWED: f"{name} led"}))
    begin = time.perf_counter()
    try:
        answers = [out.outputs[0] for out in engine.generate(requests, params, use_tqdm=False)]
        seconds = time.perf_counter() - begin
        found, references = [], {}
        for follower, (name, ids), free, led in zip(
            followers, texts, answers[::2], answers[1::2], strict=True
        ):
            tokens = list(free.token_ids)
            ended = free.finish_reason == "stop"
            row = {"name": name, "length": len(ids), "answer": len(tokens), "ended": ended}
            if isinstance(follower, Led):
                row |= follower.means()
            elif isinstance(follower, Lead):
                row["led"] = list(led.token_ids)
                references[name] = follower.reference(led.token_ids)
            found.append({**row, "tokens": tokens})
        if leads:
            torch.save(references, kept)
        report = backend_report(engine, job["settings"])
        return {"seconds": seconds, "backend": report, "documents": found}
    finally:
        close_engine(engine)


if __name__ == "__main__":
    serve_job(work)
