"""The conductor decides as it did at the commit that recorded the traces (`python -m tests.held.record`)."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.held.traces import FOLDER, difference, read
from tests.long import LONG_TESTS

FILES = sorted(FOLDER.glob("*.jsonl.xz"))
#: Usually each fourth trace of a kind.
EACH = 1 if LONG_TESTS else 4


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name.partition(".")[0])
def test_the_same_events_at_the_same_times_give_the_same_commands(file: Path) -> None:
    """From the beginning, with a state that goes through JSON where one was saved."""
    traces = list(read(file))[::EACH]
    assert traces
    for trace in traces:
        middle = min(map(int, trace["saved"]), default=-1)
        assert not (found := difference(trace, save_before=middle)), found


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name.partition(".")[0])
def test_a_state_that_was_saved_then_goes_on_in_the_same_way(file: Path) -> None:
    for trace in list(read(file))[::EACH]:
        for begin in map(int, trace["saved"]):
            assert not (found := difference(trace, begin=begin)), found


def test_there_are_two_hundred_of_them() -> None:
    assert sum(1 for file in FILES for _ in read(file)) >= 200
