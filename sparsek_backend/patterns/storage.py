"""Pattern files: safetensors with a format name, a version and digests in the header.

A file holds one pattern, one for each layer of a model, or what prefills follow, and no code.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from sparsek_backend.extras import needing
from sparsek_backend.whole_file import write_whole

FORMAT = "sparsek.block_sparse_pattern"
MODEL_FORMAT = "sparsek.model_patterns"
PREFILL_FORMAT = "sparsek.prefill_pattern"
VERSION = 1
MAX_COLUMNS = 1 << 26
"""Key blocks of all patterns of a file: a damaged number must not claim all memory."""
HEADER = ("format", "version")
"""Fields that every file's header has."""
SIZES = ("block_size", "num_rows", "num_cols")
"""Header fields of a grid of blocks."""
_DTYPES = {"crow_indices": torch.int32, "col_indices": torch.int32, "weights": torch.float32}
_MAX_DIGITS = 18

Tensors = Mapping[str, torch.Tensor]


def save(path: str | Path, kind: str, tensors: Tensors, header: Mapping[str, object]) -> None:
    """Write a file of a format as a whole or not at all.

    What :func:`load` returned may still lie in the file that is replaced, not in memory.

    Raises:
        ValueError: the folder is missing.
    """
    _, save_file = _safetensors()
    path = Path(path)
    if not path.parent.is_dir():
        raise ValueError(f"path: expected a folder that exists, got {str(path.parent)!r}")
    # Copies: safetensors refuses tensors that share memory, as layers may.
    own = {
        name: x.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, x in tensors.items()
    }
    fields = {"format": kind, "version": VERSION, **header}
    text = {name: str(value) for name, value in fields.items()}
    write_whole(path, lambda beside: save_file(own, beside, text))


def load(path: Path, *kinds: str) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """Header and tensors of a file of one of some formats, in its present version.

    Raises:
        ValueError: no safetensors file, or another format or version.
    """
    safe_open, _ = _safetensors()
    if not path.is_file():
        reason = "is no file" if path.exists() else "does not exist"
        raise ValueError(f"path: expected a pattern file, got {str(path)!r} which {reason}")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except Exception as error:  # the library's own error type is no public name
        raise ValueError(f"path: expected a safetensors file, got {path}: {error}") from error
    found = header.get("format")
    if found not in kinds:
        made = ", which `learn --prefill` made for vLLM," if found == PREFILL_FORMAT else ""
        raise ValueError(f"format: expected {kinds[0]!r}, got {found!r}{made} in {path}")
    if header.get("version") != str(VERSION):
        raise ValueError(f"version: expected {VERSION}, got {header.get('version')!r} in {path}")
    return header, tensors


def check_names(found: Iterable[str], known: Iterable[str], path: Path) -> None:
    """Raise a ValueError for a field that is none of those known."""
    for name in set(found) - set(known):
        raise ValueError(f"{name}: expected no field of this name in {path}")


def number(name: str, text: str, path: Path) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS):
        raise ValueError(f"{name}: expected a number, got {text[:40]!r} in {path}")
    return int(text)


def pattern_fields(header: Mapping[str, str], tensors: Tensors, path: Path) -> dict[str, Any]:
    """The arguments of a pattern, of right types, yet to be checked as a pattern.

    Raises:
        ValueError: a field that is missing, unknown, of a wrong type or out of range.
    """
    check_names(tensors, _DTYPES, path)
    for name, dtype in _DTYPES.items():
        found = tensors[name].dtype if name in tensors else None
        if found != dtype and (name != "weights" or found is not None):
            raise ValueError(f"{name}: expected a tensor of {dtype}, got {found} in {path}")
    block_size, rows, columns = (number(name, header.get(name, ""), path) for name in SIZES)
    check_columns(tensors["crow_indices"], columns, path)
    return {"block_size": block_size, "shape": (rows, columns), "weights": None, **tensors}


def check_columns(crow_indices: torch.Tensor, columns: int, path: str | Path) -> None:
    """Raise a ValueError for more key blocks than a file may have."""
    patterns = crow_indices.shape[0] if crow_indices.dim() else 1
    if patterns * columns > MAX_COLUMNS:
        raise ValueError(
            f"num_cols: expected at most {MAX_COLUMNS // patterns} with {patterns} patterns, "
            f"got {columns} in {path}"
        )


def digest(tensors: Tensors, block_size: int, shape: tuple[int, int]) -> str:
    """SHA-256 of a pattern: its sizes, and the names, sizes and bytes of its tensors."""
    total = hashlib.sha256(f"{block_size} {shape[0]} {shape[1]}".encode())
    for name in sorted(tensors):
        total.update(f" {name} {list(tensors[name].shape)} ".encode())
        total.update(tensors[name].detach().cpu().contiguous().numpy().data)
    return total.hexdigest()


def _safetensors() -> tuple[Any, Any]:
    with needing("pattern files need safetensors", extra="patterns"):
        from safetensors import safe_open
        from safetensors.torch import save_file
    return safe_open, save_file
