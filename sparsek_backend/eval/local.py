"""A vLLM engine in this process as a scorer: greedy replies, and targets that are forced.

Each token of a forced answer is a decode of its own, as in a chat: what a prompt's log-likelihoods
would tell is how the prefill scores its last queries, which a server may attend densely.  vLLM
reports the log-probabilities that tokens have before logits processors: they are the model's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from sparsek_backend.eval.engine import ensure_entry_point, open_engine
from sparsek_backend.eval.prompt import Prompt, Tokens
from sparsek_backend.eval.scoring import Reply
from sparsek_backend.eval.stats import TOP

FORCED = "sparsek_forced_tokens"
"""The entry of ``SamplingParams.extra_args`` that has the tokens."""


class ForceTokens(AdapterLogitsProcessor):  # type: ignore[misc]
    """Leave only the next given token possible."""

    def is_argmax_invariant(self) -> bool:
        """It decides the greedy token."""
        return False

    def new_req_logits_processor(
        self, params: Any
    ) -> Callable[[Sequence[int], torch.Tensor], torch.Tensor] | None:
        """The rule of one request, ``None`` where nothing is forced."""
        tokens = (params.extra_args or {}).get(FORCED)
        if not tokens:
            return None

        def force(generated: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
            only = torch.full_like(logits, float("-inf"))
            only[tokens[min(len(generated), len(tokens) - 1)]] = 0.0
            return only

        return force


def open_scoring_engine(model: str, **arguments: Any) -> Any:
    """A `vllm.LLM` that needs no tokenizer and takes tokens to force.

    vLLM's first model runner is chosen: its logits processors are the same in every version.
    """
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    ensure_entry_point()  # for the ranks of a tensor-parallel engine
    arguments.setdefault("skip_tokenizer_init", True)
    # A forced token is found by the number of tokens before it, which must be known each step.
    arguments.setdefault("async_scheduling", False)
    arguments.setdefault("enable_prefix_caching", True)
    arguments.setdefault("logits_processors", [ForceTokens])
    return open_engine(model, **arguments)


@dataclass(frozen=True)
class LocalScorer:
    """A scorer over an in-process engine."""

    engine: Any
    decode: Callable[[Tokens], str] | None  # where there is a tokenizer

    def reply(self, prompts: Sequence[Prompt]) -> list[Reply]:
        """Answer prompts greedily, and force their targets token by token; texts are read.

        Both requests of a prompt share its pages: the second reads them from the prefix cache.
        """
        greedy = partial(SamplingParams, temperature=0.0, detokenize=False)
        forced = partial(greedy, ignore_eos=True, logprobs=TOP)
        asked: list[tuple[list[int], Any]] = []
        for prompt in prompts:
            ids, target = prompt.ids, list(prompt.target)
            if prompt.variant == "text":
                asked.append((ids + target, greedy(max_tokens=1, prompt_logprobs=TOP)))
            else:
                led = forced(max_tokens=len(target), extra_args={FORCED: target})
                asked += [(ids, greedy(max_tokens=prompt.max_tokens)), (ids, led)]
        given = [{"prompt_token_ids": ids} for ids, _ in asked]
        outputs = iter(self.engine.generate(given, [x for _, x in asked], use_tqdm=False))
        return [self._reply(prompt, outputs) for prompt in prompts]

    def _reply(self, prompt: Prompt, outputs: Iterator[Any]) -> Reply:
        free = next(outputs)
        if prompt.variant == "text":
            if not (read := free.prompt_logprobs):
                raise RuntimeError("the engine returned no prompt_logprobs for this model")
            return Reply((), None, _likely(read[-len(prompt.target) :]))
        led = next(outputs).outputs[0]
        if tuple(led.token_ids) != prompt.target:
            raise RuntimeError(f"{prompt.name}: the engine generated other tokens than forced")
        tokens = tuple(free.outputs[0].token_ids)
        text = None if self.decode is None else self.decode(tokens)
        return Reply(tokens, text, _likely(led.logprobs))


def _likely(places: Iterable[Mapping[int, Any]]) -> list[dict[int, float]]:
    """Log-probabilities of the tokens that vLLM names at each place."""
    return [{token: float(entry.logprob) for token, entry in x.items()} for x in places]
