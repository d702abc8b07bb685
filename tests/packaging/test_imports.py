"""What importing costs, what shadows what, and which package may import which."""

from __future__ import annotations

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
