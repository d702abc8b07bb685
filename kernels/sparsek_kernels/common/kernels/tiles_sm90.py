"""Which tiles a program of a persistent grid takes (Gluon)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def tile_index(step):
    """Tile of this program's ``step``-th turn.

    Every second pass over the programs runs backwards, so that long and short tiles even out.
    """
    pid = gl.program_id(0)
    width = gl.num_programs(0)
    lane = gl.where(step % 2 == 0, pid, width - 1 - pid)
    return step * width + lane
