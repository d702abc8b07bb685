"""Gradients of parameters that every rank holds whole."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from sparsek_backend.distributed.mesh import channel_of


@torch.no_grad()
def sum_gradients(parameters: Iterable[torch.Tensor], mesh: DeviceMesh) -> None:
    """Replace each ``.grad`` by its sum over the ranks, formed in fp32.

    Under context parallelism a parameter's gradient is the share of this rank's tokens.  Call this
    once after the backward pass, or let FSDP2 or DDP sum over the mesh, never both.

    Args:
        parameters: the same on every rank; those without a gradient are left out.  Under tensor
            parallelism each rank's part is summed; ``mesh`` are the ranks that hold the same part.
        mesh: one dimension.

    Raises:
        ValueError: on every rank, where parameters have a gradient on some ranks alone, or
            gradients differ in shape or dtype; a parameter that the mesh's ranks share out, as
            under FSDP2.
        RuntimeError: a rank failed, or did not answer within the process group's timeout.
    """
    channel = channel_of(mesh)
    with channel.agreed() as facts:
        grads = [None if x.grad is None else _local(x.grad, mesh) for x in parameters]
        facts["parameters"] = [None if x is None else (tuple(x.shape), str(x.dtype)) for x in grads]
    for grad in grads:
        if grad is None:
            continue
        total = grad.to(torch.promote_types(grad.dtype, torch.float32))
        total = total.contiguous()
        with channel.watched():
            dist.all_reduce(total, group=channel.group)
        grad.copy_(total)


def _local(grad: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """This rank's part of a gradient that other ranks than the mesh's may share."""
    if not isinstance(grad, DTensor):
        return grad
    if len(set(mesh.mesh.flatten().tolist()) & set(grad.device_mesh.mesh.flatten().tolist())) > 1:
        raise ValueError(
            f"parameters: expected whole ones on the ranks of {mesh}, got one that is shared out "
            f"over {grad.device_mesh}, whose gradients are summed already"
        )
    return grad.to_local()
