"""Rank processes for tests, started by the first test of a file that needs them and ended with the file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.plugins.ranks.pool import RankPool


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    ranks = RankPool()
    yield ranks
    ranks.close()
