"""Gluon kernels on a CPU: partitions, barriers and asynchronous copies, with the worst timing.

``interpret(order, late)`` lets the launchers of ``sparsek_kernels`` run their Hopper kernels on CPU
tensors.  What a kernel may not rely on is made to go wrong: memory starts as NaN, an access outside
a tensor raises, asynchronous reads of shared memory (matrix products, copies) happen as late as the
waits allow and copies to it as early, or the other way round, of the partitions of one program or
several that need not wait the first one in a given order runs, and those that wait for one another
for ever raise :class:`Deadlock`.  Layouts of registers, banks and fences are not modelled:
compilation and GPUs judge those.
"""

from tests.kernels.gluon_interpreter.launching import WAYS, Way, in_turn, interpret
from tests.kernels.gluon_interpreter.machine import Deadlock

__all__ = ["WAYS", "Deadlock", "Way", "in_turn", "interpret"]
