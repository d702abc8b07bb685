"""Gluon kernels on a CPU: partitions, barriers and asynchronous copies, with the worst timing.

``interpret(order, late)`` lets the launchers of ``sparsek_kernels`` run their Hopper kernels on CPU
tensors.  What a kernel may not rely on is made to go wrong.  Memory starts as NaN, and an access
outside a tensor raises.  Asynchronous reads of shared memory (matrix products, copies) happen as
late as the waits allow and copies to it as early, or the other way round.  Registers loaded from it
come when they are needed, unless threads write there before, or a fence stands between.  Of the
partitions of one program or several that need not wait the first one in a given order runs, and
those that wait for one another for ever raise :class:`Deadlock`.  Layouts of registers, banks and
other fences are not modelled: compilation and GPUs judge those.
"""

from tests.kernels.gluon_interpreter.launching import WAYS, Way, in_turn, interpret
from tests.kernels.gluon_interpreter.machine import Deadlock

__all__ = ["WAYS", "Deadlock", "Way", "in_turn", "interpret"]
