"""Teacher forcing in vLLM: a request whose tokens are given, generated one by one.

Each token of the answer is a decode of its own, as in a chat: what a prompt's log-likelihoods would
tell is how the prefill scores its last queries, which a server may attend densely.  vLLM reports
the log-probabilities that tokens have before logits processors, so the forced ones are the model's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

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
            token = tokens[min(len(generated), len(tokens) - 1)]
            only = torch.full_like(logits, float("-inf"))
            only[token] = 0.0
            return only

        return force
