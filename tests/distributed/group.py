"""Processes that stay up for a whole test file and run functions as the ranks of a mesh."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from tests.processes import SECONDS

TIMEOUT = SECONDS / 2
"""Seconds that no rank lets another wait on any machine."""


def _serve(
    rank: int, world: int, folder: str, timeout: float, device: str, pipe: Connection
) -> None:
    torch.set_num_threads(1)
    with open(f"{folder}/stacks-{rank}", "w") as stacks:
        faulthandler.register(signal.SIGUSR1, stacks)
        _work(rank, world, folder, timeout, device, pipe)


def _work(
    rank: int, world: int, folder: str, timeout: float, device: str, pipe: Connection
) -> None:
    store = dist.FileStore(str(Path(folder) / "store"), world)
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=TIMEOUT)
    )
    sizes = [size for size in (1, 2, 4) if size <= world]
    meshes = {size: DeviceMesh(device, list(range(size))) for size in sizes}
    for size in sizes:
        if rank < size:
            _set_pg_timeout(timedelta(seconds=timeout), meshes[size].get_group())
    while True:
        task = pipe.recv()
        if task is None:
            break
        size, function, args = task
        try:
            pipe.send((True, function(meshes[size], *args)))
        except Exception as error:
            pipe.send((False, (type(error).__name__, str(error), traceback.format_exc())))
    dist.destroy_process_group()


class Ranks:
    """``world`` processes; meshes of 1, 2 and 4 of them, the first ones.

    Args:
        world: processes.
        timeout: seconds after which a rank that does not answer is an error, once all have met.
        device: ``cpu`` with gloo, or ``cuda``, a GPU each, with NCCL.
    """

    def __init__(self, world: int, timeout: float = TIMEOUT, device: str = "cpu") -> None:
        self.world, self.timeout, self.device = world, timeout, device
        self._start()

    def _start(self) -> None:
        # One process imports, the ranks are forks of it; GPUs want processes of their own.
        context: Any = multiprocessing.get_context(
            "spawn" if self.device == "cuda" else "forkserver"
        )
        if self.device == "cpu":
            context.set_forkserver_preload(["tests.distributed.cases"])
        self._folder = tempfile.TemporaryDirectory()
        self._pipes: list[Connection] = []
        self.processes: list[BaseProcess] = []
        self.broken = False
        for rank in range(self.world):
            here, there = context.Pipe()
            args = (rank, self.world, self._folder.name, self.timeout, self.device, there)
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self.processes.append(process)

    def outcomes(self, size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """``(True, result)`` or ``(False, (error's name, message, traceback))`` of each rank.

        Raises:
            TimeoutError: a rank hangs; the message says where, and what the others answered.
        """
        if self.broken:
            self.close()
            self._start()
        for pipe in self._pipes[:size]:
            pipe.send((size, function, args))
        deadline = time.monotonic() + SECONDS
        found = []
        for pipe in self._pipes[:size]:
            if not pipe.poll(max(deadline - time.monotonic(), 0)):
                found.append((False, ("TimeoutError", "the rank hangs", "")))
                continue
            try:
                found.append(pipe.recv())
            except EOFError:
                found.append((False, ("EOFError", "the rank died", "")))
        names = [None if done else what[0] for done, what in found]
        self.broken = "TimeoutError" in names or "EOFError" in names
        if "TimeoutError" in names:
            raise TimeoutError(f"{found}\n{self._stacks()}")
        return found

    def _stacks(self) -> str:
        """Where the threads of each rank are."""
        files = [Path(self._folder.name, f"stacks-{rank}") for rank in range(self.world)]
        for process, file in zip(self.processes, files, strict=True):
            if process.is_alive() and process.pid is not None and file.exists():
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(1)
        return "\n".join(file.read_text() for file in files if file.exists())

    def run(self, size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What ``function(mesh, *args)`` returns on each of the first ``size`` ranks."""
        found = self.outcomes(size, function, *args)
        for done, result in found:
            if not done:
                raise RuntimeError(result[2])
        return [result for _, result in found]

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            with suppress(BrokenPipeError):  # a rank that died
                pipe.send(None)
            pipe.close()
        for process in self.processes:
            process.join(0 if self.broken else 10)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()
