"""What an indexer hands to attention: blocks, and what stands in for the others."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Tail(NamedTuple):
    """One more key for each segment of 64 tokens between sinks and window, with a mean value.

    Args:
        logits: ``[tiles, Hq, segments]`` float32, in base 2, of each token or tile; entry ``n``
            stands for the tokens of segment ``n`` that are not chosen, -inf where none are left.
            Entries of segments that sinks or window cover are not read.
        records: ``[num_pages, Hkv, bytes]`` uint8, what the pages keep (``record.py``): the mean of
            a segment's values is there.
    """

    logits: torch.Tensor
    records: torch.Tensor


class Chosen(NamedTuple):
    """What the tiles of a segment of a step attend beyond sinks and window.

    Args:
        indices: ``[lists, Hkv, scored_blocks]`` int32 blocks, ascending; -1 in rows of tiles that
            see everything.  A list is of a tile, of a decoded token, or of a decoding request
            (``Segment.by_request``).
        tail: what stands in for the blocks that are not chosen, if anything does.
    """

    indices: torch.Tensor
    tail: Tail | None = None

    def of_tiles(
        self, tiles: slice | torch.Tensor, lists: slice | torch.Tensor | None = None
    ) -> Chosen:
        """What some of the tiles attend.

        Args:
            tiles: their numbers.
            lists: rows of ``indices`` for these tiles, where requests share a row.
        """
        tail = self.tail
        if tail is not None:
            tail = tail._replace(logits=tail.logits[tiles])
        return Chosen(self.indices[tiles if lists is None else lists], tail)
