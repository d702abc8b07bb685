"""The gate of the NSA decode op: green for right results, red for wrong ones."""

from __future__ import annotations

import pytest
import torch

from sparsek_backend.bench.ops import OPS
from sparsek_backend.bench.registry import OURS, Case
from sparsek_backend.bench.spec import parse_spec


@pytest.mark.parametrize("spec", ["2q1s1k", "1q1s1337"])
def test_gate(spec: str) -> None:
    op = OPS["nsa_decode"]
    params = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "dtype": "float32"}
    case = Case("tiny", parse_spec(spec), {**op.defaults, **params})
    providers = {p.name: p for p in op.build(case, torch.device("cpu"))}
    for name in (OURS, "sparsek_dense"):
        outputs = providers[name].prepare()()
        assert providers[name].gate(outputs).passed
        assert not providers[name].gate((outputs[0] * 1.01,)).passed
