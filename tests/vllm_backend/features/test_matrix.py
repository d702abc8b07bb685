"""The table of features: its page is current, and every row is proven by tests that exist."""

from __future__ import annotations

import re
import subprocess

import pytest

from tests.vllm_backend.features.matrix import MATRIX, PAGE, ROOT, proofs, render
from tests.vllm_backend.features.row import REFUSED, SERVED


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), (
        "docs/features.md is stale: run python -m tests.vllm_backend.features.matrix"
    )


def test_rows_are_complete() -> None:
    rows = [row for group in MATRIX.values() for row in group]
    assert len({row.feature for row in rows}) == len(rows)
    for row in rows:
        assert row.outcome in (SERVED, REFUSED)
        assert row.proofs, row.feature
        assert row.note or row.outcome == SERVED, f"{row.feature}: no remedy"


def test_the_supported_versions_stand_as_in_the_metadata() -> None:
    """In the documents, in this table and in the set-up."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(r'^vllm = \["(vllm>=0\.(\d+),<0\.(\d+))"\]$', project, re.MULTILINE)
    assert found is not None
    first, last = int(found[2]), int(found[3]) - 1
    for page in ("README.md", "docs/start.md"):
        assert f"vLLM 0.{first} to 0.{last}" in (ROOT / page).read_text(encoding="utf-8"), page
    features = {row.feature for group in MATRIX.values() for row in group}
    assert f"vLLM 0.{first}.0 to 0.{last}.0" in features
    command = ["bash", "-c", '. deploy/lib.sh && printf %s "$VLLM_GPU_RANGE"']
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert told.stdout == found[1]


class Collected:
    """A pytest plugin that keeps what was collected."""

    def __init__(self) -> None:
        self.tests: set[str] = set()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.tests = {item.nodeid for item in session.items}


def test_every_proof_is_a_test() -> None:
    """As pytest collects them, tests for a GPU included."""
    named, found = proofs(), Collected()
    files = sorted({proof.partition("::")[0] for proof in named})
    options = ["--collect-only", "--quiet", "--quiet", "-p", "no:cacheprovider"]
    arguments = [*options, "--rootdir", str(ROOT), *(str(ROOT / file) for file in files)]
    assert pytest.main(arguments, plugins=[found]) == pytest.ExitCode.OK
    collected = found.tests | {test.partition("[")[0] for test in found.tests}
    assert named <= collected, sorted(named - collected)
