"""Pattern files: safetensors with a format name, a version and digests in the header.

A file holds one pattern, or one for each layer of a model.  Nothing in them is code.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch

from sparsek_backend.whole_file import write_whole

FORMAT = "sparsek.block_sparse_pattern"
MODEL_FORMAT = "sparsek.model_patterns"
PREFILL_FORMAT = "sparsek.prefill_pattern"
VERSION = 1
MAX_COLUMNS = 1 << 26
"""Key blocks of all patterns of a file: a damaged number must not claim all memory."""
_SIZES = ("block_size", "num_rows", "num_cols")
_HEADER = ("format", "version", *_SIZES)
_ABOUT = ("kind", "model", "sparsity")
_DTYPES = {"crow_indices": torch.int32, "col_indices": torch.int32, "weights": torch.float32}
_MAX_DIGITS = 18


def write(
    path: Path, tensors: dict[str, torch.Tensor], block_size: int, shape: tuple[int, int]
) -> None:
    """Write the tensors, with the rest in the header.

    Raises:
        ValueError: more key blocks than a file may have.
    """
    _check_columns(tensors["crow_indices"], shape[1], path)
    tensors = {name: x.cpu().contiguous() for name, x in tensors.items()}
    header = {"format": FORMAT, **_sizes(block_size, shape)}
    _save(tensors, path, {**header, "sha256": digest(tensors, block_size, shape)})


def write_layers(
    path: Path,
    layers: dict[int, dict[str, torch.Tensor]],
    block_size: int,
    shape: tuple[int, int],
    about: dict[str, str],
) -> None:
    """Write the tensors of a model's layers, each with its digest.

    Args:
        layers: tensors by layer, of patterns of one block size and shape.
        block_size: tokens along a side of a block.
        shape: ``(R, C)``.
        about: header fields: ``kind``, ``model`` and ``sparsity``.
    """
    header = {"format": MODEL_FORMAT, **_sizes(block_size, shape), **about}
    whole = {}
    for layer, tensors in layers.items():
        _check_columns(tensors["crow_indices"], shape[1], path)
        own = {name: _apart(x) for name, x in tensors.items()}
        header[f"sha256.{layer}"] = digest(own, block_size, shape)
        whole.update({f"{layer}.{name}": x for name, x in own.items()})
    _save(whole, path, header)


def read_layers(path: Path) -> tuple[dict[int, tuple[dict[str, Any], str]], dict[str, str]]:
    """The fields of each layer's pattern, yet to be checked, with its digest; and the header.

    Raises:
        ValueError: no safetensors file, another format or version, or a field that is missing,
            unknown, of a wrong type or out of range.
    """
    header, tensors = _open(path, MODEL_FORMAT)
    own: dict[int, dict[str, torch.Tensor]] = {}
    for name, x in tensors.items():
        number, _, field = name.partition(".")
        own.setdefault(_number("layer", number, path), {})[field] = x
    digests = {f"sha256.{layer}" for layer in own}
    _check_names([*set(header) - {*_HEADER, *_ABOUT, *digests}], path)
    for name in (*_ABOUT, *sorted(digests)):
        if name not in header:
            raise ValueError(f"{name}: expected a field of this name in {path}")
    layers = {n: (_fields(header, x, path), header[f"sha256.{n}"]) for n, x in own.items()}
    return layers, header


def write_prefill(
    path: Path, entries: dict[int, torch.Tensor], block_size: int, model: str
) -> None:
    """Write the ranked entries of a model's layers, with one digest of all."""
    tensors = {str(layer): _apart(x) for layer, x in sorted(entries.items())}
    header = {
        "format": PREFILL_FORMAT,
        "version": str(VERSION),
        "block_size": str(block_size),
        "model": model,
        "sha256": digest(tensors, block_size, (len(tensors), 0)),
    }
    _save(tensors, path, header)


def read_prefill(path: Path) -> tuple[dict[int, torch.Tensor], int, str]:
    """Entries by layer, block size and model of a file of :func:`write_prefill`.

    Raises:
        ValueError: no safetensors file, another format or version, a field that is missing,
            unknown or out of range, or another digest than the file's.
    """
    header, tensors = _open(path, PREFILL_FORMAT)
    _check_names([*set(header) - {"format", "version", "block_size", "model", "sha256"}], path)
    block_size = _number("block_size", header.get("block_size", ""), path)
    found = digest(tensors, block_size, (len(tensors), 0))
    if header.get("sha256") != found:
        raise ValueError(
            f"sha256: expected {found} of what it holds, got {header.get('sha256')} in {path}"
        )
    entries = {_number("layer", name, path): x for name, x in tensors.items()}
    return entries, block_size, header.get("model", "")


