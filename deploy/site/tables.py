"""Tables of the docs that are made from settings, source and committed results.

    python deploy/site/tables.py            # write them into README.md and docs/

A page has ``<!-- table: NAME ARGUMENTS -->``, the table, and ``<!-- end of table -->``.  The site
makes the tables again when it is built, and the tests hold the committed ones against these.
"""

from __future__ import annotations

import ast
import csv
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, get_args, get_origin

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
BLOCK = re.compile(r"(<!-- table: (.+?) -->\n)(?:.*?\n)??(<!-- end of table -->)", re.DOTALL)
OURS = "sparsek"
PROVIDERS = {
    "fa3": "FlashAttention-3",
    "fa3_chunked": "FlashAttention-3, in chunks",
    "mdy666": "mdy666's kernels",
    "fla": "flash-linear-attention",
    "fa2": "FlashAttention-2",
    "cudnn": "cuDNN",
    "xunhaolai": "XunhaoLai's kernels",
    "sdpa": "SDPA",
    "sdpa_cudnn": "SDPA, cuDNN",
    "sdpa_flash": "SDPA, flash",
    "sdpa_gather": "SDPA on gathered keys",
    "sparsek_by_list": "ours, by lists",
    "sparsek_dense": "ours, dense",
    "flex": "FlexAttention",
    "torch": "PyTorch",
}
RULER = {
    "retrieval": ("niah",),
    "tracing": ("vt",),
    "counting": ("cwe", "fwe"),
    "questions": ("qa",),
}
"""Groups of RULER's tasks, by how their names begin."""
MAX_INTEGER = 2**31 - 1


def fill(text: str) -> str:
    """Return the page with its tables made anew."""

    def make(found: re.Match[str]) -> str:
        name, *arguments = found[2].split()
        return f"{found[1]}\n{TABLES[name](*arguments)}\n\n{found[3]}"

    return BLOCK.sub(make, text)


