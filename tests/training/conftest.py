"""Rank processes for tests, started by the first test that needs them and ended with this folder's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.training.rank_pool import RankPool


@pytest.fixture(scope="package")
def pool() -> Iterator[RankPool]:
    ranks = RankPool()
    yield ranks
    ranks.close()
