"""What an indexer hands to attention."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Chosen(NamedTuple):
    """What the tiles of a segment of a step attend beyond sinks and window.

    Args:
        indices: ``[lists, Hkv, scored_blocks]`` int32; -1 in rows of tiles that see everything.  A
            list is of a tile, of a decoded token, or of a decoding request
            (``Segment.by_request``).  Entries of a sample (``sample.py``), with weights: blocks,
            ascending, of a policy with an alignment cells in any order, and -1 behind the last.
    """

    indices: torch.Tensor

    def of_tiles(self, tiles: slice | torch.Tensor) -> Chosen:
        """What some of the lists hold."""
        return Chosen(self.indices[tiles])
