"""Watches workflows that another function makes: who sends what to whom, and how long each worker works.

    with watching(seconds) as found:   # each workflow is added when it closes
        function()                     # TimeOver in the driver's next wait after so many seconds
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WatchedWorkflow:
    """devices: of each group's ranks; traffic, passed, statistics: as `Workflow` has them; statistics are by worker,
    `group-rank`."""

    devices: Mapping[str, tuple[str, ...]]
    traffic: Mapping[str, tuple[set[str], set[str]]]
    passed: set[tuple[str, str]]
    statistics: Mapping[str, Mapping[str, float]]


class TimeOver(BaseException):
    """Enough has been seen of a watched workflow."""


@dataclass(slots=True)
class Watch:
    until: float
    found: list[WatchedWorkflow]

    @property
    def left_s(self) -> float:
        return max(0.0, self.until - time.monotonic())


_watch: Watch | None = None


def current_watch() -> Watch | None:
    return _watch


@contextmanager
def watching(seconds: float) -> Iterator[list[WatchedWorkflow]]:
    """The workflows that are closed in the block. TimeOver: raised by the driver's waits after so many seconds."""
    global _watch  # noqa: PLW0603 - of this process, as the workflows are
    before, _watch = _watch, Watch(time.monotonic() + seconds, [])
    try:
        yield _watch.found
    finally:
        _watch = before
