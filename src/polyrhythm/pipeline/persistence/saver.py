"""Saves the whole run periodically while it continues, and counts totals over all its parts."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from polyrhythm.config.sections.running import CheckpointSettings
from polyrhythm.files import trouble
from polyrhythm.pipeline.build import Pipeline
from polyrhythm.pipeline.observers.base import Observer
from polyrhythm.pipeline.observers.metrics import LagHistogram
from polyrhythm.pipeline.observers.totals import HostTotals, RunTotals
from polyrhythm.pipeline.persistence.checkpoints import SavedRun
from polyrhythm.pipeline.persistence.snapshot import RunSnapshot, take_snapshot, write_snapshot
from polyrhythm.scheduler import records
from polyrhythm.training.checkpoint import BackgroundSaving

log = logging.getLogger(__name__)


class RunCheckpointer(Observer):
    """Saves the run every `settings.run_every_s` seconds; saves do not overlap.

    A save waits for the moment when the trainer's saved state and the conductor have the same number of updates.
    totals: of all parts of the run. deadline_s: after it an unfinished save is logged and no longer waited for. write:
    writes a snapshot, keeps the given number of saved runs, and returns the path.
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
        # A resumed run has not started yet: its stations begin to count at zero.
        self._at_start = {} if saved else pipeline.launcher.hosting.statistics(fresh=True)
        self._hosts = HostTotals(pipeline.hosts, now, self._at_start, self._before.get("hosts"))

    def start(self, now: float) -> None:
        """Begin to count the time of a resumed run, once its stations are ready."""
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
        if writing is not None and not writing.late and time.monotonic() - writing.began > self._deadline_s:
            writing.late = True
            said = "%s is still being written after %g s; the run goes on, but is not saved again until that ends"
            log.warning(said, writing.part, self._deadline_s)

    def finish(self, now: float) -> None:  # noqa: ARG002
        self.wait()

    def save(self, level: int = logging.INFO) -> None:
        """Save the run now and wait until that is done; success is logged at `level`.

        A failure is logged; the previous saved run stays and the run continues.
        """
        self.wait()
        if self._under_way() is None:
            self._begin(self._pipeline.launcher.hosting.statistics(fresh=True), level)
            self.wait()

    def wait(self) -> None:
        """Wait until no save is being written; after the deadline give up with a log message."""
        writing = self._writing
        if writing is None or writing.given_up:
            return
        writing.given_up = True  # an interrupted wait is not repeated
        writing.saving.join(self._deadline_s)
        if self._under_way() is not None:
            said = "%s is not written after %g s and is given up; the saved run before it stays"
            log.error(said, writing.part, time.monotonic() - writing.began)

    def _under_way(self) -> _Writing | None:
        """The current save; None once it is done. Raises an unexpected exception of its thread."""
        writing = self._writing
        if writing is not None and writing.saving.over:
            self._writing = None
            writing.saving.wait()
        return self._writing

    def _begin(self, statistics: Mapping[str, Mapping[str, float]], level: int) -> None:
        pipeline = self._pipeline
        states, launcher, counts = pipeline.states, pipeline.launcher, self._counts(statistics)
        assert states is not None
        try:
            snapshot = take_snapshot(
                self._folder, pipeline.loop.conductor, launcher.payloads, pipeline.weights, states, counts
            )
        except OSError as error:
            _warn_not_saved(self._folder, error)
            return

        def write() -> None:
            try:
                log.log(level, "saved the run: %s", self._write(snapshot, states.keep))
            except OSError as error:
                _warn_not_saved(snapshot.part.parent, error)

        self._writing = _Writing(BackgroundSaving(write), snapshot.part, time.monotonic())

    def _counts(self, statistics: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
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
        """transitions_per_s (of finished samples), utilisation by station, faults, the stations' own counters, and
        hosts if there are several."""
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


@dataclass(slots=True)
class _Writing:
    """A snapshot that is being written to the folder `part`. late: a warning was logged; given_up: not waited for
    again."""

    saving: BackgroundSaving
    part: Path
    began: float
    late: bool = False
    given_up: bool = False


def _warn_not_saved(folder: Path, error: OSError) -> None:
    """Only a warning: the previous saved run is whole, and another attempt follows."""
    log.warning("the run cannot be saved in %s: %s", folder, trouble(error) or error.strerror or error)
