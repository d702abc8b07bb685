"""Workloads from YAML: which op, at which batch specs, with which parameters and bars.

defaults: {num_heads: 32, num_kv_heads: 8, head_dim: 128}
workloads:
  - op: sink_window_fwd
    name: sink4-w4096
    specs: [q32k, q128k]
    params: {num_sink: 4, window_size: 4096}
    bars: {flex: 1.2, fa3: 0.92}
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from sparsek_backend.bench.ops import OPS
from sparsek_backend.bench.registry import BenchOp, Case
from sparsek_backend.bench.spec import parse_spec
from sparsek_backend.bench.timing import TimingKind
from sparsek_backend.extras import needing
from sparsek_backend.infllm import describe


class _Entry(BaseModel, extra="forbid"):
    op: str
    name: str
    specs: list[str] = Field(min_length=1)
    params: dict[str, Any] = {}
    bars: dict[str, float] = {}
    timing: TimingKind = "cold"
    providers: tuple[str, ...] = ()


class _File(BaseModel, extra="forbid"):
    defaults: dict[str, Any] = {}
    workloads: list[_Entry]


Cases = list[tuple[BenchOp, Case]]
"""Ops, each with a case of a workload: there is one for each batch spec."""


def load_workloads(path: Path) -> Cases:
    """The cases of a workload file.

    Raises:
        ImportError: pyyaml is missing; the message has the install command.
        ValueError: unknown op, key, parameter, timing or malformed spec; the message names the file
            and the workload.
    """
    with needing("reading workloads needs pyyaml", extra="bench"):
        import yaml
    if not path.is_file():
        raise ValueError(f"yaml: expected a workload file, got {str(path)!r} which does not exist")
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"yaml: {path} is no valid YAML: {error}") from error
    return parse_workloads(document, source=str(path))


def parse_workloads(document: object, source: str) -> Cases:
    """The cases of a parsed document; `source` names it in errors."""
    try:
        file = _File.model_validate(document)
    except ValidationError as error:
        raise ValueError(f"{source}: {describe(error)}") from error
    names = [(entry.op, entry.name) for entry in file.workloads]
    for op, name in names:
        if names.count((op, name)) > 1:
            raise ValueError(f"{source}: workload {name!r} of {op} appears twice")
    return [case for entry in file.workloads for case in _cases(entry, file.defaults, source)]


def _cases(entry: _Entry, defaults: dict[str, Any], source: str) -> Cases:
    where, op = f"{source}: workload {entry.name!r}", OPS.get(entry.op)
    if op is None:
        raise ValueError(f"{where}: op: expected one of {', '.join(OPS)}, got {entry.op!r}")
    for name in entry.params:
        if name not in op.defaults:
            raise ValueError(
                f"{where}: unknown parameter {name!r} of {op.name}, expected {sorted(op.defaults)}"
            )
    shared = {name: value for name, value in defaults.items() if name in op.defaults}
    params = {**op.defaults, **shared, **entry.params}
    try:
        specs = [parse_spec(text) for text in entry.specs]
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    rest = (params, entry.bars, entry.timing, entry.providers)
    return [(op, Case(entry.name, spec, *rest)) for spec in specs]
