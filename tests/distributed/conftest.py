"""The ranks that the tests of a file share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.group import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Four processes; their first one or two are meshes too."""
    group = Ranks(4)
    yield group
    group.close()
