"""Whether every mbarrier of a Gluon kernel keeps its place in shared memory for as long as it runs.

The memory of a barrier that is initialised and then used by nobody is given to other data, without
``mbarrier.inval`` in between: undefined behaviour (PTX ISA, mbarrier), seen as wrong values now and
then when several processes share a GPU.
"""

from __future__ import annotations

import re

_BARRIER = re.compile(r"(%[\w.-]+) = ttg\.local_alloc[^\n]*memdesc<[x\d]*xi64")
_CAPTURES = re.compile(r"ttg\.warp_specialize\(([^)]*)\)")


def short_lived_barriers(ttgir: str) -> list[str]:
    """Barriers of a kernel that are neither handed to its partitions nor invalidated.

    Args:
        ttgir: the kernel's TritonGPU module as text.
    """
    if "ttng.init_barrier" not in ttgir:
        return []
    barriers = _BARRIER.findall(ttgir)
    if not barriers:
        raise ValueError("ttgir: expected barriers to be allocated where they are initialised")
    kept = {name.strip() for found in _CAPTURES.findall(ttgir) for name in found.split(",")}
    return [
        name for name in barriers if name not in kept and f"ttng.inval_barrier {name} " not in ttgir
    ]


def require_lasting_barriers(kernel: str, ttgir: str) -> None:
    """Stop at a kernel with a barrier whose memory is given away.

    Raises:
        RuntimeError: the message names the kernel and its barriers.
    """
    short_lived = short_lived_barriers(ttgir)
    if short_lived:
        raise RuntimeError(f"{kernel}: {', '.join(short_lived)} may share memory with other data")
