"""Workflows and citation: valid, and of this version."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import yaml

import sparsek_backend
from tests import processes

ROOT = Path(__file__).parents[2]
WORKFLOWS = ROOT / ".github" / "workflows"


@pytest.mark.parametrize(
    ("schema", "files"),
    [
        ("vendor.github-workflows", sorted(WORKFLOWS.glob("*.yaml"))),
        ("vendor.citation-file-format", [ROOT / "CITATION.cff"]),
    ],
)
def test_files_keep_to_their_schemas(schema: str, files: list[Path]) -> None:
    program = Path(sys.executable).parent / "check-jsonschema"
    result = processes.run(program, "--builtin-schema", schema, *files)
    assert result.returncode == 0, result.stdout


def test_the_workflows_shell_passes_the_linter(tmp_path: Path) -> None:
    scripts = []
    for path in WORKFLOWS.glob("*.yaml"):
        for name, job in yaml.safe_load(path.read_text())["jobs"].items():
            for number, step in enumerate(job["steps"]):
                if "run" in step:
                    script = tmp_path / f"{path.stem}-{name}-{number}.sh"
                    script.write_text(re.sub(r"\$\{\{.+?\}\}", "value", step["run"]))
                    scripts.append(str(script))
    assert len(scripts) > 8
    shellcheck = Path(sys.executable).parent / "shellcheck"
    result = processes.run(shellcheck, "-s", "bash", *scripts)
    assert result.returncode == 0, result.stdout


def test_workflows_run_scripts_that_exist() -> None:
    text = "".join(path.read_text() for path in WORKFLOWS.glob("*.yaml"))
    scripts = set(re.findall(r"bash (\S+\.sh)", text))
    assert {"deploy/test.sh", "deploy/docker/test.sh", "deploy/sbom.sh"} <= scripts
    assert all((ROOT / script).is_file() for script in scripts)
    release = yaml.safe_load((WORKFLOWS / "release.yaml").read_text())
    images = release["jobs"]["images"]["strategy"]["matrix"]["include"]
    for image in images:
        dockerfile = (ROOT / "deploy" / "docker" / image["dockerfile"]).read_text()
        assert re.search(rf"^ARG {image['argument']}=", dockerfile, re.M)


def test_manifests_name_images_of_this_version() -> None:
    manifests = (ROOT / "deploy" / "kubernetes").rglob("*.yaml")
    text = "".join(path.read_text() for path in manifests)
    tags = re.findall(r"ghcr\.io/sparsek/sparsek[\w-]*:(\S+)|(?:newTag|tag): (\S+)", text)
    assert len(tags) >= 6
    assert {one or other for one, other in tags} == {sparsek_backend.__version__}


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == sparsek_backend.__version__
    assert f"## [{citation['version']}] - {citation['date-released']}" in _changelog()


def test_the_changelog_is_in_order() -> None:
    heads = re.findall(r"^## \[(.+?)\]", _changelog(), re.M)
    assert len(set(heads)) == len(heads)
    assert heads[heads[0] == "Unreleased"] == sparsek_backend.__version__


def _changelog() -> str:
    return (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
