"""How many keys a step's queries attend: pure arithmetic on positions, vectorised."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sparsek_backend.nn.config import NSAConfig
from sparsek_backend.vllm_backend.keys import Keys
from sparsek_kernels.paged.policy import StepPolicy

Positions = npt.NDArray[np.int64]


def nsa_attended(config: NSAConfig, position: Positions) -> Positions:
    """Return the keys of all branches that a natively sparse query at each position attends.

    Compressed keys count as one each, so a short context may count more than once.
    """
    spec, length = config.spec, position + 1
    compressed = np.maximum(length - spec.cmp_block_size + spec.cmp_stride, 0) // spec.cmp_stride
    own = position // spec.sel_block_size
    earlier = np.minimum(own, spec.top_n - 1) * spec.sel_block_size
    selected = earlier + position % spec.sel_block_size + 1
    total: Positions = compressed + selected + np.minimum(length, config.window_size)
    return total


def attended_by_requests(
    policy: StepPolicy,
    seq_lens: Positions,
    query_lens: Positions,
    num_decodes: int,
    prompt_left: Sequence[int] | None = None,
) -> Keys:
    """Return the keys that all new queries of a batch attend in one layer, for one head.

    Args:
        seq_lens: ``[R]`` keys of each request, its new tokens included.
        query_lens: ``[R]`` new tokens of each request.
        num_decodes: requests at the front that decode.
        prompt_left: :attr:`PagedBatch.prompt_left_host`.  Decodes at the end of a prompt count too.
    """
    cut, prefill = num_decodes, policy.prefill
    decodes = query_positions(seq_lens[:cut], query_lens[:cut])
    prefills = query_positions(seq_lens[cut:], query_lens[cut:])
    first = np.repeat((seq_lens - query_lens)[:cut], query_lens[:cut])
    of_decodes = policy.decode.attended_tokens(decodes, first).sum()
    of_prompts = prefill.attended_tokens(prefills).sum()
    left = None if prompt_left is None else np.array(prompt_left, dtype=np.int64)
    if prefill.dense_last:
        after = None if left is None else left[cut:]
        begin, end = prefill.last_rows(query_lens[cut:], seq_lens[cut:], after)
        last = query_positions((seq_lens - query_lens)[cut:] + end, end - begin)
        of_prompts += (last + 1 - prefill.attended_tokens(last)).sum()
    if left is not None and policy.of_ends.dense_last:
        begin, end = policy.of_ends.last_rows(query_lens[:cut], seq_lens[:cut], left[:cut])
        last = query_positions((seq_lens - query_lens)[:cut] + end, end - begin)
        first = np.repeat((seq_lens - query_lens)[:cut], end - begin)
        of_decodes += (last + 1 - policy.decode.attended_tokens(last, first)).sum()
    return Keys(of_prompts.item(), of_decodes.item())


def query_positions(seq_lens: Positions, query_lens: Positions) -> Positions:
    """Return the position of every new query of a batch, request after request."""
    ends = np.cumsum(query_lens)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total) + np.repeat(seq_lens - ends, query_lens)
