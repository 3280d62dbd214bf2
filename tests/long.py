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
    """Skips a test of about so many CPU seconds, with what it is about, unless LONG_TESTS is set."""
    reason = f"{what}: about {seconds} s of CPU; LONG_TESTS=1 runs it"
    return pytest.mark.skipif(not LONG_TESTS, reason=reason)