def format_of(path: Path) -> str:
    """The format that a file says it has; empty where it is no safetensors file."""
    safe_open, _ = _safetensors()
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return str((file.metadata() or {}).get("format", ""))
    except Exception:  # the library's own error type is no public name
        return ""


def read(path: Path) -> tuple[dict[str, Any], str | None]:
    """The fields of a saved pattern, yet to be checked as a pattern, and the file's digest.

    Files of earlier releases have no digest.

    Raises:
        ValueError: no safetensors file, another format or version, or a field that is missing,
            unknown, of a wrong type or out of range.
    """
    header, tensors = _open(path, FORMAT)
    _check_names([*set(header) - {*_HEADER, "sha256"}], path)
    return _fields(header, tensors, path), header.get("sha256")


def digest(tensors: dict[str, torch.Tensor], block_size: int, shape: tuple[int, int]) -> str:
    """SHA-256 of a pattern: its sizes, and the names, sizes and bytes of its tensors (on a CPU)."""
    total = hashlib.sha256(f"{block_size} {shape[0]} {shape[1]}".encode())
    for name in sorted(tensors):
        total.update(f" {name} {list(tensors[name].shape)} ".encode())
        total.update(tensors[name].numpy().data)
    return total.hexdigest()


def _apart(x: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU: safetensors refuses tensors that share memory, as layers may."""
    return x.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def _save(tensors: dict[str, torch.Tensor], path: Path, header: dict[str, str]) -> None:
    """Write a file as a whole or not at all.

    What :func:`read` returned may still lie in the file that is replaced, not in memory.

    Raises:
        ValueError: the folder is missing.
    """
    _, save_file = _safetensors()
    if not path.parent.is_dir():
        raise ValueError(f"path: expected a folder that exists, got {str(path.parent)!r}")
    write_whole(path, lambda beside: save_file(tensors, beside, header))


def _open(path: Path, format_name: str) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """Header and tensors of a file of a format, in its present version."""
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
    if header.get("format") != format_name:
        found = header.get("format")
        made = ", which `learn --prefill` made for vLLM," if found == PREFILL_FORMAT else ""
        raise ValueError(f"format: expected {format_name!r}, got {found!r}{made} in {path}")
    if header.get("version") != str(VERSION):
        raise ValueError(f"version: expected {VERSION}, got {header.get('version')!r} in {path}")
    return header, tensors


def _fields(header: dict[str, str], tensors: dict[str, torch.Tensor], path: Path) -> dict[str, Any]:
    """The arguments of a pattern, of right types."""
    _check_names([*set(tensors) - set(_DTYPES)], path)
    for name, dtype in _DTYPES.items():
        found = tensors[name].dtype if name in tensors else None
        if found != dtype and (name != "weights" or found is not None):
            raise ValueError(f"{name}: expected a tensor of {dtype}, got {found} in {path}")
    block_size, rows, columns = (_number(name, header.get(name, ""), path) for name in _SIZES)
    _check_columns(tensors["crow_indices"], columns, path)
    return {"block_size": block_size, "shape": (rows, columns), "weights": None, **tensors}


def _check_names(unknown: list[str], path: Path) -> None:
    for name in unknown:
        raise ValueError(f"{name}: expected no field of this name in {path}")


def _sizes(block_size: int, shape: tuple[int, int]) -> dict[str, str]:
    sizes = zip(_SIZES, (block_size, *shape), strict=True)
    return {"version": str(VERSION), **{name: str(size) for name, size in sizes}}


def _number(name: str, text: str, path: Path) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS):
        raise ValueError(f"{name}: expected a number, got {text[:40]!r} in {path}")
    return int(text)


def _check_columns(crow_indices: torch.Tensor, columns: int, path: Path) -> None:
    patterns = crow_indices.shape[0] if crow_indices.dim() else 1
    if patterns * columns > MAX_COLUMNS:
        raise ValueError(
            f"num_cols: expected at most {MAX_COLUMNS // patterns} with {patterns} patterns, "
            f"got {columns} in {path}"
        )


def _safetensors() -> tuple[Any, Any]:
    try:
        from safetensors import safe_open
        from safetensors.torch import save_file
    except ImportError as error:
        raise ImportError(
            "pattern files need safetensors: pip install 'sparsek-backend[patterns]'"
        ) from error
    return safe_open, save_file
