"""The patterns of a model's layers, and the file that keeps them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from sparsek_backend.patterns import storage
from sparsek_backend.patterns.pattern import BlockSparsePattern
from sparsek_kernels.checks import check_int

KIND = "block_sparse"


@dataclass(frozen=True)
class ModelPatterns:
    """Block-sparse patterns by layer, all over one grid of blocks.

    Args:
        patterns: by layer index.
        model: the model that they were learned from; empty where there is none.
        sparsity: share of the visible blocks that was to be left out.

    Raises:
        TypeError: a layer that is no integer.
        ValueError: no patterns, patterns of several block sizes or shapes, a layer below 0, or a
            sparsity that is not from 0 to below 1.
    """

    patterns: dict[int, BlockSparsePattern]
    model: str = ""
    sparsity: float = 0.0

    def __post_init__(self) -> None:
        grids = {(p.block_size, p.shape) for p in self.patterns.values()}
        if len(grids) != 1:
            raise ValueError(
                f"patterns: expected one block size and shape for all layers, got {sorted(grids)}"
            )
        for layer in self.patterns:
            check_int("layer", layer, 0)
        if not 0.0 <= self.sparsity < 1.0:
            raise ValueError(f"sparsity: expected 0 to below 1, got {self.sparsity}")

    @property
    def block_size(self) -> int:
        """Tokens along a side of a block."""
        return next(iter(self.patterns.values())).block_size

    @property
    def shape(self) -> tuple[int, int]:
        """``(R, C)``, query and key blocks."""
        return next(iter(self.patterns.values())).shape

    def save(self, path: str | Path) -> None:
        """Write a safetensors file with kind, version, model, sparsity and a digest per layer.

        Raises:
            ImportError: safetensors is missing; the message has the install command.
        """
        header = {"kind": KIND, "model": self.model, "sparsity": self.sparsity}
        tensors: dict[str, torch.Tensor] = {}
        for layer, pattern in sorted(self.patterns.items()):
            storage.check_columns(pattern.crow_indices, pattern.shape[1], path)
            tensors |= {f"{layer}.{name}": x for name, x in pattern.tensors().items()}
            header |= {**pattern.grid(), f"sha256.{layer}": pattern.digest()}
        storage.save(path, storage.MODEL_FORMAT, tensors, header)

    @classmethod
    def load(cls, path: str | Path, device: torch.device | str = "cpu") -> ModelPatterns:
        """Read a file that :meth:`save` wrote, or a single pattern as that of layer 0.

        Raises:
            ImportError: safetensors is missing; the message has the install command.
            ValueError: the file is missing, damaged, of another kind or of a later version; the
                message names the file and the field.
        """
        path = Path(path)
        header, tensors = storage.load(path, storage.MODEL_FORMAT, storage.FORMAT)
        if header["format"] == storage.FORMAT:
            return cls({0: BlockSparsePattern.load(path, device)})
        own: dict[int, dict[str, torch.Tensor]] = {}
        for name, x in tensors.items():
            layer, _, field = name.partition(".")
            own.setdefault(storage.number("layer", layer, path), {})[field] = x
        wanted = {"kind", "model", "sparsity", *(f"sha256.{layer}" for layer in own)}
        storage.check_names(header, {*storage.HEADER, *wanted, *storage.SIZES}, path)
        for name in sorted(wanted - set(header)):
            raise ValueError(f"{name}: expected a field of this name in {path}")
        if header["kind"] != KIND:
            raise ValueError(f"kind: expected {KIND!r}, got {header['kind']!r} in {path}")
        if not own:
            raise ValueError(f"patterns: expected at least one layer in {path}")
        try:
            sparsity = float(header["sparsity"])
        except ValueError as error:
            raise ValueError(f"sparsity: {error} in {path}") from error
        patterns = {
            layer: BlockSparsePattern.of_file(path, header, fields, header[f"sha256.{layer}"]).to(
                device
            )
            for layer, fields in sorted(own.items())
        }
        try:
            return cls(patterns, header["model"], sparsity)
        except ValueError as error:
            raise ValueError(f"{error} in {path}") from error
