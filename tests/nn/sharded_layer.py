"""Two processes train one NSA layer under ``fully_shard``; a script that ``test_sharding`` runs."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from sparsek_backend.nn import NativeSparseAttention, NSAConfig


def work(rank: int, world: int, port: int) -> None:
    """Compare output and gradients of one rank with those of an unsharded layer."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    torch.manual_seed(0)
    config = NSAConfig(8, 4, 8, top_n=4, window_size=10)
    layer = NativeSparseAttention(24, 4, 2, 8, config=config)
    x = torch.randn(world, 40, 24)
    plain = [layer(part[None]) for part in x]
    (sum(out.sum() for out in plain) / world).backward()
    grads = {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}
    layer.zero_grad()
    fully_shard(layer, mesh=init_device_mesh("cpu", (world,)))
    out = layer(x[rank : rank + 1])
    torch.testing.assert_close(out, plain[rank])
    out.sum().backward()
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(parameter.grad.full_tensor(), grads[name], rtol=1e-4, atol=1e-5)
    dist.barrier()  # no rank may go while another still talks to it
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(work, args=(2, int(sys.argv[1])), nprocs=2)
    print("sharded layer agrees")