def pages() -> list[Path]:
    """Return the pages that may have tables."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def settings() -> str:
    """Return every setting of the vLLM backend, from its pydantic model.

    Raises:
        ValueError: a field has no text.
    """
    from sparsek_backend.config import ENV_PREFIX, SparsityConfig

    rows = []
    for name, field in SparsityConfig.model_fields.items():
        if field.description is None:
            raise ValueError(f"SparsityConfig.{name}: expected a docstring below it, got none")
        meaning = " ".join(field.description.split())
        variable = f"`{ENV_PREFIX}{name.upper()}`"
        default = "not set" if field.default is None else f"`{field.default}`"
        rows.append((f"`{name}`", default, _values(field), variable, meaning))
    return _table(("field", "default", "values", "variable", "meaning"), rows)


def _values(field: Any) -> str:
    """Return what a field may be."""
    if get_origin(field.annotation) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(field.annotation))
    limits = {
        name: getattr(item, name)
        for item in field.metadata
        for name in ("ge", "gt", "le", "lt")
        if hasattr(item, name)
    }
    if not limits:
        shown = " or ".join(f"`{value}`" for value in field.examples or ())
        return f"such as {shown}" if shown else ""
    if "lt" in limits:
        return f"from {limits['ge']} to below {limits['lt']}"
    least = limits["ge"] if "ge" in limits else limits["gt"] + 1
    return f"from {least}" + (f" to {limits['le']}" if limits["le"] < MAX_INTEGER else "")


def api(module: str, *names: str) -> str:
    """Return a directive of mkdocstrings for names of a module, by default all public ones."""
    return "\n\n".join(f"::: {module}.{name}" for name in names or public_names(module))


def public_names(module: str) -> list[str]:
    """Return ``__all__`` of a module, which is not imported."""
    parts = module.split(".")
    base = ROOT / "kernels" if parts[0] == "sparsek_kernels" else ROOT
    path = base.joinpath(*parts)
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for statement in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__":
            return list(ast.literal_eval(statement.value))
    raise ValueError(f"{module} has no __all__")


def kernels(file: str, *ops: str) -> str:
    """Return one table for each op of a file of ``sparsek bench kernels``; all ops by default."""
    rows = _rows(file)
    tables = []
    for op in ops or dict.fromkeys(row["op"] for row in rows):
        here = [row for row in rows if row["op"] == op]
        tables.append(_compared(op, here))
    return "\n\n".join((*tables, _measured_on(rows)))


def _compared(op: str, rows: Sequence[dict[str, str]]) -> str:
    """Return a line for each case: our time, and of each peer its time over ours."""
    timed = dict.fromkeys(row["provider"] for row in rows if _milliseconds(row) is not None)
    peers = [name for name in timed if name != OURS]
    cases: dict[tuple[str, str], dict[str, dict[str, str]]] = {}
    for row in rows:
        cases.setdefault((row["case"], row["spec"]), {})[row["provider"]] = row
    lines = []
    for (case, spec), found in cases.items():
        ours = _milliseconds(found.get(OURS))
        cells = [_ratio(_milliseconds(found.get(name)), ours) for name in peers]
        lines.append((case, f"`{spec}`", _duration(ours), *cells))
    return _table((f"`{op}`", "batch", "ours", *(PROVIDERS.get(x, x) for x in peers)), lines)


def served(file: str) -> str:
    """Return the times of ``sparsek bench serve``, of both backends."""
    rows = _rows(file)
    base = next(row["backend"] for row in rows if row["backend"] != "SPARSEK")
    lines = []
    for context, requests in dict.fromkeys((row["context"], row["requests"]) for row in rows):
        here = {
            r["backend"]: r for r in rows if (r["context"], r["requests"]) == (context, requests)
        }
        cells: list[str] = [_tokens(int(context)), requests]
        for name in ("ttft_ms", "tpot_ms"):
            theirs, ours = (float(here[backend][name]) for backend in (base, "SPARSEK"))
            cells += [_duration(theirs), _duration(ours), f"{theirs / ours:.2f}x"]
        lines.append(cells)
    first, each = f"first token, {base}", f"per token, {base}"
    head = ("context", "requests", first, "SPARSEK", "", each, "SPARSEK", "")
    return f"{_table(head, lines)}\n\n{_measured_on(rows)}"


def layer(file: str) -> str:
    """Return the spans of ``benchmarks/served_layer.py``, of both backends."""
    found = json.loads((RESULTS / file).read_text(encoding="utf-8"))
    spans = {(x["backend"], x["context"], x["phase"]): x["span_us"] / 1e3 for x in found["cases"]}
    backends = list(dict.fromkeys(backend for backend, *_ in spans))
    lines = []
    for context in dict.fromkeys(context for _, context, _ in spans):
        cells = [_tokens(context)]
        for phase in ("prompt", "decode"):
            theirs, ours = (spans[backend, context, phase] for backend in backends)
            cells += [_duration(theirs), _duration(ours), _ratio(theirs, ours, False)]
        lines.append(cells)
    names = [f"{what}, {backend}" for what in ("prompt", "decode") for backend in backends]
    head = ("context", *names[:2], "", *names[2:], "")
    return f"{_table(head, lines)}\n\n{_measured_on([found['machine']])}"


def load(file: str) -> str:
    """Return a server under load, a line for each rate and backend."""
    rows = _rows(file)
    lines = [
        [
            row["rate"],
            row["backend"],
            f"{float(row['throughput']):.2f}",
            f"{float(row['goodput']):.2f}",
            *(_duration(float(row[name])) for name in ("ttft_p50_ms", "ttft_p99_ms")),
            *(_duration(float(row[name])) for name in ("tpot_p50_ms", "tpot_p99_ms")),
        ]
        for row in sorted(rows, key=lambda row: float(row["rate"]))
    ]
    head = ("requests/s", "backend", "served", "good", "first token, p50", "p99")
    return f"{_table((*head, 'per token, p50', 'p99'), lines)}\n\n{_measured_on(rows)}"


def quality(budget: str, *files: str) -> str:
    """Return the mean over the tasks of ``sparsek eval``, a budget beside dense attention."""
    lines, machines = [], []
    for file in files:
        found = json.loads((RESULTS / file).read_text(encoding="utf-8"))
        compared = [run for run in found["runs"] if run["label"] in ("dense", budget)]
        machines += [run.get("machine", found["machine"]) for run in compared]
        means = [row for row in found["retrieval"] if row["task"] == "mean"]
        lengths = sorted({row["length"] for row in means})
        asked = (("plain", "last"), ("followed", "600 tokens behind it"))
        for length, (variant, where) in itertools.product(lengths, asked):
            cell = [r for r in means if (r["length"], r["variant"]) == (length, variant)]
            lines += [_answers(found["model"], r, where) for r in cell if r["label"] == budget]
    head = ("model, length, prompts", "question", "attended", "dense", "budget's", "of dense")
    last = ("worse, better", "added NLL", "KL")[: max(map(len, lines)) - len(head)]
    return f"{_table((*head, *last), lines)}\n\n{_measured_on(machines)}"


def _answers(model: str, budget: dict[str, Any], where: str) -> Iterable[str]:
    """Return a line; dense attention's accuracy is that of the prompts that the budget scored."""
    return (
        f"{model}, {_tokens(budget['length'])}, {budget['prompts']}",
        where,
        f"{budget['prefill_share']:.0%}, {budget['decode_share']:.0%}",
        f"{budget['accuracy'] - budget['delta_accuracy']:.3f}",
        f"{budget['accuracy']:.3f}",
        f"{budget['of_reference']:.1%}",
        f"{budget['lost']}, {budget['gained']}",
        f"{budget['delta_nll']:+.3f}",
        *([f"{budget['kl']:.4f}"] if "kl" in budget else []),
    )


