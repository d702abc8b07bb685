"""Processes train an NSA layer under ``fully_shard`` and save a model: what ``test_sharding`` runs.

python sharded_layer.py {cpu,cuda} PROCESSES FOLDER
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from sparsek_backend.nn import (
    NativeSparseAttention,
    NSAConfig,
    NSALlamaConfig,
    NSALlamaForCausalLM,
)

SMALL = NSAConfig(8, 4, 8, top_n=4, window_size=10)
REAL = NSAConfig(top_n=4, window_size=100, cmp_hidden_size=32)


def compare(rank: int, world: int, device: str, dtype: torch.dtype) -> None:
    """Compare output and gradients of one rank with those of an unsharded layer in ``dtype``."""
    torch.manual_seed(0)
    config, dim, count = (REAL, 32, 700) if device == "cuda" else (SMALL, 8, 40)
    layer = NativeSparseAttention(3 * dim, 4, 2, dim, config=config, device=device)
    x = torch.randn(world, count, 3 * dim).to(device, dtype)
    whole = copy.deepcopy(layer).to(dtype)
    plain = [whole(part[None]) for part in x]
    (sum(out.sum() for out in plain) / world).backward()
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    fully_shard(layer, mesh=init_device_mesh(device, (world,)), mp_policy=policy)
    out = layer(x[rank : rank + 1])
    torch.testing.assert_close(out, plain[rank])
    out.sum().backward()
    bound = 1e-5 if dtype == torch.float32 else 1e-2
    for name, parameter in layer.named_parameters():
        have, need = parameter.grad.full_tensor(), whole.get_parameter(name).grad.float()
        error = float((have - need).norm() / need.norm())
        assert error < bound, f"{name}: {error:.2e}"


def save(world: int, device: str, folder: Path, tied: bool) -> None:
    """Every rank saves a sharded model, and finds the unsharded one's weights in the folder."""
    torch.manual_seed(0)
    config = NSALlamaConfig(64, 24, 48, 2, 4, 2, 8, tie_word_embeddings=tied, nsa=SMALL)
    model = NSALlamaForCausalLM(config).to(device)
    whole = {name: x.detach().cpu().clone() for name, x in model.state_dict().items()}
    mesh = init_device_mesh(device, (world,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.save_pretrained(folder)
    found = NSALlamaForCausalLM.from_pretrained(folder)
    assert found.config == config
    assert (found.lm_head.weight is found.model.embed_tokens.weight) is tied
    for name, x in found.state_dict().items():
        assert torch.equal(x, whole[name]), name


def work(rank: int, world: int, device: str, folder: str) -> None:
    """One rank."""
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    store = dist.FileStore(str(Path(folder) / "store"), world)
    kind = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(kind, store=store, rank=rank, world_size=world)
    for dtype in (torch.float32, torch.bfloat16):
        compare(rank, world, device, dtype)
    for tied in (False, True):
        save(world, device, Path(folder) / f"tied-{tied}", tied)
    dist.barrier()  # no rank may go while another still talks to it
    dist.destroy_process_group()


if __name__ == "__main__":
    on, processes, target = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    mp.spawn(work, args=(processes, on, target), nprocs=processes)
    print("sharded layer agrees")
