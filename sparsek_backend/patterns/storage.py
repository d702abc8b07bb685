"""Pattern files: safetensors with a format name and a version in the header."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

FORMAT = "sparsek.block_sparse_pattern"
VERSION = 1


def write(
    path: Path, tensors: dict[str, torch.Tensor], block_size: int, shape: tuple[int, int]
) -> None:
    """Write the tensors, with the rest in the header."""
    _, save_file = _safetensors()
    header = {
        "format": FORMAT,
        "version": str(VERSION),
        "block_size": str(block_size),
        "num_rows": str(shape[0]),
        "num_cols": str(shape[1]),
    }
    save_file({name: x.cpu().contiguous() for name, x in tensors.items()}, path, header)


def read(path: Path, device: torch.device | str) -> dict[str, Any]:
    """The fields of a saved pattern, yet to be checked as a pattern.

    Raises:
        ValueError: no safetensors file, another format or version, or a missing field.
    """
    safe_open, _ = _safetensors()
    if not path.is_file():
        raise ValueError(f"path: expected a pattern file, got {str(path)!r} which does not exist")
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except Exception as error:  # the library's own error type is no public name
        raise ValueError(f"path: expected a safetensors file, got {path}: {error}") from error
    if header.get("format") != FORMAT:
        raise ValueError(f"format: expected {FORMAT!r}, got {header.get('format')!r} in {path}")
    if header.get("version") != str(VERSION):
        raise ValueError(f"version: expected {VERSION}, got {header.get('version')!r} in {path}")
    sizes = {}
    for name in ("block_size", "num_rows", "num_cols"):
        value = header.get(name, "")
        if not value.isdecimal():
            raise ValueError(f"{name}: expected a number, got {value!r} in {path}")
        sizes[name] = int(value)
    for name in ("crow_indices", "col_indices"):
        if name not in tensors:
            raise ValueError(f"{name}: expected a tensor of that name, got none in {path}")
    return {
        "block_size": sizes["block_size"],
        "shape": (sizes["num_rows"], sizes["num_cols"]),
        "crow_indices": tensors["crow_indices"],
        "col_indices": tensors["col_indices"],
        "weights": tensors.get("weights"),
    }


def _safetensors() -> tuple[Any, Any]:
    try:
        from safetensors import safe_open
        from safetensors.torch import save_file
    except ImportError as error:
        raise ImportError(
            "pattern files need safetensors: pip install 'sparsek-backend[patterns]'"
        ) from error
    return safe_open, save_file
