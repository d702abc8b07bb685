"""Gradients of parameters that every rank holds whole."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from sparsek_backend.distributed.mesh import channel_of


@torch.no_grad()
def sum_gradients(parameters: Iterable[torch.Tensor], mesh: DeviceMesh) -> None:
    """Replace each ``.grad`` by its sum over the ranks, formed in fp32.

    Under context parallelism a parameter's gradient is the share of this rank's tokens.  Call this
    once after the backward pass, or let FSDP2 or DDP sum over the mesh, never both.

    Args:
        parameters: the same on every rank; those without a gradient are left out.
        mesh: one dimension.

    Raises:
        ValueError: on every rank, where gradients differ in number, shape or dtype.
        RuntimeError: a rank failed, or did not answer within the process group's timeout.
    """
    channel = channel_of(mesh)
    grads = [x.grad for x in parameters if x.grad is not None]
    with channel.agreed() as facts:
        facts["parameters"] = [(tuple(x.shape), str(x.dtype)) for x in grads]
    for grad in grads:
        total = grad.to(torch.promote_types(grad.dtype, torch.float32))
        total = total.contiguous()
        with channel.watched():
            dist.all_reduce(total, group=channel.group)
        grad.copy_(total)
