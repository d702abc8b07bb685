"""Tables on the terminal: results, bars and comparisons."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape

from sparsek_backend.bench.compare import Pair
from sparsek_backend.bench.registry import OURS
from sparsek_backend.bench.results import Row, speedup
from sparsek_backend.bench.runner import BarResult
from sparsek_backend.command_line import number, whole_table


def print_case(console: Console, rows: list[Row]) -> None:
    """One case: its providers, and ours against each of them when both gates are green."""
    head = rows[0]
    names = ("provider", "ms", "p20-p80", "TFLOP/s", "TB/s", "roofline", "extra MiB")
    title = f"{head.op}  {head.case}  {head.spec}"
    table = whole_table(*names, "ours is", "gate", title=title)
    for column in table.columns[1 : len(names)]:
        column.justify = "right"
    ours = next((row for row in rows if row.provider == OURS), None)
    ratios = speedup(rows, ours) if ours is not None else {}
    for row in (row for row in rows if row.status != "unavailable"):
        ratio = ratios.get(row.provider)
        table.add_row(
            row.provider,
            number(row.ms),
            f"{number(row.p20_ms)}-{number(row.p80_ms)}" if row.is_timed else "-",
            number(row.tflops),
            number(row.tb_s, ".3g"),
            number(row.roofline, ".0%"),
            number(row.peak_mib, ".1f"),
            "-" if ratio is None else verdict(ratio),
            (row.note and f"{_gate(row)} ({row.note})") or _gate(row),
        )
    console.print(table)
    absent = [row for row in rows if row.status == "unavailable"]
    if absent:
        reasons = "; ".join(f"{row.provider} ({row.detail})" for row in absent)
        console.print(f"[dim]not run: {escape(reasons)}[/dim]", highlight=False)


def verdict(ratio: float) -> str:
    """How ours compares, coloured: ``ratio`` is the other's time over ours."""
    if ratio >= 1:
        return f"[green]{ratio:.2f}x faster[/green]"
    return f"[red]{1 / ratio:.2f}x slower[/red]"


def _gate(row: Row) -> str:
    if row.status == "ok":
        return "[green]ok[/green]"
    return f"[red]{row.status}[/red]: {escape(row.detail)}"


def print_bars(console: Console, results: list[BarResult]) -> None:
    """Print a table of the bars, with the ratio asked for, the ratio found and whether it holds."""
    if not results:
        return
    names = ("op", "case", "spec", "bar", "wanted", "got", "")
    table = whole_table(*names, title="bars")
    for result in results:
        table.add_row(
            result.op,
            result.case,
            result.spec,
            result.bar if result.bar.startswith(("max_", "min_")) else f"over {result.bar}",
            number(result.wanted),
            number(result.got),
            "[green]met[/green]" if result.met else "[red]not met[/red]",
        )
    console.print(table)


def print_comparison(console: Console, pairs: list[Pair]) -> None:
    """Two result files side by side."""
    names = ("op", "case", "spec", "provider", "A ms", "B ms", "B / A", "")
    table = whole_table(*names, title="B against A (below 1 is faster)")
    for pair in pairs:
        colour = "red" if pair.regressed else "green" if pair.ratio and pair.ratio < 1 else ""
        table.add_row(
            *pair.key,
            number(pair.a_ms),
            number(pair.b_ms),
            number(pair.ratio, ".3f"),
            f"[{colour}]{pair.verdict}[/{colour}]" if colour else pair.verdict,
        )
    console.print(table)
