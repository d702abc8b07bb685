"""What the tests of this folder rest on: ranks that hang are told of, and replaced."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed import cases, group, training_cases
from tests.distributed.group import Ranks
from tests.processes import wait_until


def test_a_rank_that_hangs_says_where_and_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Ranks(2)
    try:
        before = list(pair.processes)
        pair.run(2, training_cases.summed_gradients, "float32")  # all are there
        with monkeypatch.context() as patch:
            patch.setattr(group, "SECONDS", 0.0)
            with pytest.raises(TimeoutError, match="the rank hangs"):
                pair.outcomes(2, cases.hang, str(tmp_path / "flag"))
        wait_until((tmp_path / "flag").exists)
        wait_until(lambda: "in hang" in pair._stacks())
        assert [len(x) for x in pair.run(2, training_cases.summed_gradients, "float32")] == [3, 3]
        assert not any(process.is_alive() for process in before)
    finally:
        pair.close()
