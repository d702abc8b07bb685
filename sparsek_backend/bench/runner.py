"""Run cases: gate every provider, then time the green ones in turn."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass

import torch

from sparsek_backend.bench.ceilings import Ceilings
from sparsek_backend.bench.registry import OURS, BenchOp, Case, Outputs, Provider, Unavailable
from sparsek_backend.bench.results import Row
from sparsek_backend.bench.timing import Timed, Timing, make_timed, time_interleaved
from sparsek_backend.machine import Machine

_MIB = 1 << 20


def run_case(
    op: BenchOp,
    case: Case,
    device: torch.device,
    machine: Machine,
    ceilings: Ceilings,
    budget_ms: float = 400.0,
) -> list[Row]:
    """Gate and time every provider of one case; a row for each, timed or not.

    Args:
        budget_ms: time for the samples, all providers together.

    Raises:
        ValueError: the op has none of the case's providers.
    """
    rows: list[Row] = []
    green: list[tuple[Row, Provider, Timed]] = []
    names: list[str] = []
    for provider in op.build(case, device):
        names.append(provider.name)
        if case.providers and provider.name not in case.providers:
            continue
        row, timed = _admit(op, case, provider, device, machine, ceilings)
        if timed is None:
            rows.append(row)
        else:
            green.append((row, provider, timed))
    if not rows and not green:
        given = ", ".join(case.providers)
        raise ValueError(f"providers: expected some of {', '.join(names)}, got {given}")
    if green:
        calls = [timed for _, _, timed in green]
        timings = time_interleaved(calls, device=device, budget_ms=budget_ms)
        dtype = case.str_param("dtype")
        rows += [
            _timed_row(row, provider, timing, ceilings, dtype)
            for (row, provider, _), timing in zip(green, timings, strict=True)
        ]
    del green
    release(device)
    return sorted(rows, key=lambda row: (row.provider != OURS, row.provider))


def _admit(
    op: BenchOp,
    case: Case,
    provider: Provider,
    device: torch.device,
    machine: Machine,
    ceilings: Ceilings,
) -> tuple[Row, Timed | None]:
    """A provider's row so far, and its timed call when its gate is green."""

    def row(status: str, detail: str, peak_mib: float | None = None) -> Row:
        return Row(
            op=op.name,
            case=case.name,
            spec=case.spec.text,
            provider=provider.name,
            status=status,
            detail=" ".join(detail.split())[:300],
            note=provider.note,
            peak_mib=peak_mib,
            params=" ".join(f"{name}={value}" for name, value in sorted(case.params.items())),
            copy_tb_s=ceilings.copy_tb_s,
            matmul_tflops=ceilings.matmul_tflops[case.str_param("dtype")],
            **asdict(machine),
        )

    try:
        call = provider.prepare()
        call()
        outputs, peak_mib = _peak(call, device)
        verdict = provider.gate(outputs)
        del outputs
        if not verdict.passed:
            return row("gate failed", verdict.detail, peak_mib), None
        timed = make_timed(call, timing=case.timing, device=device, graph=provider.use_graph)
    except Unavailable as reason:
        return row("unavailable", str(reason)), None
    except Exception as error:  # a peer may fail in any way of its own; the row carries it
        release(device)
        return row("error", f"{type(error).__name__}: {error}"), None
    return row("ok", verdict.detail, peak_mib), timed


def _peak(call: Callable[[], Outputs], device: torch.device) -> tuple[Outputs, float | None]:
    """The call's outputs, and MiB of device memory it took at its peak beyond them."""
    if device.type != "cuda":
        return call(), None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    outputs = call()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    kept = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in outputs}
    return outputs, max(peak - sum(kept.values()), 0) / _MIB


def _timed_row(row: Row, provider: Provider, timing: Timing, ceilings: Ceilings, dtype: str) -> Row:
    least_ms = ceilings.roofline_ms(
        provider.flops, provider.bytes, dtype, reads_only=provider.reads_only
    )
    values = row.__dict__ | {
        "ms": timing.median_ms,
        "p20_ms": timing.p20_ms,
        "p80_ms": timing.p80_ms,
        "samples": timing.samples,
        "method": timing.method,
        "tflops": provider.flops / timing.median_ms / 1e9,
        "tb_s": provider.bytes / timing.median_ms / 1e9,
        "roofline": least_ms / timing.median_ms,
    }
    return Row(**values)


@dataclass(frozen=True)
class BarResult:
    """One bar of a workload: what was asked, what came."""

    op: str
    case: str
    spec: str
    bar: str
    wanted: float
    got: float | None
    met: bool


_FIELDS = {"max_ms": "ms", "min_tflops": "tflops", "min_roofline": "roofline"}
"""What a bar of ours bounds; the others are named after a peer, or ``max_growth``."""


def check_bars(cases: Iterable[tuple[BenchOp, Case]], rows: list[Row]) -> list[BarResult]:
    """Judge each workload's bars at its longest spec; missing or red rows do not meet a bar."""
    timed = {row.key: row for row in rows if row.is_timed}
    families: dict[tuple[str, str], list[Case]] = {}
    for op, case in cases:
        families.setdefault((op.name, case.name), []).append(case)
    results = []
    for key, family in families.items():
        ordered = sorted(family, key=lambda case: sum(case.spec.seq_lens))
        shortest, longest = ordered[0], ordered[-1]
        spec = longest.spec.text
        ours = timed.get((*key, spec, OURS))
        got: float | None
        for bar, wanted in longest.bars.items():
            if bar == "max_growth":
                if len(family) < 2:
                    continue
                got = _ratio(ours, timed.get((*key, shortest.spec.text, OURS)))
            elif bar in _FIELDS:
                got = None if ours is None else getattr(ours, _FIELDS[bar])
            else:
                got = _ratio(timed.get((*key, spec, bar)), ours)
            met = got is not None and (got <= wanted if bar.startswith("max_") else got >= wanted)
            results.append(BarResult(*key, spec, bar, wanted, got, met))
    return results


def _ratio(numerator: Row | None, denominator: Row | None) -> float | None:
    if numerator is None or denominator is None or not numerator.ms or not denominator.ms:
        return None
    return numerator.ms / denominator.ms


def release(device: torch.device) -> None:
    """Give a case's memory back before the next."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
