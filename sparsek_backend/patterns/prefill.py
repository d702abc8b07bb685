"""Patterns that vLLM's prefills follow: ranked vertical blocks and slashes, for any length.

Trained attention keeps to columns (the same keys for every query) and diagonals (the same distance
from every query): Jiang et al., "MInference" (arXiv 2407.02490), section 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from sparsek_backend.patterns import storage
from sparsek_kernels.block_sparse.structure import check_block_size
from sparsek_kernels.checks import check_int, check_tensor

ENTRIES = 128
"""Ranked entries of a KV head: more than a server selects blocks."""


@dataclass(frozen=True)
class PrefillPattern:
    """Ranked blocks for each layer and KV head.

    An entry ``e >= 0`` is the vertical block ``e`` of the sequence; ``e < 0`` is the slash of the
    blocks ``-e`` before a query's own.

    Args:
        entries: ``[Hkv, E]`` int32 by layer index; the best entries come first.
        block_size: tokens along a side of a block.
        model: the model that they were learned from; empty where there is none.

    Raises:
        TypeError: entries that are no int32 tensors.
        ValueError: no layers, or layers of several shapes.
    """

    entries: dict[int, torch.Tensor]
    block_size: int
    model: str = ""

    def __post_init__(self) -> None:
        check_block_size(self.block_size)
        if not self.entries:
            raise ValueError("entries: expected at least one layer, got none")
        shape = next(iter(self.entries.values())).shape
        for layer, entries in self.entries.items():
            check_tensor(f"entries of layer {layer}", entries, tuple(shape), (torch.int32,))
        if len(shape) != 2 or not shape[0]:
            raise ValueError(f"entries: expected shape [Hkv, E], got {list(shape)}")

    @property
    def num_kv_heads(self) -> int:
        """KV heads of a layer."""
        return next(iter(self.entries.values())).shape[0]

    def save(self, path: str | Path) -> None:
        """Write a safetensors file with model, version and a digest."""
        tensors = {str(layer): x for layer, x in sorted(self.entries.items())}
        header: dict[str, object] = {"block_size": self.block_size, "model": self.model}
        header["sha256"] = storage.digest(tensors, self.block_size, (len(tensors), 0))
        storage.save(path, storage.PREFILL_FORMAT, tensors, header)

    @classmethod
    def load(cls, path: str | Path) -> PrefillPattern:
        """Read a file that :meth:`save` wrote.

        Raises:
            ImportError: safetensors is missing; the message has the install command.
            ValueError: the file is missing, damaged, of another kind or of a later version; the
                message names the file and the field.
        """
        path = Path(path)
        header, tensors = storage.load(path, storage.PREFILL_FORMAT)
        storage.check_names(header, (*storage.HEADER, "block_size", "model", "sha256"), path)
        block_size = storage.number("block_size", header.get("block_size", ""), path)
        found = storage.digest(tensors, block_size, (len(tensors), 0))
        if header.get("sha256") != found:
            raise ValueError(
                f"sha256: expected {found} of what it holds, got {header.get('sha256')} in {path}"
            )
        entries = {storage.number("layer", name, path): x for name, x in tensors.items()}
        try:
            return cls(entries, block_size, header.get("model", ""))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{error} in {path}") from error


def ranked_entries(
    mass: torch.Tensor, *, sinks: int = 1, window: int = 1, length: int = ENTRIES
) -> torch.Tensor:
    """``[P, length]`` int32: verticals and slashes, the ones that hold most mass first.

    An entry is worth the mass that it adds to those before it, on average over the rows of blocks
    that it reaches; one that reaches few rows counts as if it reached an eighth of them more.

    Args:
        mass: ``[P, R, R]``, what each key block is to a query block; causal.
        sinks: first key blocks, which are attended anyway.
        window: latest key blocks, a query block's own included, which are attended anyway.
        length: entries of each pattern; the rest is ``-1``, the block before a query's own.

    Raises:
        ValueError: an argument out of range, or a mass that is not square.
    """
    check_tensor("mass", mass, ("P", "R", mass.shape[1] if mass.dim() == 3 else "R"))
    check_int("sinks", sinks, 0)
    check_int("window", window, 1)
    check_int("length", length, 1)
    patterns, rows, _ = mass.shape
    row = torch.arange(rows)
    distance = row[:, None] - row
    left = mass.float().cpu().masked_fill((distance < window) | (row < sinks), 0.0)
    reached = rows - row
    slope = distance.clamp(min=0).flatten()
    worth = 1.0 / (reached + rows / 8)
    found = torch.full((patterns, length), -1, dtype=torch.int32)
    for place in range(length):
        vertical = left.sum(1) * worth  # [P, R]
        slash = left.new_zeros(patterns, rows).index_add_(1, slope, left.flatten(1)) * worth
        best, entry = torch.cat([vertical, slash], dim=1).max(dim=1)
        is_slash = entry >= rows
        number = entry % rows
        live = best > 0.0
        found[live, place] = torch.where(is_slash, -number, number)[live].int()
        column = (row == number[:, None])[:, None] & ~is_slash[:, None, None]
        diagonal = (distance == number[:, None, None]) & is_slash[:, None, None]
        left.masked_fill_(column | diagonal, 0.0)
    return found
