"""Problems that the NSA tests share: inputs drawn in the target dtype, and oracle calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import torch


@dataclass
class Problem:
    """Inputs of one NSA call; ``options`` are keyword arguments of oracle and function."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    gates: list[torch.Tensor]
    dout: torch.Tensor
    cu_seqlens: torch.Tensor | None
    options: dict[str, int] = field(default_factory=dict)

    def leaves(self, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
        """q, k, v and the gates as leaves that require gradients, upcast on request."""
        wanted = (self.q, self.k, self.v, *self.gates)
        return [x.detach().to(dtype or x.dtype).requires_grad_() for x in wanted]


def make_problem(
    lengths: list[int] | int,
    *,
    batch: int = 1,
    heads: tuple[int, int] = (4, 2),
    dim: int = 16,
    num_q: int | None = None,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    device: str = "cpu",
    **options: int,
) -> Problem:
    """Random inputs; a list of lengths packs them."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    cu_seqlens = None
    total = lengths if isinstance(lengths, int) else sum(lengths)
    if not isinstance(lengths, int):
        edges = torch.tensor([0, *lengths]).cumsum(0)
        cu_seqlens = edges.to(torch.int32).to(device)
    rows = total if num_q is None else num_q
    return Problem(
        q=draw(batch, rows, heads[0], dim),
        k=draw(batch, total, heads[1], dim),
        v=draw(batch, total, heads[1], dim),
        gates=[torch.sigmoid(draw(batch, rows, heads[0])) for _ in range(3)],
        dout=draw(batch, rows, heads[0], dim),
        cu_seqlens=cu_seqlens,
        options=options,
    )


@pytest.fixture
def problem() -> Callable[..., Problem]:
    """The factory of problems."""
    return make_problem


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Tiny tensors: threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
