"""Where the time of a rank's steps goes: compute, communication, and gaps between them.

Times come from ``torch.profiler``: kernels and copies of the GPU, or, on a CPU, operators and
gloo's messages.  Communication that runs beside compute is hidden.  ``compute``, ``exposed``
communication and ``gap`` (neither runs) add up to ``span``, from the first event to the last.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

Interval = tuple[float, float]
Event = tuple[str, float, float]  # name, start and end
NAMES = 20  # kernels listed by name
COMMUNICATION = ("nccl", "gloo:", "c10d::")
OPERATORS = ("aten::", "sparsek")  # what counts as compute on a CPU


def is_communication(name: str) -> bool:
    """Whether a kernel or operator moves data between ranks."""
    return name.lower().startswith(COMMUNICATION)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same times in intervals that do not meet, ascending."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def length(intervals: Iterable[Interval]) -> float:
    """Time that the intervals cover, what several cover once."""
    return sum(end - start for start, end in union(intervals))


def shares(events: Iterable[Event]) -> dict[str, float]:
    """Span, compute, hidden and exposed communication and gap, in the events' unit."""
    events = list(events)
    if not events:
        raise ValueError("events: expected kernels or operators, got none")
    moved = [(start, end) for name, start, end in events if is_communication(name)]
    computed = [(start, end) for name, start, end in events if not is_communication(name)]
    busy, compute, communication = (length(x) for x in (moved + computed, computed, moved))
    span = max(end for _, _, end in events) - min(start for _, start, _ in events)
    return {
        "span": span,
        "compute": compute,
        "hidden": compute + communication - busy,
        "exposed": busy - compute,
        "gap": span - busy,
    }


def by_name(events: Iterable[Event]) -> dict[str, float]:
    """Time of each name, what its own events share counted once, longest first."""
    found: dict[str, list[Interval]] = {}
    for name, start, end in events:
        found.setdefault(name, []).append((start, end))
    times = {name: length(intervals) for name, intervals in found.items()}
    return dict(sorted(times.items(), key=lambda pair: -pair[1]))


def events_of(
    steps: Iterable[Callable[[], None]], device: torch.device, rounds: int
) -> list[Event]:
    """What ran in ``rounds`` of all steps, in milliseconds of the profiler's clock."""
    steps, on_gpu = list(steps), device.type == "cuda"
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    dist.barrier()
    with profile(activities=kinds) as profiler:
        for _ in range(rounds):
            for step in steps:
                step()
        if on_gpu:
            torch.cuda.synchronize()
    found = []
    for event in profiler.events() or ():
        name = event.name
        if on_gpu:  # annotations span kernels, and what lies between them
            kept = event.device_type == DeviceType.CUDA and not event.is_user_annotation
        else:
            kept = is_communication(name) or name.startswith(OPERATORS)
        if kept:
            found.append((name, event.time_range.start / 1e3, event.time_range.end / 1e3))
    return found


def host_ms(steps: Iterable[Callable[[], None]], device: torch.device, rounds: int) -> float:
    """Milliseconds in which the host issues all steps once; the GPU may run behind it."""
    steps, on_gpu = list(steps), device.type == "cuda"
    dist.barrier()
    if on_gpu:
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(rounds):
        for step in steps:
            step()
    taken = (time.perf_counter() - start) * 1e3 / rounds
    if on_gpu:
        torch.cuda.synchronize()
    return taken


def profile_row(
    steps: Iterable[Callable[[], None]], device: torch.device, rounds: int = 3
) -> dict[str, object]:
    """Milliseconds of all steps once: means of the ranks, each rank's, and names of rank 0."""
    steps = list(steps)
    for step in steps:  # warm
        step()
    mine = {"host": host_ms(steps, device, rounds)}
    events = events_of(steps, device, rounds)
    mine |= {name: ms / rounds for name, ms in shares(events).items()}
    of_ranks: list[dict[str, float]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(of_ranks, mine)
    row: dict[str, object] = {
        f"{name}_ms": sum(x[name] for x in of_ranks) / len(of_ranks) for name in mine
    }
    row["ranks"] = of_ranks
    row["by_name_ms"] = {name: ms / rounds for name, ms in list(by_name(events).items())[:NAMES]}
    return row
