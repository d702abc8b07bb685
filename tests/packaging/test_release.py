"""Workflows and citation: valid, and of this version."""

from __future__ import annotations

import os
import re
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml

import sparsek_backend
from tests import processes

ROOT = Path(__file__).parents[2]
VERSION = sparsek_backend.__version__
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


def test_ci_without_vllm_tests_on_the_triton_of_the_set_up(tmp_path: Path) -> None:
    pip = tmp_path / "pip"
    pip.write_text('#!/bin/sh\necho "$@"\n')
    pip.chmod(0o755)
    steps = yaml.safe_load((WORKFLOWS / "ci.yaml").read_text())["jobs"]["without-vllm"]["steps"]
    shell, _ = [one["run"] for one in steps if "pip install" in one.get("run", "")]
    environ = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    asked = processes.run("bash", "-ec", shell, cwd=ROOT, env=environ).stdout.split()
    found = re.search(r"^TRITON_VERSION=(.+)$", (ROOT / "deploy" / "lib.sh").read_text(), re.M)
    assert found is not None
    assert asked == ["install", "-e", ".[dev]", f"triton=={found[1]}"]


def step(job: str, name: str) -> str:
    """Return the shell of a step of the release workflow, by how its name begins."""
    steps = yaml.safe_load((WORKFLOWS / "release.yaml").read_text())["jobs"][job]["steps"]
    (found,) = [one["run"] for one in steps if one.get("name", "").startswith(name)]
    return str(found)


@pytest.mark.parametrize(("tag", "fits"), [(f"v{VERSION}", True), ("v9.9.9", False)])
def test_a_tag_must_be_the_version(tag: str, fits: bool) -> None:
    shell = step("distributions", "The tag is the version")
    result = processes.run(
        "bash", "-ec", shell, cwd=ROOT, env=os.environ | {"GITHUB_REF_NAME": tag}
    )
    assert (result.returncode == 0) is fits, result.stderr


def test_a_release_takes_every_artifact_but_the_records_of_image_builds() -> None:
    """docker/build-push-action uploads them in a form that download-artifact fails on."""
    jobs = yaml.safe_load((WORKFLOWS / "release.yaml").read_text())["jobs"].values()
    used = [one for job in jobs for one in job["steps"] if "uses" in one]
    uploaded = [one["with"]["name"] for one in used if "upload-artifact" in one["uses"]]
    taken = [one["with"] for one in used if "download-artifact" in one["uses"]]
    (pattern,) = [options.get("pattern", "*") for options in taken if "name" not in options]
    names = [*uploaded, "owner~name~1A2B3C.dockerbuild"]
    kept = [x for x in names if fnmatch(x, pattern.removeprefix("!")) != pattern.startswith("!")]
    assert kept == uploaded == ["distributions", "sbom"]


def test_a_release_has_notes_and_checksums(tmp_path: Path) -> None:
    gh = tmp_path / "bin" / "gh"
    gh.parent.mkdir()
    gh.write_text('#!/bin/sh\necho "$@" >gh.txt\n')
    gh.chmod(0o755)
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "one.whl").write_text("wheel")
    changes = f"""\
## [Unreleased]

- later

## [{VERSION}] - date

A [page](docs/a.md)
goes on.

### Added

- One
  thing.
- [B](https://b.c)

## [0.1.0]

- before
"""
    (tmp_path / "CHANGELOG.md").write_text(changes)
    github = {"REF_NAME": f"v{VERSION}", "SERVER_URL": "https://g.h", "REPOSITORY": "o/r"}
    environ = os.environ | {f"GITHUB_{name}": value for name, value in github.items()}
    environ["PATH"] = f"{gh.parent}:{os.environ['PATH']}"
    shell = step("release", "Notes are")
    result = processes.run("bash", "-ec", shell, cwd=tmp_path, env=environ)
    assert result.returncode == 0, result.stderr
    page = f"[page](https://g.h/o/r/blob/v{VERSION}/docs/a.md)"
    notes = f"A {page} goes on.\n\n### Added\n\n- One thing.\n- [B](https://b.c)"
    assert (tmp_path / "notes.md").read_text().strip() == notes
    assert (tmp_path / "files" / "SHA256SUMS").read_text().split()[1:] == ["one.whl"]
    asked = f"release create v{VERSION} --notes-file notes.md files/SHA256SUMS files/one.whl"
    assert (tmp_path / "gh.txt").read_text().strip() == asked


def test_manifests_name_images_of_this_version() -> None:
    manifests = (ROOT / "deploy" / "kubernetes").rglob("*.yaml")
    text = "".join(path.read_text() for path in manifests)
    tags = re.findall(r"ghcr\.io/sparsek/sparsek[\w-]*:(\S+)|(?:newTag|tag): (\S+)", text)
    assert len(tags) >= 6
    assert {one or other for one, other in tags} == {VERSION}


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == VERSION
    assert f"## [{citation['version']}] - {citation['date-released']}" in _changelog()


def test_the_changelog_is_in_order() -> None:
    heads = re.findall(r"^## \[(.+?)\]", _changelog(), re.M)
    assert len(set(heads)) == len(heads)
    assert heads[heads[0] == "Unreleased"] == VERSION


def _changelog() -> str:
    return (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
