"""Kernels of the paged decode step: interpreted, compiled ahead of time, and run on a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sparsek_backend.bench.ops.nsa_decode import DEFAULTS, SPEC, make_inputs
from sparsek_backend.bench.registry import Case
from sparsek_backend.bench.spec import parse_spec
from sparsek_backend.nn import NSAConfig
from sparsek_kernels import PagedBatch
from sparsek_kernels.nsa.paged.api import dummy_run, nsa_paged_attention
from tests.kernels import scripts
from tests.kernels.nsa.paged_layer import PagedLayer, make_layer, make_tokens

HERE = Path(__file__).parent


def test_interpreted_decode_equals_the_layer() -> None:
    done = scripts.run(HERE / "paged_cases.py", interpret=True)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert sum(line.startswith("ok") for line in done.stdout.splitlines()) == 16


@pytest.mark.parametrize(
    ("arch", "group", "dim", "dtype"),
    [(80, 4, 128, "bfloat16"), (90, 16, 128, "bfloat16"), (90, 1, 64, "float32"),
     (100, 8, 256, "float16")],
)  # fmt: skip
def test_kernels_compile_without_spilling(arch: int, group: int, dim: int, dtype: str) -> None:
    done = scripts.run(HERE / "paged_aot.py", arch, group, dim, dtype)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {row["kernel"] for row in rows} == {
        "nsa_paged_compress_kernel",
        "nsa_paged_compressed_kernel",
        "nsa_paged_attend_kernel",
    }
    for row in rows:
        assert row["stack"] <= 64, f"{row['kernel']} spills {row['stack']} bytes"
        assert row["shared"] <= 99 * 1024, f"{row['kernel']} needs {row['shared']} bytes"


class _Recorder(PagedLayer):
    """Keeps the arguments of the last attention call."""

    def attend(self, q: torch.Tensor, batch: PagedBatch) -> torch.Tensor:
        self.call = (q, batch)
        return super().attend(q, batch)


@pytest.mark.gpu
def test_a_rehearsal_takes_the_memory_of_a_prefill() -> None:
    layer = make_layer(NSAConfig(), (16, 4), 128, dtype=torch.bfloat16, device="cuda")
    paged = _Recorder(layer, 64, 400)
    tokens = make_tokens(20000, layer)
    for part in (tokens[:-4000], tokens[-4000:]):
        paged.step({"a": part})

    def peak(call: Callable[[], object]) -> int:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        return torch.cuda.max_memory_allocated() - before

    q, _ = paged.call
    reserved = peak(lambda: dummy_run(q, 4, 20000, NSAConfig().spec))
    taken = peak(lambda: paged.attend(*paged.call))
    assert reserved >= 2 * 20000 * 4 * 128 * 2  # K and V at least
    assert taken <= reserved + 3 * q.numel() * 2 + (8 << 20)  # the output is the caller's


@pytest.mark.gpu
@pytest.mark.parametrize("spec", ["1q1s8k", "3q1s5k", "160q1s1k"])
def test_a_captured_step_repeats_bit_for_bit(spec: str) -> None:
    """Kernels that start early must not read what is not there yet, however often they run."""
    inputs = make_inputs(Case("graph", parse_spec(spec), DEFAULTS), torch.device("cuda"))
    rows = (inputs.pages.k_cmp, inputs.pages.v_cmp)
    out = torch.full((len(inputs.q), 3, *inputs.q.shape[1:]), float("nan")).to(inputs.q)

    def step() -> None:
        nsa_paged_attention(
            inputs.q, inputs.pages, inputs.batch, SPEC, inputs.compression,
            window_size=inputs.window_size, out=out,
        )  # fmt: skip

    step()
    expected, kept = out.clone(), [x.clone() for x in rows]
    assert not expected.isnan().any()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    last = inputs.batch.block_table.gather(1, (inputs.batch.seq_lens[:, None] - 1).long() // 64)
    for _ in range(50):
        out.fill_(float("nan"))
        for row in rows:
            row[last.flatten().long(), :, -1] = float("nan")  # what the step compresses
        graph.replay()
        assert torch.equal(out, expected)
    assert all(torch.equal(x, y) for x, y in zip(rows, kept, strict=True))


GPU: dict[str, tuple[NSAConfig, tuple[int, int], int, torch.dtype]] = {
    "bf16": (NSAConfig(), (16, 4), 128, torch.bfloat16),
    "bf16, group of 16, shared K and V": (
        NSAConfig(shared_kv=True),
        (16, 1),
        128,
        torch.bfloat16,
    ),
    "fp16, means": (NSAConfig(compression="mean"), (6, 2), 64, torch.float16),
    "fp32": (NSAConfig(top_n=5, window_size=100), (8, 2), 64, torch.float32),
    "fp32, shared means": (
        NSAConfig(top_n=5, shared_kv=True, compression="mean"),
        (4, 4),
        80,
        torch.float32,
    ),
}


@pytest.mark.gpu
@pytest.mark.parametrize(("config", "heads", "dim", "dtype"), GPU.values(), ids=GPU.keys())
def test_gpu_equals_the_layer_in_fp64(
    config: NSAConfig, heads: tuple[int, int], dim: int, dtype: torch.dtype
) -> None:
    """Chunks, decodes of several requests at once, and a page order, at real sizes."""
    if dtype != torch.float32:
        config = replace(config, top_n=64)  # every block: rounding cannot change the selection
    exact = make_layer(config, heads, dim, dtype=torch.float64, device="cuda")
    layer = make_layer(config, heads, dim, dtype=dtype, device="cuda")
    order = torch.randperm(400, generator=torch.Generator().manual_seed(5)).tolist()
    paged = PagedLayer(layer, 64, 400, order)
    lengths = {"a": 2500, "b": 33, "c": 1000, "d": 64}
    tokens = {name: make_tokens(n, layer, n) for name, n in lengths.items()}
    parts: dict[str, list[torch.Tensor]] = {name: [] for name in lengths}
    for name, rows in tokens.items():
        for chunk in rows[:-20].split(777):
            parts[name] += paged.step({name: chunk})
    for first in range(-20, 0):
        last = (first + 1) or None
        found = paged.step({name: rows[first:last] for name, rows in tokens.items()})
        for name, out in zip(lengths, found, strict=True):
            parts[name].append(out)
    for name, rows in tokens.items():
        expected = exact(rows.double()[None])[0]
        theirs = (layer(rows[None])[0].double() - expected).abs()
        ours = (torch.cat(parts[name]).double() - expected).abs()
        assert ours.max() <= 2 * theirs.max() + 1e-5
        assert ours.square().mean().sqrt() <= 1.5 * theirs.square().mean().sqrt() + 1e-6
