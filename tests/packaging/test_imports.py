"""What importing costs, what shadows what, and which package may import which."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import processes

ROOT = Path(__file__).parents[2]
LINT_IMPORTS = "from importlinter.cli import lint_imports_command as main; main(['--no-cache'])"


def python(code: str, *path: Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run code in a new interpreter with ``path`` in front."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(str(part) for part in path)}
    return processes.run(sys.executable, "-c", code, cwd=cwd, env=environment)


def module_file(name: str) -> Path | None:
    """The file of a module of the repository."""
    for root in (ROOT, ROOT / "kernels"):
        path = root / name.replace(".", "/")
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file
    return None


def names_of(file: Path) -> set[str]:
    """What a module defines outside of functions and classes, imports and ``__all__`` included."""
    names, left = set(), list(ast.parse(file.read_text(encoding="utf-8")).body)
    while left:
        node = left.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
        else:
            inner = list(ast.walk(node))
            names |= {x.id for x in inner if isinstance(x, ast.Name)}
            names |= {x.value for x in inner if isinstance(x, ast.Constant)}
            left += [x for x in ast.iter_child_nodes(node) if isinstance(x, ast.stmt)]
    return names


def test_what_tests_and_scripts_import_of_the_project_exists() -> None:
    """Also inside of functions, which GPU tests and long benchmarks alone run."""
    missing = []
    for file in sorted(f for part in ("tests", "benchmarks", "examples", "deploy")
                       for f in (ROOT / part).rglob("*.py")):  # fmt: skip
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom) or node.level or node.module is None:
                continue
            if node.module.split(".")[0] not in ("sparsek_backend", "sparsek_kernels", "tests"):
                continue
            source = module_file(node.module)
            known = names_of(source) if source else set()
            missing += [
                f"{file.relative_to(ROOT)}:{node.lineno}: {node.module}.{alias.name}"
                for alias in node.names
                if alias.name not in known and not module_file(f"{node.module}.{alias.name}")
            ]
    assert not missing, "\n".join(missing)


@pytest.mark.parametrize(
    "module", ["sparsek_backend", "sparsek_backend.plugin", "sparsek_backend.cli"]
)
def test_light_modules_import_neither_torch_nor_vllm(module: str) -> None:
    code = (
        f"import sys, {module}; "
        "print([n for n in ('torch', 'triton', 'vllm', 'transformers') if n in sys.modules])"
    )
    result = python(code, ROOT, ROOT / "kernels")
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"


def test_settings_of_natively_sparse_models_need_no_context_parallelism() -> None:
    code = (
        "import sys, sparsek_backend.config, sparsek_backend.nn as nn\n"
        "print(sorted(n for n in sys.modules if n.startswith('sparsek_backend.distributed')))\n"
        "assert all(getattr(nn, name).__name__ == name for name in nn.__all__)"
    )
    result = python(code, ROOT, ROOT / "kernels")
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"


def test_the_folder_kernels_holds_no_module() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert list((ROOT / "kernels").glob("*.py")) == []


def test_a_package_named_kernels_wins_over_our_folder(tmp_path: Path) -> None:
    package = tmp_path / "kernels"
    package.mkdir()
    (package / "__init__.py").write_text("origin = 'hub'\n")
    result = python("import kernels; print(kernels.origin)", ROOT, ROOT / "kernels", tmp_path)
    assert result.stdout.strip() == "hub", result.stderr


def test_transformers_does_not_take_our_folder_for_its_kernels_package() -> None:
    pytest.importorskip("transformers")
    code = (
        "import importlib.metadata as m\n"
        "from transformers.utils import is_kernels_available\n"
        "installed = any(d.name == 'kernels' for d in m.distributions())\n"
        "print(installed or not is_kernels_available())\n"
    )
    result = python(code, ROOT, ROOT / "kernels")
    assert result.stdout.strip() == "True", result.stderr


def test_the_import_contracts_hold() -> None:
    pytest.importorskip("importlinter")
    result = python(LINT_IMPORTS, ROOT, ROOT / "kernels")
    assert result.returncode == 0, result.stdout
    assert "10 kept, 0 broken" in result.stdout


@pytest.mark.parametrize(
    ("module", "line", "found"),
    [
        ("kernels/sparsek_kernels/checks.py", "import vllm", "sparsek_kernels.checks -> vllm"),
        (
            "kernels/sparsek_kernels/common/precision.py",
            "import sparsek_kernels.paged.policy",
            "sparsek_kernels.common is not allowed to import sparsek_kernels.paged",
        ),
        (
            "sparsek_backend/nn/rotary.py",
            "import sparsek_backend.config",
            "sparsek_backend.nn is not allowed to import sparsek_backend.config",
        ),
        ("sparsek_backend/new.py", "", "- sparsek_backend.new"),
        (
            "sparsek_backend/patterns/plot.py",
            "if 0: import sparsek_backend.patterns.pattern",
            "No cycles are allowed in sparsek_backend.patterns",
        ),
    ],
    ids=["framework", "kernels", "backend", "unplaced", "circle"],
)
def test_the_import_contracts_would_catch(
    module: str, line: str, found: str, tmp_path: Path
) -> None:
    pytest.importorskip("importlinter")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for folder in ("sparsek_backend", "kernels"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    with (tmp_path / module).open("a", encoding="utf-8") as file:
        file.write(f"\n{line}\n")
    result = python(LINT_IMPORTS, tmp_path, tmp_path / "kernels", cwd=tmp_path)
    assert result.returncode == 1, result.stdout
    assert found in " ".join(result.stdout.split())
