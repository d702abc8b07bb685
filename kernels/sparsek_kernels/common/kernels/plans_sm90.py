"""Plans that one warp of a Hopper kernel makes for the others, in a ring in shared memory (Gluon).

A plan is some int32 numbers.  Each of them has a place of its own in ``plans [PLANS * FIELDS, 1]``.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from sparsek_kernels.common.kernels.barrier_sm90 import ring_barriers
from sparsek_kernels.common.kernels.gluon_names import thread_barrier


@gluon.jit
def plan_ring(PLANS: gl.constexpr, FIELDS: gl.constexpr, TAKERS: gl.constexpr):
    """Memory and barriers ``(plans, full, empty)`` of a ring that ``TAKERS`` partitions read."""
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    plans = gl.allocate_shared_memory(gl.int32, [PLANS * FIELDS, 1], FLAT)
    full, empty = ring_barriers(PLANS, 1, TAKERS)
    return plans, full, empty


@gluon.jit
def put_plan(plans, full, empty, turn, plan, PLANS: gl.constexpr, FIELDS: gl.constexpr):
    """Write the plan of item ``turn``, as soon as its place is free; for one warp."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    slot = turn % PLANS
    mbarrier.wait(empty.index(slot), ((turn // PLANS) & 1) ^ 1)
    for i in gl.static_range(FIELDS):
        plans.index(slot * FIELDS + i).store(gl.full([1], plan[i], gl.int32, ONE))
    thread_barrier()
    mbarrier.arrive(full.index(slot), count=1)


@gluon.jit
def plan_field(plans, at, WARPS: gl.constexpr):
    """The number at place ``at``, for a partition of ``WARPS`` warps."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    return gl.max(plans.index(at).load(ONE), 0)
