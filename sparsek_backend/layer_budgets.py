"""A file of budgets: how many blocks each layer and KV head of one model selects.

`sparsek calibrate` writes it, the setting `budgets` names it.  As JSON:

    {"kind": "sparsek budgets", "version": 1, "model": "Qwen2.5-0.5B", "num_hidden_layers": 24,
     "num_key_value_heads": 2, "sel_block_size": 64, "mean": 32.0,
     "top_k": {"0": [16, 48], ...}, "made_by": {...}, "checksum": "sha256:..."}

``top_k`` has one number for each KV head of every layer that selects.  Layers that are absent, such
as a draft model's, keep the setting ``top_k``.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

MAX_BLOCKS = 2**20
"""Most blocks that a query may select; room for their indices is kept for every query."""

_Blocks = Annotated[int, Field(strict=True, gt=0, le=MAX_BLOCKS)]


class LayerBudgets(BaseModel):
    """Budgets of one model, in selected blocks beyond sinks and window.

    Attributes:
        model: name of the model that was measured.
        num_hidden_layers, num_key_value_heads: its shape, which the served model must have.
        sel_block_size: tokens in a block.
        mean: mean of all the numbers below, the budget that they share out.
        top_k: for each layer, one number for each KV head.
        made_by: how they were found.
        checksum: SHA-256 of everything else.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["sparsek budgets"]
    version: Literal[1]
    model: str
    num_hidden_layers: int
    num_key_value_heads: int
    sel_block_size: int
    mean: float
    top_k: dict[int, tuple[_Blocks, ...]] = Field(min_length=1)
    made_by: dict[str, Any] = {}
    checksum: str

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> LayerBudgets:
        for layer, heads in self.top_k.items():
            if not 0 <= layer < self.num_hidden_layers:
                raise ValueError(
                    f"top_k: expected layers below {self.num_hidden_layers}, got {layer}"
                )
            if len(heads) != self.num_key_value_heads:
                raise ValueError(
                    f"top_k of layer {layer}: expected {self.num_key_value_heads} numbers, one for "
                    f"each KV head, got {len(heads)}"
                )
        if not math.isclose(self.mean, mean_of(self.top_k), rel_tol=1e-6):
            raise ValueError(f"mean: expected {mean_of(self.top_k):g}, got {self.mean:g}")
        if self.checksum != _checksum(self.model_dump(mode="json")):
            raise ValueError("checksum: the content was changed after it was written")
        return self

    def __str__(self) -> str:
        """A short name, for logs and labels."""
        return f"{self.model}, mean {self.mean:g}, {self.checksum.removeprefix('sha256:')[:12]}"

    @classmethod
    def make(cls, *, top_k: Mapping[int, Sequence[int]], **fields: Any) -> LayerBudgets:
        """Budgets with their mean and checksum.

        Args:
            top_k: for each layer, one number for each KV head.
            fields: the other attributes.
        """
        content: dict[str, Any] = {"kind": "sparsek budgets", "version": 1, **fields}
        content["top_k"] = {layer: tuple(numbers) for layer, numbers in top_k.items()}
        content["mean"] = mean_of(top_k)
        draft = cls.model_construct(**content, checksum="")
        return cls(**content, checksum=_checksum(draft.model_dump(mode="json")))

    def save(self, path: Path) -> Path:
        """Write the file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        content = self.model_dump(mode="json")
        layers = content.pop("top_k")
        lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in content.items()]
        rows = [f"    {json.dumps(key)}: {json.dumps(value)}" for key, value in layers.items()]
        lines.insert(-2, '  "top_k": {\n' + ",\n".join(rows) + "\n  }")
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
        return path


def load_budgets(path: Path) -> LayerBudgets:
    """Read a file of budgets.

    Raises:
        ValueError: there is no such file, or it is no valid file of budgets.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"expected a file that `sparsek calibrate` wrote: {error}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    try:
        return read_budgets(content)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def read_budgets(content: object) -> LayerBudgets:
    """The budgets that the content of a file has.

    Raises:
        ValueError: it is no valid content; the message names the first fault.
    """
    try:
        return LayerBudgets.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        reason = first["msg"].removeprefix("Value error, ")
        raise ValueError(f"{where + ': ' if where else ''}{reason}") from None


def mean_of(top_k: Mapping[int, Sequence[int]]) -> float:
    """Mean over the KV heads of all layers."""
    numbers = [number for heads in top_k.values() for number in heads]
    return sum(numbers) / max(len(numbers), 1)


def _checksum(content: Mapping[str, Any]) -> str:
    rest = {name: value for name, value in content.items() if name != "checksum"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()
