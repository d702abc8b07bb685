"""The ranks that train one model of the demo together: context parallelism, then FSDP2 over all."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from sparsek_backend.distributed import SequenceLayout, shard


@dataclass(frozen=True)
class Ranks:
    """Ranks of a run; the ranks in a row of ``mesh`` share the tokens of the same sequences.

    Args:
        world: all ranks, which share the weights.
        mesh: the same ranks, data parallel by context parallel.
    """

    world: DeviceMesh
    mesh: DeviceMesh

    @property
    def context(self) -> DeviceMesh:
        """The ranks that share this one's sequences."""
        return self.mesh["cp"]

    @property
    def data(self) -> DeviceMesh:
        """The ranks that hold the same places of other sequences."""
        return self.mesh["dp"]

    @property
    def is_first(self) -> bool:
        """Whether this rank writes files and prints."""
        return self.world.get_local_rank() == 0

    def layout(self, length: int) -> SequenceLayout:
        """The zigzag layout of sequences of ``length`` tokens over the ranks of a row."""
        return SequenceLayout(length, self.context.size(), "zigzag")

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's sequences, of all in the first dimension."""
        return x.chunk(self.data.size())[self.data.get_local_rank()]

    def tokens(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's tokens ``[b, n]`` of all sequences ``[B, N]``."""
        return shard(self.rows(x), self.context, self.layout(x.shape[1]))

    def check(self, length: int, batch: int) -> None:
        """Check that the ranks can share a batch.

        Raises:
            ValueError: a length or a number of sequences that they do not divide.
        """
        chunks = 2 * self.context.size()
        if length % chunks:
            raise ValueError(
                f"context_parallel: expected lengths in multiples of {chunks}, got {length} tokens"
            )
        if batch % self.data.size():
            raise ValueError(
                f"context_parallel: expected {self.data.size()} groups of ranks to divide each "
                f"batch, got {batch} sequences of {length} tokens; take fewer ranks, or more of "
                "them for each sequence"
            )

    def shard_weights(self, model: nn.Module, layers: nn.ModuleList) -> None:
        """Spread the weights over all ranks."""
        for layer in layers:
            fully_shard(layer, mesh=self.world)
        fully_shard(model, mesh=self.world)


def is_launched() -> bool:
    """Whether torchrun started this process."""
    return "WORLD_SIZE" in os.environ


def join(context_parallel: int, device: torch.device) -> Ranks | None:
    """Join the ranks that torchrun started; ``None`` for a process of its own.

    Raises:
        ValueError: ranks that cannot be rows of ``context_parallel``.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if context_parallel < 1 or size % context_parallel:
        raise ValueError(
            f"context_parallel: expected a divisor of the {size} ranks, got {context_parallel}"
        )
    if not is_launched():
        return None
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl")
    else:
        dist.init_process_group("gloo")
    return ranks_of(context_parallel, device.type)


def leave() -> None:
    """End what :func:`join` began, once all ranks are here."""
    dist.barrier()
    dist.destroy_process_group()


def ranks_of(context_parallel: int, kind: str) -> Ranks:
    """The ranks of the process group, ``context_parallel`` of which share a sequence."""
    size = dist.get_world_size()
    shape = (size // context_parallel, context_parallel)
    return Ranks(
        init_device_mesh(kind, (size,)),
        init_device_mesh(kind, shape, mesh_dim_names=("dp", "cp")),
    )
