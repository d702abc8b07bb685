"""The pages name commands, options and extras that exist, and the start page names all of them."""

from __future__ import annotations

import json
import re
from importlib import import_module
from pathlib import Path

import pytest
from typer import Typer
from typer.main import get_command

from sparsek_backend.cli import app
from sparsek_backend.config import SparsityConfig

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
START = (ROOT / "docs" / "start.md").read_text(encoding="utf-8")
BEHIND = {
    "eval": "sparsek_backend.eval.cli",
    "tune": "sparsek_backend.eval.tune",
    "bench": "sparsek_backend.bench.cli",
    "patterns": "sparsek_backend.patterns.tools.cli",
    "train-demo": "sparsek_backend.train_demo.cli",
}
"""The modules to which ``sparsek COMMAND`` hands its arguments."""

CODE = re.compile(r"`([^`\n]+)`|^(?: {4}|\$ )(.+)$|^(sparsek .+)$", re.M)


def options(command: object) -> set[str]:
    """The long options of a click command."""
    return {
        name
        for parameter in getattr(command, "params", [])
        for name in (*parameter.opts, *parameter.secondary_opts)
        if name.startswith("--")
    } | {"--help"}


@pytest.fixture(scope="module")
def known() -> dict[str, set[str]]:
    """Options by command: ``model fetch``, ``eval``, ``eval prompts``, ..."""
    found: dict[str, set[str]] = {}

    def add(name: str, tool: Typer) -> None:
        command = get_command(tool)
        found[name] = options(command)
        for sub, one in getattr(command, "commands", {}).items():
            found[f"{name} {sub}".strip()] = options(one)
            for leaf, inner in getattr(one, "commands", {}).items():
                found[f"{name} {sub} {leaf}".strip()] = options(inner)

    add("", app)
    for name, module in BEHIND.items():
        add(name, import_module(module).app)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_and_options_exist(page: Path, known: dict[str, set[str]]) -> None:
    text = re.sub(r"\\\n\s*", " ", page.read_text(encoding="utf-8"))
    for found in CODE.finditer(text):
        code = next(group for group in found.groups() if group).partition("#")[0]
        for line in re.findall(r"\bsparsek ((?:[a-z-]+)\b.*)", code):
            words = line.split()
            command = next(
                (name for n in (2, 1) if (name := " ".join(words[:n])) in known), words[0]
            )
            if command not in known and not line.startswith(tuple(BEHIND)):
                continue  # prose of the log, not a command
            for option in re.findall(r"(?<!\S)--[a-z][\w-]*", line):
                assert option in known[command], f"sparsek {command} has no {option}"


def test_the_start_page_names_every_command_and_extra() -> None:
    commands = set(getattr(get_command(app), "commands", {})) - {"model"} | {"model fetch"}
    assert set(re.findall(r"^\| `sparsek ([a-z -]+)` \|", START, re.M)) == commands
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extras = project.partition("[project.optional-dependencies]\n")[2].partition("\n[")[0]
    table = START.partition("| extra | adds |\n")[2].partition("\n\n")[0]
    cells = " ".join(row.split("|")[1] for row in table.splitlines())
    assert set(re.findall(r"`([\w-]+)`", cells)) == set(re.findall(r"^([\w-]+) = \[", extras, re.M))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_table_has_a_head(page: Path) -> None:
    lines = ["", *page.read_text(encoding="utf-8").splitlines(), ""]
    for above, line, below in zip(lines, lines[1:], lines[2:], strict=False):
        if line.startswith("|") and not above.startswith("|"):
            assert re.fullmatch(r"\|[\s:|-]+", below), f"no head: {line}"


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "examples" / "README.md"], ids=lambda page: str(page.relative_to(ROOT))
)
def test_scripts_and_settings_exist(page: Path) -> None:
    text = re.sub(r"\\\n\s*", " ", page.read_text(encoding="utf-8"))
    for script in re.findall(
        r"\b(?:bash|python|node) ((?:deploy|examples|benchmarks)/[\w./-]+)", text
    ):
        assert (ROOT / script).is_file(), script
    for section in re.findall(r'\{"sparsek": (\{.*?\})\}', text):
        assert set(json.loads(section)) <= set(SparsityConfig.model_fields), section


def test_every_picture_is_on_a_page() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    shown = set(re.findall(r"!\[[^\]]*\]\((?:.*/)?([^)/]+\.png)\)", text))
    kept = [*(ROOT / "docs").glob("*.png"), *(ROOT / "benchmarks" / "results").glob("*.png")]
    assert {path.name for path in kept} == shown


def test_every_result_file_is_listed() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    names = [
        name
        for code in re.findall(
            r"`([\w.{},]+\.[\w{},]+)`", page.partition("## Committed results")[2]
        )
        for name in spelled_out(code)
    ]
    kept = {path.name for path in (ROOT / "benchmarks" / "results").iterdir()}
    assert kept == set(names) - {name for name in names if name.endswith(".yaml")}


def spelled_out(name: str) -> list[str]:
    """The names that ``a_{b,c}.csv`` stands for."""
    before, brace, rest = name.partition("{")
    if not brace:
        return [name]
    choices, _, after = rest.partition("}")
    return [one for choice in choices.split(",") for one in spelled_out(before + choice + after)]
