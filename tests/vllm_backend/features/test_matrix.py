"""The table of features: its page is current, and every row is proven by tests that exist."""

from __future__ import annotations

import pytest

from tests.vllm_backend.features.matrix import MATRIX, PAGE, REFUSED, ROOT, SERVED, proofs, render


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
