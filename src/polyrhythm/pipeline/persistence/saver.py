"""Saves the whole run periodically while it continues, and counts totals over all its parts."""

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
from polyrhythm.pipeline.observers.metrics import LagHistogram
from polyrhythm.pipeline.observers.totals import HostTotals, RunTotals
from polyrhythm.pipeline.persistence.checkpoints import SavedRun
from polyrhythm.pipeline.persistence.snapshot import RunSnapshot, take_snapshot, write_snapshot
from polyrhythm.scheduler import records

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
        if writing is not None and not writing.late and writing.lasted_s > self._deadline_s:
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
        writing.wait(self._deadline_s)
        if self._under_way() is not None:
            said = "%s is not written after %g s and is given up; the saved run before it stays"
            log.error(said, writing.part, writing.lasted_s)

    def _under_way(self) -> _Writing | None:
        """The current save; None once it is done. Raises an unexpected exception of its thread."""
        writing = self._writing
        if writing is not None and writing.over:
            self._writing = None
            writing.raise_bug()
        return self._writing

    def _begin(self, statistics: Mapping[str, Mapping[str, float]], level: int) -> None:
        pipeline = self._pipeline
        states, launcher, counts = pipeline.states, pipeline.launcher, self._counts(statistics)
        assert states is not None
        try:
            snapshot = take_snapshot(
                self._folder, pipeline.loop.conductor, launcher.payloads, pipeline.launcher.weights, states, counts
            )
        except OSError as error:
            _warn_not_saved(self._folder, error)
        else:
            self._writing = _Writing(lambda: self._write(snapshot, states.keep), snapshot.part, level)

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


class _Writing:
    """A thread that writes one snapshot to the folder `part`.

    late: a warning was logged; given_up: not waited for again. Its end is signalled by an event: an interrupted
    `Thread.join` may mark a running thread as ended (CPython 3.11).
    """

    def __init__(self, write: Callable[[], Path], part: Path, level: int) -> None:
        self.part, self.late, self.given_up = part, False, False
        self._write, self._level = write, level
        self._bug: Exception | None = None
        self._over = threading.Event()
        self._began = time.monotonic()
        # A daemon, so that a hanging file system does not keep the process alive.
        threading.Thread(target=self._run, name="run-checkpointer", daemon=True).start()

    def _run(self) -> None:
        """Consumes: the snapshot. Waits for: the disk. Unblocked by: completion or an error. Produces: a saved run, or
        a warning."""
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
        return time.monotonic() - self._began

    def wait(self, seconds: float) -> None:
        self._over.wait(seconds)

    @property
    def over(self) -> bool:
        return self._over.is_set()

    def raise_bug(self) -> None:
        if self._bug is not None:
            raise self._bug


def _warn_not_saved(folder: Path, error: OSError) -> None:
    """Only a warning: the previous saved run is whole, and another attempt follows."""
    log.warning("the run cannot be saved in %s: %s", folder, trouble(error) or error.strerror or error)
