"""The channel of a mesh: it goes with its process group."""

from __future__ import annotations

import sys
from pathlib import Path

from tests import processes

LEAVE = """
import gc
from pathlib import Path
from weakref import ref

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from sparsek_backend.distributed import mesh as module

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
channel, group = module.channel_of(mesh), ref(mesh.get_group())
assert channel.told("here") == ["here"]
del mesh
dist.destroy_process_group()
gc.collect()
assert group() is None
assert not module._channels
names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
assert not [name for name in names if "gloo" in name], names
try:
    channel.told("gone")
except ValueError as error:
    print(error)
"""


def test_a_group_that_was_destroyed_leaves_no_thread() -> None:
    done = processes.run(sys.executable, "-c", LEAVE, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    assert done.stdout == "mesh: expected a process group, got one that was destroyed\n"
