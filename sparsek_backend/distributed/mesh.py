"""The ranks of a mesh as one party: agreement on arguments, errors that reach all of them.

Every rank says what it was called with before anything is exchanged.  A bad argument on one rank,
or arguments that differ, are an error on every rank.  A rank that does not answer within the
process group's timeout (``init_process_group(timeout=...)``) is an error on the others.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

Facts = dict[str, Any]
_ERRORS = {error.__name__: error for error in (TypeError, ValueError, NotImplementedError)}


class Channel:
    """A process group as the exchanges need it.

    It does not keep the group: one that outlived ``destroy_process_group`` would run its threads
    until the interpreter ends, which may abort the process.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = ref(group)
        self.rank, self.size = group.rank(), group.size()
        self.peers = dist.get_process_group_ranks(group)
        kinds = {device.type for device in group._device_types}
        self.timeout = _timeout(group, "cpu" if "cpu" in kinds else "cuda")
        self._control: dist.ProcessGroup | None = None
        if "cpu" not in kinds:
            # Words go over the host, so that no agreement waits for the GPU.
            control = dist.new_group(
                self.peers, self.timeout, backend="gloo", use_local_synchronization=True
            )
            if not isinstance(control, dist.ProcessGroup):
                raise ValueError(f"mesh: expected it to hold this rank, got ranks {self.peers}")
            self._control = control
        if torch.cuda.is_available() and _backend(group, "cuda").name() == "nccl":
            # NCCL connects a group in its first collective, in which all ranks must take part.
            dist.all_reduce(torch.zeros(1, device="cuda"), group=group)

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks of the mesh.

        Raises:
            ValueError: the group was destroyed.
        """
        group = self._group()
        if group is None:
            raise ValueError("mesh: expected a process group, got one that was destroyed")
        return group

    @property
    def _host(self) -> dist.ProcessGroup:
        """The same ranks, over the host."""
        return self.group if self._control is None else self._control

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Turn a failure of the transport into an error that says what it means."""
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(
                f"mesh: expected an answer of all {self.size} ranks, got none from one of them on "
                f"rank {self.rank}: it failed, or took longer than the process group's timeout of "
                f"{self.timeout.total_seconds():g} s"
            ) from error

    def told(self, mine: Any) -> list[Any]:
        """One plain Python value of each rank, in rank order, gathered over the host."""
        said: list[Any] = [None] * self.size
        with self.watched():
            dist.all_gather_object(said, mine, group=self._host)
        return said

    @contextmanager
    def agreed(self) -> Iterator[Facts]:
        """Check arguments inside; afterwards every rank has checked them, and they are the same.

        Yields:
            A dictionary to fill with what must be the same on all ranks, by argument.

        Raises:
            TypeError: what a rank raised inside, on every rank.
            NotImplementedError: the same.
            ValueError: the same, and on the other ranks where one raised anything else; or an
                argument that differs among the ranks.
        """
        facts: Facts = {}
        failure: Exception | None = None
        try:
            yield facts
        except Exception as error:  # of any kind: the others wait for this rank's word
            failure = error
        mine = int.from_bytes(blake2b(repr(facts).encode(), digest_size=7).digest(), "big")
        word = torch.tensor([-1 if failure else mine], device="cpu")
        words = [torch.empty_like(word) for _ in range(self.size)]
        with self.watched():
            dist.all_gather(words, word, group=self._host)
        if failure is None and all(int(x) == mine for x in words):
            return
        told = {name: repr(value) for name, value in facts.items()}
        named = None if failure is None else (type(failure).__name__, str(failure))
        said = self.told((named, told))
        if failure is not None:
            raise failure
        for rank, (named, _) in enumerate(said):
            if named is not None:
                kind = next((x for x in _ERRORS.values() if x.__name__ == named[0]), ValueError)
                raise kind(f"{named[1]} (on rank {rank} of the mesh)")
        for name in told:
            values = [facts_there.get(name) for _, facts_there in said]
            other = next((i for i, value in enumerate(values) if value != values[0]), None)
            if other is not None:
                raise ValueError(
                    f"{name}: expected the same on all ranks, got {values[0]} on rank 0 and "
                    f"{values[other]} on rank {other}"
                )


def _backend(group: dist.ProcessGroup, kind: str) -> Any:
    return group._get_backend(torch.device(kind))


def _timeout(group: dist.ProcessGroup, kind: str) -> Any:
    return _backend(group, kind).options._timeout


_channels: MutableMapping[dist.ProcessGroup, Channel] = WeakKeyDictionary()


def check_mesh(mesh: DeviceMesh) -> None:
    """Check that a mesh has one dimension, and this rank in it."""
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh: expected a DeviceMesh, got {type(mesh).__name__}")
    if mesh.ndim != 1:
        raise ValueError(f"mesh: expected one dimension, got {mesh.ndim}; pass mesh['name']")
    if mesh.get_coordinate() is None:
        raise ValueError(f"mesh: expected it to hold this rank, {dist.get_rank()}, got {mesh}")


def channel_of(mesh: DeviceMesh) -> Channel:
    """The channel of a mesh of one dimension, made when all its ranks first ask for it."""
    check_mesh(mesh)
    group = mesh.get_group()
    if group not in _channels:
        _channels[group] = Channel(group)
    return _channels[group]
