"""What one evaluation measures, the same for every budget."""

from __future__ import annotations

from dataclasses import dataclass

ANSWER_ROOM = 32
"""Tokens kept free behind a passkey prompt."""


@dataclass(frozen=True)
class Job:
    """One evaluation.

    Args:
        texts_folder: folder of `.txt` files.
        num_texts: texts scored for perplexity; 0 skips it.
        length: tokens of each.
        passkey_lengths: prompt lengths in tokens; empty skips the task.
        passkey_depths: where the key is hidden, 0 at the start and 1 at the end.
        seed: of the keys and of the filler's choice.
    """

    texts_folder: str
    num_texts: int
    length: int
    passkey_lengths: tuple[int, ...]
    passkey_depths: tuple[float, ...]
    seed: int = 0

    def longest_request(self) -> int:
        """Tokens of the longest request, its answer included."""
        return max([self.length if self.num_texts else 0, *self.passkey_lengths]) + ANSWER_ROOM

    def steps(self) -> int:
        """Progress steps of one budget."""
        return self.num_texts + len(self.passkey_lengths) * len(self.passkey_depths)
