"""A run's page data that follows the run's files, with the increments between its states.

Consumes the files of the folder, which the run appends to or replaces. It is read when a page asks, at most once at a
time, only if a file has changed, and no sooner than `_REST` times the last reading took: a large run costs a viewer at
most a sixth of a core. A file that is being written, or a folder that was moved away, leaves the state as it is and
gives the reason.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from polyrhythm.errors import PolyrhythmError
from polyrhythm.files import trouble
from polyrhythm.observe.run_folder import find_run
from polyrhythm.plugins.report.data import page_data
from polyrhythm.plugins.report.gallery import GALLERY_FOLDER
from polyrhythm.plugins.report.increments import changes
from polyrhythm.plugins.report.read import read_run

log = logging.getLogger(__name__)

#: Pause between two readings, as a multiple of the time that the last one took.
_REST = 5.0
#: Increments that are kept for pages that ask late; those that ask later get everything.
_KEPT = 32


class LiveRun:
    """The run in `folder`. RunFolderError: it is not a run's, or cannot be read.

    now: clock in seconds.
    """

    def __init__(self, folder: Path, now: Callable[[], float] = time.monotonic) -> None:
        self.folder = find_run(folder)
        self._now = now
        self._lock = threading.Lock()
        # Of another process, so that a page which outlives this one is not given increments of other data.
        self._series = secrets.token_hex(4)
        self._number = 0
        self._increments: deque[tuple[int, list[dict[str, Any]]]] = deque(maxlen=_KEPT)
        self._seen: Any = None
        self._rest_until = 0.0
        self.trouble = ""
        self.data: Mapping[str, Any] = {}
        self._read()

    @property
    def state(self) -> str:
        """Name of the current state."""
        return f"{self._series}.{self._number}"

    def whole(self) -> tuple[str, Mapping[str, Any]]:
        """The state's name and data, after a look at the files."""
        with self._lock:
            self._refresh()
            return self.state, self.data

    def since(self, state: str) -> dict[str, Any]:
        """What changed since this state: {state, trouble, changes: […]}, or {state, trouble, data} if it is unknown."""
        with self._lock:
            self._refresh()
            told = {"state": self.state, "trouble": self.trouble}
            series, _, number = state.partition(".")
            after = int(number) if number.isdecimal() and len(number) < 12 else -1
            first = self._number - len(self._increments)
            if series != self._series or not first <= after <= self._number:
                return {**told, "data": self.data}
            found = [change for name, own in self._increments if name > after for change in own]
            return {**told, "changes": found}

    def _refresh(self) -> None:
        if self._now() < self._rest_until or (seen := self._stat()) == self._seen:
            return
        try:
            self._read()
        except PolyrhythmError as error:
            self.trouble = str(error)
        except OSError as error:
            self.trouble = trouble(error) or str(error)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            log.debug("the run cannot be read now", exc_info=True)
            self.trouble = f"{self.folder} cannot be read ({type(error).__name__}: {error})"
        else:
            self.trouble = ""
        self._seen = seen  # of before the reading: what was written meanwhile is read the next time

    def _read(self) -> None:
        began = self._now()
        try:
            data = page_data([read_run(self.folder)])
        finally:
            ended = self._now()
            self._rest_until = ended + _REST * (ended - began)
        if self._number:
            found = changes(self.data, data)
            if not found:
                return
            self._increments.append((self._number + 1, found))
        self._number += 1
        self.data = data

    def _stat(self) -> list[tuple[str, int, int, int]]:
        """Name, inode, size and time of each file that a page may read."""
        found = []
        for folder in (self.folder, self.folder / GALLERY_FOLDER):
            try:
                files = [(path.name, path.stat()) for path in folder.iterdir() if path.is_file()]
            except OSError:
                continue
            found += [(f"{folder.name}/{name}", own.st_ino, own.st_size, own.st_mtime_ns) for name, own in files]
        return sorted(found)
