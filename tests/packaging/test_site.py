"""The documentation site, as far as it shows without a build: tables, pages, notebooks."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml

from sparsek_backend.config import resolve_config

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
TABLES = runpy.run_path(str(ROOT / "deploy" / "site" / "tables.py"))
PAGES = TABLES["pages"]()
LINK = re.compile(r"\]\(([^)\s#]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_tables_are_of_the_committed_results_and_settings(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert TABLES["fill"](text) == text, "stale: run python deploy/site/tables.py"
    assert text.count("<!-- table: ") == text.count("<!-- end of table -->")


def test_a_table_is_made_where_none_was() -> None:
    empty = "<!-- table: api sparsek_kernels write_kv -->\n<!-- end of table -->\n"
    made = TABLES["fill"](empty + "between\n" + empty)
    assert made.count("\n\n::: sparsek_kernels.write_kv\n\n") == 2
    assert "between" in made
    assert TABLES["fill"](made) == made


def test_ruler_by_task_group_and_its_distance_to_sinks_and_window(tmp_path: Path) -> None:
    def rows(label: str, length: int, **accuracy: float) -> list[dict[str, Any]]:
        mean = {"task": "mean", "accuracy": sum(accuracy.values()) / len(accuracy)}
        if label != "dense":
            mean |= {"of_reference": 0.75, "kl": 0.0123}
        tasks = [{"task": task, "accuracy": value} for task, value in accuracy.items()]
        return [{"label": label, "length": length, "prompts": 9, **x} for x in (mean, *tasks)]

    def result(model: str, *cells: list[dict[str, Any]]) -> str:
        file = tmp_path / f"{len(list(tmp_path.iterdir()))}.json"
        found = [row for cell in cells for row in cell]
        content = {"model": model, "machine": {"gpu": "G", "commit": "c"}, "retrieval": found}
        file.write_text(json.dumps(content))
        return str(file)

    dense = rows("dense", 8192, niah_single_1=1.0, niah_multikey_1=0.5, vt=0.1, cwe=0.5, qa_1=0.4)
    sparse = rows("top", 8192, niah_single_1=1.0, niah_multikey_1=0.4, vt=0.0, cwe=0.1, qa_1=0.5)
    window = rows("sink_window:8", 8192, niah_single_1=0, niah_multikey_1=0, vt=0, cwe=0, qa_1=0.5)
    only = [rows(label, 131072, vt=0.5, cwe=0.1, niah_x=0, qa_1=0) for label in ("dense", "top")]
    first, second = result("m", dense, window), result("n", *only)
    made = TABLES["ruler"](first, second, result("m", sparse))
    lines = [line.strip("| ").split(" | ") for line in made.splitlines() if "`" in line]
    groups = [(x[0], x[1], *x[3:7]) for x in lines]
    assert groups == [
        ("m, 8k, 9", "`dense`", "75.0%", "10.0%", "50.0%", "40.0%"),
        ("m, 8k, 9", "`sink_window:8`", "0.0%", "0.0%", "0.0%", "50.0%"),
        ("m, 8k, 9", "`top`", "70.0%", "0.0%", "10.0%", "50.0%"),
        ("n, 128k, 9", "`dense`", "0.0%", "50.0%", "10.0%", "0.0%"),
        ("n, 128k, 9", "`top`", "0.0%", "50.0%", "10.0%", "0.0%"),
    ]
    assert "| `dense` | 50.0% | 75.0% | 10.0% | 50.0% | 40.0% |  |  | +40.0 |  |" in made
    # vt, where dense attention has less than a fifth, is not counted
    assert "50.0% | 75.0% | cwe 20% | +30.0 | 0.0123 |" in made
    assert made.splitlines()[-2:] == ["", "G; commit c."]


def test_every_page_is_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    site = yaml.safe_load(text.replace("!ENV ", ""))  # a tag of mkdocs: a variable, or a default
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    notebooks = {f"notebooks/{notebook.stem}.md" for notebook in NOTEBOOKS}
    listed = [page for page in _leaves(site["nav"])]
    assert sorted(listed) == sorted(pages | notebooks)
    assert site["strict"]


def test_the_reference_has_every_public_name() -> None:
    pages = "\n".join(page.read_text(encoding="utf-8") for page in (DOCS / "api").glob("*.md"))
    listed = re.findall(r"^::: (\S+)$", pages, re.M)
    assert len(set(listed)) == len(listed)
    names = {name.rpartition(".")[2] for name in listed}
    for base in (ROOT, ROOT / "kernels"):
        for file in base.glob("sparsek_*/**/__init__.py"):
            if "__all__" in (source := file.read_text(encoding="utf-8")):
                module = ".".join(file.parent.relative_to(base).parts)
                missing = set(TABLES["public_names"](module)) - names
                assert not missing, f"{module}: {missing}, {source[:80]}"


def test_the_example_calls_every_public_function_of_the_kernels() -> None:
    page = (DOCS / "api" / "kernels.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    for name in TABLES["public_names"]("sparsek_kernels"):
        assert f"sk.{name}(" in code
    found: dict[str, Any] = {}
    exec(compile(code, "docs/api/kernels.md", "exec"), found)
    assert found["out"].shape == (1, 8, 64)
    assert found["selected"].shape == found["compressed"].shape == (1, 512, 8, 64)


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "examples" / "README.md"], ids=lambda page: str(page.relative_to(ROOT))
)
def test_links_lead_to_files(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for link in LINK.findall(text):
        if "://" not in link and not link.startswith("notebooks/"):
            assert (page.parent / link).exists(), link


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_hold_small_results_of_code_that_ran(path: Path) -> None:
    book: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    assert path.stat().st_size < 40_000
    counts = []
    for cell in book["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code":
            compile(source, f"{path.name}", "exec")
            counts.append(cell["execution_count"])
            kinds = {output.get("name", output["output_type"]) for output in cell["outputs"]}
            assert kinds <= {"stdout"}, f"{kinds}: run bash deploy/notebooks.sh --write"
        else:
            for link in LINK.findall(source):
                assert (path.parent / link).exists(), link
    assert counts == list(range(1, len(counts) + 1))
    assert f"(notebooks/{path.name})" in (ROOT / "examples" / "README.md").read_text()


def test_the_notebook_of_a_server_tells_what_its_settings_mean_today() -> None:
    path = ROOT / "examples" / "notebooks" / "serve.ipynb"
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    printed = ["".join(found["text"]) for cell in cells for found in cell.get("outputs", ())]
    config = resolve_config(json.loads(printed[0])["sparsek"], {}).config
    assert f"{config.top_k} blocks of {config.sel_block_size} per KV head" in printed[1]
    assert f"decoded tokens choose {config.decode_tokens} by records" in printed[1]
    told = "".join(line for cell in cells for line in cell["source"])
    assert f"a decoded token chooses {config.decode_tokens} tokens in pairs" in told


def _leaves(nav: Any) -> list[str]:
    """Return the pages of a navigation, in order."""
    if isinstance(nav, str):
        return [nav]
    return [page for entry in nav for value in entry.values() for page in _leaves(value)]
