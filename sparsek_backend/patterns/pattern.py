"""A block-sparse attention pattern and the ways to make one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sparsek_backend.patterns import storage
from sparsek_backend.patterns.entries import (
    block_grid,
    check_shape,
    edge_index_of,
    indices_of_entries,
    pairs_within,
    places_of_matrix,
)
from sparsek_backend.patterns.ranking import fixed_blocks, heaviest_blocks
from sparsek_kernels.block_sparse.structure import BlockStructure, indices_of_mask
from sparsek_kernels.checks import check_int

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False, repr=False)
class BlockSparsePattern(BlockStructure):
    """Which key blocks each query block attends: P patterns over one R x C grid of blocks.

    P is 1 (one pattern for all heads) or divides the query heads: pattern ``p`` serves heads
    ``p Hq / P`` and on.  Query block ``r`` holds queries ``r block_size`` and on, key block ``c``
    keys ``c block_size`` and on, so the pattern fits ``ceil(N / block_size) x
    ceil(M / block_size)`` blocks.  Causality is no part of it: ``block_sparse_attention(...,
    causal=True)`` cuts the diagonal blocks.

    Args:
        block_size: tokens along a side of a block: 16 to 128, a multiple of 16.
        shape: ``(R, C)``, query and key blocks.
        crow_indices: ``[P, R + 1]`` int32; offsets into ``col_indices``, from 0 to nnz.
        col_indices: ``[nnz]`` int32, ascending in each row.
        weights: ``[nnz]`` fp32, the attention mass of each block where it was learned; finite, from
            0 on.

    Raises:
        TypeError: a wrong type or dtype.
        ValueError: sizes, offsets or columns that make no pattern; the message names the argument.
    """

    weights: torch.Tensor | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weights is None:
            return
        if not isinstance(self.weights, torch.Tensor) or self.weights.dtype != torch.float32:
            got = getattr(self.weights, "dtype", type(self.weights).__name__)
            raise TypeError(f"weights: expected a float32 tensor, got {got}")
        if self.weights.shape != self.col_indices.shape:
            raise ValueError(
                f"weights: expected shape {tuple(self.col_indices.shape)}, one per block, "
                f"got {tuple(self.weights.shape)}"
            )
        if self.weights.device != self.device:
            raise ValueError(f"weights: expected device {self.device}, got {self.weights.device}")
        wrong = self.weights[~(self.weights.isfinite() & (self.weights >= 0))]
        if len(wrong):
            raise ValueError(f"weights: expected finite numbers from 0 on, got {float(wrong[0])}")

    @classmethod
    def from_mask(
        cls, mask: Any, block_size: int, *, mass: torch.Tensor | None = None
    ) -> BlockSparsePattern:
        """The blocks that a dense mask marks.

        Args:
            mask: ``[R, C]`` or ``[P, R, C]`` bool, a tensor or anything ``torch.as_tensor`` takes.
            block_size: tokens along a side of a block.
            mass: weight of every block of the grid, in the shape of ``mask``.

        Raises:
            TypeError: ``mask`` is not boolean.
            ValueError: ``mask`` or ``mass`` has another shape.
        """
        blocks = torch.as_tensor(mask)
        if blocks.dtype != torch.bool:
            raise TypeError(f"mask: expected dtype torch.bool, got {blocks.dtype}")
        if blocks.dim() not in (2, 3):
            raise ValueError(f"mask: expected shape [R, C] or [P, R, C], got {list(blocks.shape)}")
        if mass is not None and mass.shape != blocks.shape:
            raise ValueError(
                f"mass: expected the shape of mask, {list(blocks.shape)}, got {list(mass.shape)}"
            )
        weights = None if mass is None else mass.detach()[blocks].float()
        if blocks.dim() == 2:
            blocks = blocks[None]
        shape = (blocks.shape[1], blocks.shape[2])
        return cls(block_size, shape, *indices_of_mask(blocks), weights)

    @classmethod
    def from_scipy(cls, matrix: Any, block_size: int | None = None) -> BlockSparsePattern:
        """The structure of scipy sparse matrices; their values do not matter.

        Args:
            matrix: one matrix, or a sequence of them, one per pattern.  The blocks of a BSR matrix
                become the pattern's blocks; in any other format, and in BSR with blocks of one
                element, each stored entry stands for a block.
            block_size: tokens along a side of a block; may be left out where BSR blocks say it.

        Raises:
            TypeError: not a scipy sparse matrix.
            ValueError: blocks that are not square or not of ``block_size``, no block size at all,
                or matrices of several shapes.
        """
        matrices = list(matrix) if isinstance(matrix, list | tuple) else [matrix]
        if not matrices:
            raise ValueError("matrix: expected at least one scipy sparse matrix, got none")
        places, shapes = [], []
        for pattern, item in enumerate(matrices):
            if not hasattr(item, "tocsr"):
                raise TypeError(
                    f"matrix: expected a scipy sparse matrix, got {type(item).__name__}"
                )
            sides = getattr(item, "blocksize", (1, 1))
            if sides != (1, 1):
                if sides[0] != sides[1] or block_size not in (None, sides[0]):
                    wanted = "square blocks" if block_size is None else f"blocks of {block_size}"
                    raise ValueError(f"matrix: expected {wanted}, got BSR blocks of {sides}")
                block_size = int(sides[0])
            place = places_of_matrix(item, sides)
            places.append(torch.cat([torch.full_like(place[:1], pattern), place]))
            shapes.append((int(item.shape[0]) // sides[0], int(item.shape[1]) // sides[1]))
        if block_size is None:
            raise ValueError("block_size: expected an int for a matrix without blocks, got None")
        if any(shape != shapes[0] for shape in shapes):
            raise ValueError(f"matrix: expected blocks of one shape, got {shapes}")
        indices = indices_of_entries(torch.cat(places, 1), len(places), shapes[0])
        return cls(block_size, shapes[0], *indices)

    @classmethod
    def from_edges(
        cls,
        edges: Iterable[tuple[int, int]] | torch.Tensor,
        shape: tuple[int, int],
        block_size: int,
        *,
        weights: torch.Tensor | None = None,
    ) -> BlockSparsePattern:
        """One pattern of ``(query block, key block)`` pairs, in any order; repeats count once.

        Args:
            edges: the pairs, or an integer tensor ``[edges, 2]``.
            shape: ``(R, C)``, query and key blocks.
            block_size: tokens along a side of a block.
            weights: ``[edges]``, the weight of each; weights of repeats are added.

        Raises:
            ValueError: an edge is no pair of blocks of the grid, or there are other weights than
                one for each.
        """
        shape = check_shape(shape)
        pairs = pairs_within(edges, shape)
        if weights is not None and weights.shape != pairs.shape[1:]:
            raise ValueError(
                f"weights: expected one for each of {pairs.shape[1]} edges, "
                f"got shape {list(weights.shape)}"
            )
        places = torch.cat([torch.zeros_like(pairs[:1]), pairs])
        return cls(block_size, shape, *indices_of_entries(places, 1, shape, weights))

    @classmethod
    def from_graph(
        cls, graph: Any, block_size: int, *, self_loops: bool = True
    ) -> BlockSparsePattern:
        """One pattern from a networkx graph over the blocks ``0 .. n - 1``.

        An edge ``(u, v)`` lets query block ``u`` attend key block ``v``; an undirected one works
        both ways.

        Args:
            graph: a graph whose nodes are these integers.
            block_size: tokens along a side of a block.
            self_loops: also let every block attend itself.

        Raises:
            TypeError: not a networkx graph.
            ValueError: other nodes than ``0 .. n - 1``.
        """
        if not hasattr(graph, "is_directed"):
            raise TypeError(f"graph: expected a networkx graph, got {type(graph).__name__}")
        edges, size = edge_index_of(graph)
        if self_loops:
            edges = torch.cat([edges, torch.arange(size).expand(2, -1)], 1)
        return cls.from_edges(edges.T, (size, size), block_size)

    @classmethod
    def local(
        cls, shape: tuple[int, int], block_size: int, *, window: int, sinks: int = 0
    ) -> BlockSparsePattern:
        """Sinks and a sliding window, in blocks (Xiao et al., arXiv 2309.17453).

        Args:
            shape: ``(R, C)``; the last query block sits at the last key block.
            window: latest key blocks that a query block attends, its own included.
            sinks: first key blocks, attended by every later query block.
        """
        check_int("window", window, 1)
        check_int("sinks", sinks, 0)
        row, col = block_grid(shape)
        return cls.from_mask((col <= row) & ((col > row - window) | (col < sinks)), block_size)

    @classmethod
    def strided(
        cls, shape: tuple[int, int], block_size: int, *, stride: int, window: int = 1
    ) -> BlockSparsePattern:
        """A window and every ``stride``-th block before it (Child et al., arXiv 1904.10509).

        Args:
            shape: ``(R, C)``; the last query block sits at the last key block.
            stride: distance, in blocks, between the attended blocks.
            window: latest key blocks that a query block attends, its own included.
        """
        check_int("stride", stride, 1)
        check_int("window", window, 1)
        row, col = block_grid(shape)
        far = (row - col) % stride == 0
        return cls.from_mask((col <= row) & (far | (col > row - window)), block_size)

    @classmethod
    def load(cls, path: str | Path, device: torch.device | str = "cpu") -> BlockSparsePattern:
        """Read a file that :meth:`save` wrote, checked as any new pattern is.

        Raises:
            ImportError: safetensors is missing; the message has the install command.
            ValueError: the file is missing, damaged, no pattern, or of a later version; the message
                names the file and the field.
        """
        header, tensors = storage.load(Path(path), storage.FORMAT)
        storage.check_names(header, (*storage.HEADER, "sha256", *storage.SIZES), Path(path))
        return cls.of_file(Path(path), header, tensors, header.get("sha256")).to(device)

    @classmethod
    def of_file(
        cls, path: Path, header: Mapping[str, str], tensors: storage.Tensors, digest: str | None
    ) -> BlockSparsePattern:
        """The pattern of the fields of a file, checked, also against its digest.

        Files of earlier releases have none.

        Raises:
            ValueError: fields that make no pattern, or another digest.
        """
        fields = storage.pattern_fields(header, tensors, path)
        try:
            pattern = cls(**fields)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{error} in {path}") from error
        if digest not in (None, pattern.digest()):
            raise ValueError(
                f"sha256: expected {pattern.digest()} of what it holds, got {digest} in {path}"
            )
        return pattern

    def save(self, path: str | Path) -> None:
        """Write the pattern to a safetensors file.

        Raises:
            ImportError: safetensors is missing; the message has the install command.
            ValueError: more than 2^26 key blocks in all patterns together.
        """
        storage.check_columns(self.crow_indices, self.shape[1], path)
        header = {**self.grid(), "sha256": self.digest()}
        storage.save(path, storage.FORMAT, self.tensors(), header)

    def grid(self) -> dict[str, int]:
        """The sizes that a file's header has."""
        return dict(zip(storage.SIZES, (self.block_size, *self.shape), strict=True))

    def digest(self) -> str:
        """SHA-256 of sizes and tensors."""
        return storage.digest(self.tensors(), self.block_size, self.shape)

    @property
    def density(self) -> float:
        """Share of all ``P x R x C`` blocks that is listed."""
        return self.num_blocks / max(self.num_patterns * self.shape[0] * self.shape[1], 1)

    def mask(self) -> torch.Tensor:
        """The pattern as a dense block mask ``[P, R, C]`` bool."""
        return self._dense(torch.ones_like(self.col_indices, dtype=torch.bool))

    def mass(self) -> torch.Tensor:
        """The weights as ``[P, R, C]`` fp32, 0 where no block is listed.

        Raises:
            ValueError: the pattern has no weights.
        """
        return self._dense(self.mass_of_entries())

    def mass_of_entries(self) -> torch.Tensor:
        """The weights, ``[nnz]`` fp32, in the order of ``places()``.

        Raises:
            ValueError: the pattern has no weights.
        """
        if self.weights is None:
            raise ValueError("weights: expected a learned pattern, got one without weights")
        return self.weights

    def prune(self, *, density: float, sinks: int = 1, window: int = 1) -> BlockSparsePattern:
        """Keep the heaviest blocks of each pattern.

        A row that lists neither sinks nor a window keeps its heaviest block, so that no query
        loses all its keys.

        Args:
            density: share of the R x C blocks of each pattern to keep, if it has as many.
            sinks: first key blocks, which stay where they are listed.
            window: latest key blocks, a query block's own included, which stay where they are
                listed.

        Raises:
            ValueError: the pattern has no weights, or ``density`` is out of range.
        """
        check_int("sinks", sinks, 0)
        check_int("window", window, 0)
        mass, mask = self.mass(), self.mask()
        fixed = fixed_blocks(mass, mask, sinks, window)
        grid = self.shape[0] * self.shape[1]
        least = int(fixed.flatten(1).sum(1).max())
        count = math.floor(density * grid + 1e-6) if 0.0 < density <= 1.0 else 0
        if count < max(least, 1):
            raise ValueError(
                f"density: expected {least / max(grid, 1):.4g} (sinks, window and a block for "
                f"each row) to 1, got {density}"
            )
        kept = heaviest_blocks(mass, mask, fixed, count)
        return self.from_mask(kept, self.block_size, mass=mass)

    def union(self, other: BlockSparsePattern) -> BlockSparsePattern:
        """The blocks of either pattern; where both have weights, the larger ones.

        Raises:
            ValueError: another block size, grid or device, or other patterns than the same number
                or one for all.
        """
        for name in ("block_size", "shape", "device"):
            ours, theirs = getattr(self, name), getattr(other, name)
            if ours != theirs:
                raise ValueError(f"other: expected {name} {ours}, got {theirs}")
        counts = {self.num_patterns, other.num_patterns}
        if len(counts) > 1 and 1 not in counts:
            raise ValueError(
                f"other: expected 1 or {self.num_patterns} patterns, got {other.num_patterns}"
            )
        mass = None
        if self.weights is not None and other.weights is not None:
            mass = torch.maximum(self.mass(), other.mass())
        return self.from_mask(self.mask() | other.mask(), self.block_size, mass=mass)

    def crop(self, shape: tuple[int, int]) -> BlockSparsePattern:
        """The first ``shape`` query and key blocks, for shorter inputs.

        Raises:
            ValueError: more blocks than the pattern has.
        """
        shape = rows, cols = check_shape(shape)
        if shape == self.shape:
            return self
        if rows > self.shape[0] or cols > self.shape[1]:
            raise ValueError(f"shape: expected at most {self.shape} blocks, got {shape}")
        places = self.places()
        kept = (places[1] < rows) & (places[2] < cols)
        weights = None if self.weights is None else self.weights[kept]
        indices = indices_of_entries(places[:, kept], self.num_patterns, shape, weights)
        return BlockSparsePattern(self.block_size, shape, *indices)

    def places(self) -> torch.Tensor:
        """``[3, nnz]`` int64: pattern, query block and key block of every listed block."""
        line = torch.repeat_interleave(self.crow_indices.diff(dim=1).flatten().long())
        rows = max(self.shape[0], 1)
        return torch.stack([line // rows, line % rows, self.col_indices.long()])

    def to(self, device: torch.device | str) -> BlockSparsePattern:
        """The pattern on ``device``; itself where it is there already."""
        target = torch.empty(0, device=device).device
        if target == self.device:
            return self
        moved: dict[str, Any] = {name: x.to(target) for name, x in self.tensors().items()}
        return replace(self, **moved)

    def show(self, patterns: Sequence[int] | None = None) -> Figure:
        """Draw the patterns, darker where a block weighs more; ``figure.savefig(path)`` keeps it.

        Args:
            patterns: which ones; the first 16 by default.

        Raises:
            ImportError: matplotlib is missing; the message has the install command.
        """
        from sparsek_backend.patterns.plot import draw

        mass = None if self.weights is None else self.mass().cpu()
        return draw(self.mask().cpu(), mass, self.block_size, patterns)

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in self.__rich_repr__())
        return f"BlockSparsePattern({fields})"

    def __rich_repr__(self) -> Iterator[tuple[str, object]]:
        yield "patterns", self.num_patterns
        yield "shape", self.shape
        yield "block_size", self.block_size
        yield "density", round(self.density, 4)
        yield "learned", self.weights is not None
        yield "device", str(self.device)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors that :meth:`save` writes: indices, and weights if there are any."""
        tensors = {"crow_indices": self.crow_indices, "col_indices": self.col_indices}
        return tensors if self.weights is None else {**tensors, "weights": self.weights}

    def _dense(self, values: torch.Tensor) -> torch.Tensor:
        """``[P, R, C]`` with a value at every listed block, 0 elsewhere."""
        dense = values.new_zeros(self.num_patterns, *self.shape)
        dense[tuple(self.places())] = values
        return dense