def ruler(*files: str) -> str:
    """Return RULER by ``sparsek eval``: a line for each model, length and budget, by task group."""
    cells: dict[tuple[str, int], dict[str, dict[str, dict[str, Any]]]] = {}
    machines = []
    for file in files:
        found = json.loads((RESULTS / file).read_text(encoding="utf-8"))
        machines.append(found["machine"])
        for row in found["retrieval"]:
            cell = cells.setdefault((found["model"], row["length"]), {})
            cell.setdefault(row["label"], {})[row["task"]] = row
    lines = []
    for (model, length), cell in cells.items():
        dense = cell["dense"]
        least = next((of for label, of in cell.items() if label.startswith("sink_window")), None)
        for label, tasks in cell.items():
            mean = tasks["mean"]
            above = least and mean["accuracy"] - least["mean"]["accuracy"]
            lines.append(
                (
                    f"{model}, {_tokens(length)}, {mean['prompts']}",
                    f"`{label}`",
                    f"{mean['accuracy']:.1%}",
                    *(_group(tasks, names) for names in RULER.values()),
                    f"{mean['of_reference']:.1%}" if "of_reference" in mean else "",
                    _lowest(tasks, dense) if tasks is not dense else "",
                    f"{100 * above:+.1f}" if above is not None and tasks is not least else "",
                    f"{mean['kl']:.4f}" if "kl" in mean else "",
                )
            )
    head = ("model, length, prompts", "budget", "all", *RULER, "of dense", "lowest task")
    return f"{_table((*head, 'above the window', 'KL'), lines)}\n\n{_measured_on(machines)}"


def _group(tasks: dict[str, dict[str, Any]], names: tuple[str, ...]) -> str:
    """Return the mean accuracy over the tasks whose names begin so."""
    return f"{fmean(row['accuracy'] for task, row in tasks.items() if task.startswith(names)):.1%}"


def _lowest(tasks: dict[str, dict[str, Any]], dense: dict[str, dict[str, Any]]) -> str:
    """Return the task that keeps least of dense attention's, of those where this has a fifth."""
    kept = [
        (tasks[task]["accuracy"] / row["accuracy"], task)
        for task, row in dense.items()
        if task != "mean" and row["accuracy"] > 0.2
    ]
    return "{1} {0:.0%}".format(*min(kept)) if kept else ""


def simulated(file: str, chosen: str, *variants: str) -> str:
    """Return a set of ``benchmarks/simulate``: all variants, or those named, with _ for a space."""
    from benchmarks.simulate.results import table

    found = json.loads((RESULTS / file).read_text(encoding="utf-8"))
    return table([found], chosen, [name.replace("_", " ") for name in variants])


