"""How many keys a step's queries attend: pure arithmetic on positions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sparsek_backend.nn.config import NSAConfig
from sparsek_backend.vllm_backend.keys import Keys
from sparsek_kernels.paged.policy import SelectionPolicy, StepPolicy

Positions = npt.NDArray[np.int64]
Ranges = Sequence[tuple[int, int]]


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


class Accounting:
    """Counts the keys that new queries attend in one layer, for one head.

    What the positions before each one attend is added up once: a step then looks up sums, however
    many tokens its prompts have.

    Args:
        policy: what the layer attends.
        longest: tokens of the longest context that is expected; longer ones are added later.
        window: the model's own window of the layer, or ``None``.
        clamped: whether bidirectional ranges reach no further back than that.
    """

    def __init__(
        self, policy: StepPolicy, longest: int = 0, window: int | None = None, clamped: bool = False
    ) -> None:
        self._policy, self._window, self._clamped = policy, window, clamped
        self._prefill = _Sums(policy.prefill, longest)
        same = policy.decode == policy.prefill
        self._decode = self._prefill if same else _Sums(policy.decode, longest)

    def count(
        self,
        seq_lens: Positions,
        query_lens: Positions,
        num_decodes: int,
        prompt_left: Sequence[int] | None = None,
        ranges: Sequence[Ranges] | None = None,
    ) -> Keys:
        """Keys that all new queries of a batch attend.

        Args:
            seq_lens: ``[R]`` keys of each request, its new tokens included.
            query_lens: ``[R]`` new tokens of each request.
            num_decodes: requests at the front that decode.
            prompt_left: :attr:`PagedBatch.prompt_left_host`.  Decodes at the end of a prompt count
                too.
            ranges: for each request, inclusive ranges of positions that attend each other in both
                directions.  Requests with any attend all that their mask shows, by no policy.
        """
        cut, apart = num_decodes, [0, 0]  # of prompts, and of decodes
        for request, found in enumerate(ranges or ()):
            if found:
                lens = int(seq_lens[request]), int(query_lens[request])
                apart[request < cut] += self._count_ranges(*lens, found)
        query_lens = np.where([bool(x) for x in ranges], 0, query_lens) if ranges else query_lens
        before = seq_lens - query_lens
        left = None if prompt_left is None else np.array(prompt_left, dtype=np.int64)
        prompts = slice(cut, None)
        of_prompts = self._prefill.between(before[prompts], seq_lens[prompts])
        if self._policy.prefill.dense_last:
            after = None if left is None else left[prompts]
            begin, end = self._policy.prefill.last_rows(
                query_lens[prompts], seq_lens[prompts], after
            )
            of_prompts += self._prefill.missed(before[prompts] + begin, before[prompts] + end)
        of_decodes = self._count_decodes(seq_lens[:cut], query_lens[:cut])
        ends = left is not None and (query_lens[:cut] + left[:cut] > 0).any()
        if left is not None and ends and self._policy.of_ends.dense_last:
            begin, end = self._policy.of_ends.last_rows(
                query_lens[:cut], seq_lens[:cut], left[:cut]
            )
            last = query_positions(before[:cut] + end, end - begin)
            first = np.repeat(before[:cut], end - begin)
            of_decodes += (last + 1 - self._policy.decode.attended_tokens(last, first)).sum().item()
        return Keys(of_prompts + apart[0], of_decodes + apart[1])

    def _count_ranges(self, seq_len: int, query_len: int, ranges: Ranges) -> int:
        """Keys that a request with bidirectional ranges attends."""
        position = np.arange(seq_len - query_len, seq_len)
        reach = seq_len if self._window is None else self._window
        keys = np.minimum(position + 1, reach)
        for low, high in ranges:
            behind = min(high, seq_len - 1) - position
            before = 0 if self._clamped else np.maximum(position + 1 - reach - low, 0)
            keys += (behind + before) * ((low <= position) & (position <= high))
        return int(keys.sum())

    def _count_decodes(self, seq_lens: Positions, query_lens: Positions) -> int:
        """Keys that decodes attend.  The tokens of a request share what its first one chose."""
        if query_lens.max(initial=0) <= 1:
            return self._decode.between(seq_lens - query_lens, seq_lens)
        position = query_positions(seq_lens, query_lens)
        first = np.repeat(seq_lens - query_lens, query_lens)
        attended: Positions = self._policy.decode.attended_tokens(position, first)
        return int(attended.sum())


class _Sums:
    """Keys that the queries at the first ``n`` positions attend by a policy, for every ``n``."""

    def __init__(self, policy: SelectionPolicy, longest: int) -> None:
        self._policy = policy
        self._until: Positions = np.zeros(1, dtype=np.int64)
        self._reach(longest)

    def between(self, begin: Positions, end: Positions) -> int:
        """Keys that the queries at positions ``[begin, end)`` attend, over all pairs of these."""
        begin, end = np.maximum(begin, 0), np.maximum(end, 0)  # of made-up requests
        self._reach(int(end.max(initial=0)))
        return int((self._until[end] - self._until[begin]).sum())

    def missed(self, begin: Positions, end: Positions) -> int:
        """Keys before them or at them that these queries do not attend."""
        every = (end * (end + 1) - begin * (begin + 1)) // 2
        return int(every.sum()) - self.between(begin, end)

    def _reach(self, length: int) -> None:
        if length >= len(self._until):
            position = np.arange(1 << length.bit_length(), dtype=np.int64)
            each = np.broadcast_to(self._policy.attended_tokens(position), position.shape)
            self._until = np.concatenate(([0], each.cumsum()))


def query_positions(seq_lens: Positions, query_lens: Positions) -> Positions:
    """Return the position of every new query of a batch, request after request."""
    ends = np.cumsum(query_lens)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total) + np.repeat(seq_lens - ends, query_lens)
