"""Saves the whole run now and then while it goes on, and counts what it has done over all its parts."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from polyrhythm.config.sections.running import CheckpointSettings
from polyrhythm.files import trouble
from polyrhythm.pipeline.build import Pipeline
from polyrhythm.pipeline.observers.base import Observer
from polyrhythm.pipeline.observers.hosts import HostTotals
from polyrhythm.pipeline.observers.metrics import LagHistogram
from polyrhythm.pipeline.observers.totals import RunTotals
from polyrhythm.pipeline.persistence.checkpoints import SavedRun
from polyrhythm.pipeline.persistence.snapshot import RunSnapshot, take_snapshot, write_snapshot
from polyrhythm.scheduler import records

log = logging.getLogger(__name__)


class RunCheckpointer(Observer):
    """Saves the run every `settings.run_every_s` seconds: at the next moment at which the trainer's saved state is
    exactly as old as the conductor. No save begins while another is being written.

    totals: of all parts of the run. deadline_s: of a save that is not written after so long the log warns, and nobody
    waits for it any longer. write: writes a snapshot and keeps as many saved runs as it is told; returns its path.
    """

    hears: ClassVar[tuple[type, ...]] = (*RunTotals.hears, records.Checkpointed)
    tick_s: ClassVar[float] = 1.0

    def __init__(
        self,
        folder: Path,
        pipeline: Pipeline,
        settings: CheckpointSettings,
        lags: LagHistogram,
        saved: SavedRun | None,
        now: float,
        *,
        deadline_s: float = 900.0,
        write: Callable[[RunSnapshot, int], Path] = write_snapshot,
    ) -> None:
        self._folder, self._pipeline, self._settings, self._lags = folder, pipeline, settings, lags
        self._before: dict[str, Any] = saved.counts if saved else {"wall_s": 0.0, "busy_s": {}}
        self.totals = RunTotals(self._before.get("totals"), pipeline.hosts)
        self._began, self._next = now, now + settings.run_every_s
        self._deadline_s, self._write = deadline_s, write
        self._writing: _Writing | None = None
        # A saved run has not started yet: its stations begin to count at zero.
        self._at_start = {} if saved else pipeline.launcher.hosting.statistics(fresh=True)
        self._hosts = HostTotals(pipeline.hosts, now, self._at_start, self._before.get("hosts"))

    def start(self, now: float) -> None:
        """The stations of a saved run are ready: its time goes on from now, as a new one's does from its begin."""
        self._began = now
        self._hosts.start(now)

    def on_decision(self, now: float, event: records.Event, commands: Sequence[records.Command]) -> None:
        self.totals.on_decision(now, event, commands)
        if not isinstance(event, records.Checkpointed) or now < self._next:
            return
        if event.updates == self._pipeline.loop.conductor.versions.updates and self._under_way() is None:
            self._next = now + self._settings.run_every_s
            self._begin(self._pipeline.launcher.hosting.statistics(), logging.DEBUG)

    def on_tick(self, now: float) -> None:
        self._hosts.advance(now, self._pipeline.launcher.hosting.statistics())
        writing = self._under_way()
        if writing is not None and not writing.late and writing.lasted_s > self._deadline_s:
            writing.late = True
            said = "%s is still being written after %g s; the run goes on, but is not saved again until that ends"
            log.warning(said, writing.part, self._deadline_s)

    def save(self, level: int = logging.INFO) -> None:
        """Save the run as it is now, wait until that is written, and say so at this level.

        If that is impossible the log says so, the saved run before it stays, and the run goes on.
        """
        self.wait()
        if self._under_way() is None:
            self._begin(self._pipeline.launcher.hosting.statistics(fresh=True), level)
            self.wait()

    def wait(self) -> None:
        """Wait until nothing is being written; after the deadline the log says that it is given up."""
        writing = self._writing
        if writing is None or writing.given_up:
            return
        writing.given_up = True  # an interrupt ends the waiting for good
        writing.wait(self._deadline_s)
        if self._under_way() is not None:
            said = "%s is not written after %g s and is given up; the saved run before it stays"
            log.error(said, writing.part, writing.lasted_s)

    def _under_way(self) -> _Writing | None:
        """What is being written now."""
        writing = self._writing
        if writing is not None and writing.over:
            self._writing = None
            writing.raise_bug()
        return self._writing

    def _begin(self, statistics: Mapping[str, Mapping[str, float]], level: int) -> None:
        """Take a snapshot and let a thread write it."""
        pipeline = self._pipeline
        states, launcher, counts = pipeline.states, pipeline.launcher, self._counts(statistics)
        assert states is not None
        try:
            snapshot = take_snapshot(
                self._folder, pipeline.loop.conductor, launcher.payloads, pipeline.weights, states, counts
            )
        except OSError as error:
            _warn_not_saved(self._folder, error)
        else:
            self._writing = _Writing(lambda: self._write(snapshot, states.keep), snapshot.part, level)

    def _counts(self, statistics: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
        """Seconds, and busy seconds by station, of all parts of the run."""
        before = self._before
        busy: dict[str, float] = dict(before["busy_s"])
        for name, counts in statistics.items():
            earlier = self._at_start.get(name, {})
            busy[name] = busy.get(name, 0) + (counts.get("busy_s", 0.0) - earlier.get("busy_s", 0.0))
        self._hosts.advance(self._pipeline.loop.clock(), statistics)
        wall_s = before["wall_s"] + self._pipeline.loop.clock() - self._began
        return {
            "totals": self.totals.as_dict(),
            "lags": self._lags.summary()["counts"],
            "wall_s": wall_s,
            "busy_s": busy,
            "hosts": self._hosts.as_dict(),
            "data": self._pipeline.spec.data,
        }

    def summary(self) -> dict[str, Any]:
        """transitions_per_s (of finished samples), utilisation by station, faults, the stations' own counters; hosts,
        where there are several."""
        statistics = self._pipeline.launcher.hosting.statistics(fresh=True)
        counts = self._counts(statistics)
        wall_s = counts["wall_s"]
        hosts = self._hosts.summary(self.totals.faults_by_host())
        return {
            "transitions_per_s": self.totals.transitions / wall_s,
            "utilisation": {name: busy / wall_s for name, busy in counts["busy_s"].items()},
            "faults": self.totals.faults,
            "stations": statistics,
            **({"hosts": hosts} if hosts else {}),
        }


class _Writing:
    """A thread that writes one snapshot to the folder `part`. late: the log has said that it takes too long; given_up:
    main has waited for it, and does not wait again.

    An event says that it is over: an interrupted `Thread.join` may mark a thread that runs as ended (CPython 3.11).
    """

    def __init__(self, write: Callable[[], Path], part: Path, level: int) -> None:
        self.part, self.late, self.given_up = part, False, False
        self._write, self._level = write, level
        self._bug: Exception | None = None
        self._over = threading.Event()
        self._began = time.monotonic()
        # A daemon: a file system that never answers must not keep the process.
        threading.Thread(target=self._run, name="run-checkpointer", daemon=True).start()

    def _run(self) -> None:
        """Consumes: the snapshot. Waits for: the disk. Unblocked by: it. Produces: a saved run, or a warning."""
        try:
            log.log(self._level, "saved the run: %s", self._write())
        except OSError as error:
            _warn_not_saved(self.part.parent, error)
        except Exception as error:  # noqa: BLE001 - raised again by `raise_bug`
            self._bug = error
        finally:
            self._over.set()

    @property
    def lasted_s(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self._began

    def wait(self, seconds: float) -> None:
        """Wait until it is over, but no longer than so many seconds."""
        self._over.wait(seconds)

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return self._over.is_set()

    def raise_bug(self) -> None:
        """Raise what nobody expected in it, if anything."""
        if self._bug is not None:
            raise self._bug


def _warn_not_saved(folder: Path, error: OSError) -> None:
    """What it costs is time: the saved run before this one is whole, and another try comes."""
    log.warning("the run cannot be saved in %s: %s", folder, trouble(error) or error.strerror or error)
