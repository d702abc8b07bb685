"""Recall over a distance: the task of the training demo.

The first half of a sequence tells the value of every key once, in groups of neighbours at random
places among blank tokens; the second half asks for keys, and the model answers each question with
the key's value.  A token is a key and a value: a blank one has neither, and a question no value.

A compressed block mixes a group.  It tells where the group is; to read a value takes the selected
branch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

KEYS, VALUES, GROUP = 8, 16, 4
"""Keys, values and keys of a group; a guess is right once in ``VALUES`` questions."""
SHORTEST = 4 * KEYS
"""Tokens of the shortest sequence."""
NONE = -100
"""Answer of tokens that ask nothing, as torch's cross entropy takes it."""
UNSEEN = 1 << 30
"""Batches of this step and later ones are never trained on."""


class Batch(NamedTuple):
    """Sequences of one length, ``[B, N]`` int64 each."""

    tokens: torch.Tensor  # ``key * (VALUES + 1) + value``
    answers: torch.Tensor  # the value that a question asks for, else ``NONE``
    told: torch.Tensor  # where the value of a question's key was told, else ``NONE``


def make_batch(count: int, length: int, seed: int, step: int) -> Batch:
    """``count`` sequences of a step, on the CPU: a function of the arguments alone."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    half = length // 2

    def distinct(limit: int) -> torch.Tensor:
        return torch.rand(count, limit, generator=generator).argsort(1)

    values = torch.randint(VALUES, (count, KEYS), generator=generator)
    groups = distinct(half // GROUP)[:, : KEYS // GROUP, None]
    places = (groups * GROUP + torch.arange(GROUP)).flatten(1).gather(1, distinct(KEYS))
    asked = torch.randint(KEYS, (count, length - half), generator=generator)
    facts = torch.arange(KEYS) * (VALUES + 1) + values
    tokens = torch.full((count, half), KEYS * (VALUES + 1) + VALUES).scatter_(1, places, facts)
    nothing = torch.full_like(tokens, NONE)
    return Batch(
        torch.cat([tokens, asked * (VALUES + 1) + VALUES], dim=1),
        torch.cat([nothing, values.gather(1, asked)], dim=1),
        torch.cat([nothing, places.gather(1, asked)], dim=1),
    )
