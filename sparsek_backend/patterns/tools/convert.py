"""Reading and writing patterns by the ending of a file's name."""

from __future__ import annotations

from pathlib import Path

from sparsek_backend.patterns.model_file import ModelPatterns
from sparsek_backend.patterns.pattern import BlockSparsePattern


def read_patterns(path: Path, *, block_size: int | None = None) -> ModelPatterns:
    """The patterns of a ``.safetensors`` file, or of a scipy matrix over the blocks (``.npz``).

    Args:
        block_size: tokens along a side of a block, for a matrix that does not say it.

    Raises:
        ValueError: another ending, or a file that cannot be read.
    """
    if path.suffix == ".safetensors":
        return ModelPatterns.load(path)
    if path.suffix != ".npz":
        raise ValueError(f"path: expected a file named .safetensors or .npz, got {path}")
    from scipy import sparse

    try:
        matrix = sparse.load_npz(path)  # never unpickles
    except Exception as error:  # of zip files, zlib, numpy and scipy
        raise ValueError(f"path: expected a scipy sparse matrix, got {path}: {error}") from error
    return ModelPatterns({0: BlockSparsePattern.from_scipy(matrix, block_size)})


def write_patterns(
    patterns: ModelPatterns, path: Path, *, layer: int | None = None, head: int = 0
) -> None:
    """Write a model's file, one layer's file, or one pattern as a scipy matrix.

    Args:
        path: ``.safetensors``, or ``.npz`` for a CSR matrix over the blocks, whose values are the
            weights.
        layer: this layer alone; a matrix is of the only layer where it is ``None``.
        head: the pattern of a matrix.

    Raises:
        ValueError: another ending, or no such layer or pattern.
    """
    if layer is not None and layer not in patterns.patterns:
        raise ValueError(f"layer: expected one of {sorted(patterns.patterns)}, got {layer}")
    if path.suffix == ".safetensors":
        if layer is None:
            patterns.save(path)
        else:
            patterns.patterns[layer].save(path)
        return
    if path.suffix != ".npz":
        raise ValueError(f"path: expected a file named .safetensors or .npz, got {path}")
    if layer is None and len(patterns.patterns) > 1:
        raise ValueError(f"layer: expected one of {sorted(patterns.patterns)} for a matrix")
    chosen = next(iter(patterns.patterns.values())) if layer is None else patterns.patterns[layer]
    if not 0 <= head < chosen.num_patterns:
        raise ValueError(f"head: expected 0 to {chosen.num_patterns - 1}, got {head}")
    from scipy import sparse

    places = chosen.places()
    of_head = places[0] == head
    row, col = places[1:, of_head].numpy()
    weights = chosen.weights
    values = of_head[of_head].numpy() if weights is None else weights[of_head].numpy()
    sparse.save_npz(path, sparse.coo_matrix((values, (row, col)), shape=chosen.shape).tocsr())
