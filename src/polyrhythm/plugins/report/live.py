"""A run's page data that follows the run's files, with the increments between its states.

Consumes the files of the folder, which the run appends to or replaces. It is read when a page asks, at most once at a
time, only if a file has changed, and no sooner than `_REST` times the last reading took; a section that takes long,
or changes much, as the timeline does, rests by itself. So a viewer costs a tenth of a core or little more. A file that
is being written, or a folder that was moved away, leaves the state as it is and gives the reason.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from polyrhythm.errors import PolyrhythmError
from polyrhythm.files import trouble
from polyrhythm.observe.run_folder import GALLERY_FOLDER, find_run
from polyrhythm.plugins.report.data import page_data
from polyrhythm.plugins.report.increments import changes
from polyrhythm.plugins.report.parts import Part
from polyrhythm.plugins.report.read import ReportSection, read_run

log = logging.getLogger(__name__)

#: Pause between two readings, as a multiple of the time that the last one took; bytes of a section's change each second
#: of its pause; maximum of both in seconds: a machine that was busy for a moment is no large run.
_REST, _RATE, _LONGEST_REST = 10.0, 20_000, 20.0
#: Increments that are kept for pages that ask late; those that ask later get everything.
_KEPT = 32


def _rest(took: float, size: int = 0) -> float:
    return min(max(_REST * took, size / _RATE), _LONGEST_REST)


class _Drawn(NamedTuple):
    """Parts of a section, and the time until which they are not drawn again."""

    parts: list[Part]
    rest_until: float


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
        self._drawn: dict[str, _Drawn] = {}
        self.trouble = ""
        self.data: Mapping[str, Any] = {}
        self._read()
        self._rest_until = 0.0  # the first reading imports much

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
        complete, began = False, self._now()
        try:
            complete = self._read()
        except PolyrhythmError as error:
            self.trouble = str(error)
        except OSError as error:
            self.trouble = trouble(error) or str(error)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            log.debug("the run cannot be read now", exc_info=True)
            self.trouble = f"{self.folder} cannot be read ({type(error).__name__}: {error})"
        else:
            self.trouble = ""
        if self.trouble:  # a reading that fails takes its time too
            self._rest_until = self._now() + _rest(self._now() - began)
        # Of before the reading: what was written meanwhile is read the next time.
        self._seen = seen if complete or self.trouble else None

    def _read(self) -> bool:
        """Read the run; return whether every section was drawn."""
        began = self._now()
        run = read_run(self.folder)
        took = self._now() - began
        resting: list[str] = []

        def draw(section: ReportSection) -> Sequence[Part]:
            held, now = self._drawn.get(section.id), self._now()
            if held is not None and now < held.rest_until:
                resting.append(section.id)
                return held.parts
            parts, ended = list(section.draw([run])), self._now()
            # The first time includes imports, and the reading of what was there already.
            rest = _rest(ended - now, len(json.dumps(changes(held.parts, parts)))) if held is not None else 0.0
            self._drawn[section.id] = _Drawn(parts, ended + rest)
            return parts

        data = page_data([run], draw)
        self._rest_until = self._now() + _rest(took)
        found = changes(self.data, data) if self._number else []
        if found or not self._number:
            self._number += 1
            self.data = data
            self._increments += [(self._number, found)] if found else []
        return not resting

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
