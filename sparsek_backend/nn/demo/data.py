"""Multi-query associative recall with a passkey: the task of the training demo.

A sequence is noise in which ``key value`` pairs lie scattered; at its end every key is asked for in
a random order, and the model must answer with the key's value.  Pair 0 is the passkey: its key is
the same in all sequences, its value random.  Batches are a function of (seed, step), so a resumed
run sees what an uninterrupted one does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sparsek_kernels.checks import check_int

IGNORED = -100
"""Target of positions that carry no loss, as torch's cross entropy takes it."""


@dataclass(frozen=True)
class RecallTask:
    """Sizes of the task.

    Args:
        num_pairs: pairs in a sequence, the passkey included.
        num_keys: distinct keys, at least ``num_pairs``; key 0 is the passkey's.
        num_values: distinct values.
        num_noise: distinct noise tokens.

    Raises:
        ValueError: more pairs than keys, or a size below one.
    """

    num_pairs: int = 16
    num_keys: int = 64
    num_values: int = 64
    num_noise: int = 64

    def __post_init__(self) -> None:
        for name in ("num_pairs", "num_keys", "num_values", "num_noise"):
            check_int(name, getattr(self, name), 1)
        if self.num_pairs > self.num_keys:
            raise ValueError(
                f"num_pairs: expected at most num_keys={self.num_keys}, got {self.num_pairs}"
            )

    @property
    def vocab_size(self) -> int:
        """Noise tokens, then keys, then values."""
        return self.num_noise + self.num_keys + self.num_values

    @property
    def min_length(self) -> int:
        """Tokens of the shortest sequence: pairs and questions without noise."""
        return 4 * self.num_pairs


@dataclass(frozen=True)
class Batch:
    """One batch.

    Args:
        tokens: ``[B, N]`` int64.
        targets: ``[B, N]`` int64, the value after a question's key, else ``IGNORED``.
        distance: ``[B, N]`` int64, tokens from the pair to the question, where there is a target.
        passkey: ``[B, N]`` bool, whether the question is the passkey's.
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    distance: torch.Tensor
    passkey: torch.Tensor


def make_batch(task: RecallTask, batch: int, length: int, seed: int, step: int) -> Batch:
    """The batch of a step, on the CPU.

    Raises:
        ValueError: ``length`` does not hold the pairs and the questions.
    """
    if length < task.min_length:
        raise ValueError(f"length: expected at least {task.min_length} tokens, got {length}")
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    pairs = task.num_pairs
    body = length - 2 * pairs

    def distinct(count: int, limit: int) -> torch.Tensor:
        return torch.rand(batch, limit, generator=generator).argsort(1)[:, :count]

    def draw(limit: int, *shape: int) -> torch.Tensor:
        return torch.randint(limit, shape, generator=generator)

    tokens = draw(task.num_noise, batch, length)
    keys = distinct(pairs, task.num_keys)
    holds_first = (keys == 0).any(1)
    keys[:, 0] = torch.where(holds_first, keys[:, 0], 0)
    swapped = torch.where(keys == 0, keys[:, :1], keys)  # key 0 comes first wherever it was
    swapped[:, 0] = 0
    keys = swapped + task.num_noise
    values = draw(task.num_values, batch, pairs) + task.num_noise + task.num_keys
    places = distinct(pairs, body // 2) * 2
    tokens.scatter_(1, places, keys)
    tokens.scatter_(1, places + 1, values)
    order = distinct(pairs, pairs)
    asked = body + 2 * torch.arange(pairs).expand(batch, -1)
    tokens.scatter_(1, asked, keys.gather(1, order))
    tokens.scatter_(1, asked + 1, values.gather(1, order))
    targets = torch.full((batch, length), IGNORED).scatter_(1, asked, values.gather(1, order))
    distance = torch.zeros_like(tokens).scatter_(1, asked, asked - places.gather(1, order))
    passkey = torch.zeros_like(tokens, dtype=torch.bool).scatter_(1, asked, order == 0)
    return Batch(tokens, targets, distance, passkey)
