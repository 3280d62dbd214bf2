"""Marks tests that take long and rarely fail alone: they run where LONG_TESTS is set."""

from __future__ import annotations

import os

import pytest

#: Whether they run.
LONG_TESTS = bool(os.environ.get("LONG_TESTS"))


def tries(usual: int, long: int) -> int:
    """On how many random examples a property is tried: `long` ones where LONG_TESTS is set."""
    return long if LONG_TESTS else usual


def long(seconds: int, what: str) -> pytest.MarkDecorator:
    """Marks a test of about so many CPU seconds, with what it is about; `pytest -m long` selects these alone."""
    return pytest.mark.long(seconds, what)


def skip_long(items: list[pytest.Item]) -> None:
    """Skip them, with their reasons, unless LONG_TESTS is set: `pytest_collection_modifyitems` of a conftest.py."""
    for item in items:
        if not LONG_TESTS and (mark := item.get_closest_marker("long")) is not None:
            seconds, what = mark.args
            item.add_marker(pytest.mark.skip(reason=f"{what}: about {seconds} s of CPU; LONG_TESTS=1 runs it"))
