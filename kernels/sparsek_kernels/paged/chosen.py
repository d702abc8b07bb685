"""What an indexer hands to attention."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Chosen(NamedTuple):
    """What the tiles of a segment of a step attend beyond sinks and window.

    Args:
        indices: ``[lists, Hkv, scored_blocks]`` int32; -1 in rows of tiles that see everything.  A
            list is of a tile, of a decoded token, or of a decoding request
            (``Segment.by_request``).  Blocks, ascending; of a policy with an alignment entries of a
            sample (``sample.py``): cells in any order, with weights, and -1 where none is left.
    """

    indices: torch.Tensor

    def of_tiles(self, tiles: slice | torch.Tensor) -> Chosen:
        """What some of the lists hold."""
        return Chosen(self.indices[tiles])