def shares(*budgets: str) -> str:
    """Return what share of the context a decoded token attends, for budgets of ``sparsek eval``."""
    from sparsek_backend.eval.budgets import parse_budget

    lengths = [1024 * size for size in (4, 8, 16, 32, 64, 128)]
    rows = []
    for text in budgets:
        budget = parse_budget(text)
        policy = budget.policy().decode
        tokens = str(policy.budget_blocks * policy.sel_block_size)
        rows.append((f"`{text}`", tokens, *(f"{budget.decode_share(n):.0%}" for n in lengths)))
    return _table(("budget", "tokens", *map(_tokens, lengths)), rows)


def by_records(file: str) -> str:
    """Return the times of ``benchmarks/decode_by_records.py``: a line for each case."""
    rows = _rows(file)
    names = dict.fromkeys(row["provider"] for row in rows)
    records = [name for name in names if name.startswith("records ")]
    records.sort(key=lambda name: int(name.split()[1]), reverse=True)
    choosing = [name for name in names if name.startswith("choosing ")][:1]  # all take as long
    lines = []
    for case in dict.fromkeys(row["case"] for row in rows):
        times = {r["provider"]: float(r["us"]) / 1e3 for r in rows if r["case"] == case}
        theirs = times.get("fa3")
        cells = [case, _duration(theirs)]
        for name in records:
            ours, ratio = times.get(name), _ratio(theirs, times.get(name), False)
            cells.append(f"{_duration(ours)} ({ratio})" if ratio else _duration(ours))
        cells += [_duration(times.get(name)) for name in choosing]
        lines.append(cells)
    head = ("case", PROVIDERS["fa3"], *records, *("choosing alone" for _ in choosing))
    return f"{_table(head, lines)}\n\n{_measured_on(rows)}"


def tested() -> str:
    """Return what the GPU tests ran on, a line for each stack."""
    file = ROOT / "sparsek_backend" / "tested_together.csv"
    rows = csv.DictReader(file.read_text(encoding="utf-8").splitlines())
    head = ("GPU", "driver", "torch", "Triton", "vLLM", "Python", "date", "GPU tests passed")
    return _table(head, (row.values() for row in rows))


TABLES: dict[str, Callable[..., str]] = {
    function.__name__: function
    for function in (
        settings,
        api,
        kernels,
        served,
        layer,
        load,
        quality,
        ruler,
        simulated,
        shares,
        by_records,
        tested,
    )
}


def _rows(file: str) -> list[dict[str, str]]:
    with (RESULTS / file).open(newline="", encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


def _table(head: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _measured_on(rows: Sequence[dict[str, Any]]) -> str:
    """Return what the rows were measured on, in one sentence."""
    values = {
        name: ", ".join(dict.fromkeys(str(row[name]) for row in rows if row.get(name)))
        for name in ("gpu", "torch", "triton", "vllm", "commit")
    }
    gpu, commit = values.pop("gpu"), values.pop("commit")
    versions = [f"{name} {value}" for name, value in values.items() if value]
    parts = (gpu, ", ".join(versions), f"commit {commit or 'not named'}")
    return f"{'; '.join(part for part in parts if part)}."


def _milliseconds(row: dict[str, str] | None) -> float | None:
    return float(row["ms"]) if row is not None and row["status"] == "ok" and row["ms"] else None


def _duration(milliseconds: float | None) -> str:
    """Return a time in three digits."""
    if milliseconds is None:
        return ""
    for factor, unit in ((1e-3, "s"), (1, "ms"), (1e3, "us")):
        if milliseconds * factor >= 1 or unit == "us":
            break
    value = milliseconds * factor
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"


def _ratio(theirs: float | None, ours: float | None, with_time: bool = True) -> str:
    """Return how many times as long a peer takes."""
    if theirs is None or ours is None:
        return ""
    ratio = theirs / ours
    shown = f"{ratio:.1f}x" if ratio >= 1 else f"{ratio:.2f}x"
    return f"{_duration(theirs)} ({shown})" if with_time else shown


def _tokens(count: int) -> str:
    for unit in (1024, 1000):
        if count % unit == 0:
            return f"{count // unit}k"
    return str(count)


def main() -> None:
    """Write the tables into their pages."""
    sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]
    for page in pages():
        text = page.read_text(encoding="utf-8")
        filled = fill(text)
        if filled != text:
            page.write_text(filled, encoding="utf-8")
            print(f"wrote {page.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
