"""Saves the whole run now and then, and counts what it has done over all its parts."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polyrhythm.config.running import CheckpointSettings
from polyrhythm.files import trouble
from polyrhythm.pipeline.build import Pipeline
from polyrhythm.pipeline.observers.metrics import LagHistogram
from polyrhythm.pipeline.observers.totals import RunTotals
from polyrhythm.pipeline.persistence.checkpoints import SavedRun, save_run
from polyrhythm.runtime.messages import Report
from polyrhythm.scheduler import records

log = logging.getLogger(__name__)

#: A run that has just begun is saved sooner: after so many seconds, then twice as many, up to `run_every_s`.
_FIRST_S = 5.0


class RunCheckpointer:
    """An observer. A trainer's state that is safe, and exactly as old as the conductor, is the moment to save all.

    account: of all parts of the run.
    """

    def __init__(
        self,
        folder: Path,
        pipeline: Pipeline,
        settings: CheckpointSettings,
        lags: LagHistogram,
        saved: SavedRun | None,
        now: float,
    ) -> None:
        self._folder, self._pipeline, self._settings, self._lags = folder, pipeline, settings, lags
        self._before: dict[str, Any] = saved.counts if saved else {"wall_s": 0.0, "busy_s": {}}
        self.account = RunTotals(self._before.get("account"))
        self._began = now
        self._every_s = min(_FIRST_S, settings.run_every_s)
        self._next = now + self._every_s
        # A saved run has not started yet: its stations begin to count at zero.
        self._at_start = {} if saved else pipeline.launcher.statistics()

    def start(self, now: float) -> None:
        """The stations of a saved run stand: its time goes on from now, as a new one's does from its first moment."""
        self._began = now

    def on_decision(self, now: float, event: records.Event, commands: Sequence[records.Command]) -> None:
        self.account.on_decision(now, event, commands)
        conductor = self._pipeline.loop.conductor
        if (
            isinstance(event, records.Checkpointed)
            and event.updates == conductor.versions.updates
            and now >= self._next
        ):
            begin = self._pipeline.loop.clock()
            self.save(logging.DEBUG)
            took = self._pipeline.loop.clock() - begin
            # Nothing is scheduled meanwhile, so saving takes a tenth of the time at most.
            self._every_s = min(2 * self._every_s, self._settings.run_every_s)
            self._next = now + max(self._every_s, 10 * took)

    def on_report(self, now: float, report: Report) -> None:
        pass

    def save(self, level: int = logging.INFO) -> None:
        """Save the run as it is now, and say so at this level.

        If that is impossible the log says so, the one before stays, the run goes on.
        """
        pipeline = self._pipeline
        assert pipeline.states is not None
        loop = pipeline.loop
        try:
            path = save_run(
                self._folder, loop.conductor, pipeline.launcher.arena, pipeline.weights, pipeline.states, self._counts()
            )
        except OSError as error:
            why = trouble(error) or f"{error.strerror}; make room there"
            log.error("the run cannot be saved in %s: %s", self._folder, why)
        else:
            log.log(level, "saved the run: %s", path)

    def _counts(self) -> dict[str, Any]:
        """Seconds, and busy seconds by station, of all parts of the run."""
        statistics, before = self._pipeline.launcher.statistics(), self._before
        busy: dict[str, float] = dict(before["busy_s"])
        for name, counts in statistics.items():
            earlier = self._at_start.get(name, {})
            busy[name] = busy.get(name, 0) + (counts.get("busy_s", 0.0) - earlier.get("busy_s", 0.0))
        wall_s = before["wall_s"] + self._pipeline.loop.clock() - self._began
        return {
            "account": self.account.as_dict(),
            "lags": self._lags.summary()["counts"],
            "wall_s": wall_s,
            "busy_s": busy,
        }

    def totals(self) -> dict[str, Any]:
        """transitions_per_s (of finished samples), utilisation by station, faults, the stations' own counters."""
        counts = self._counts()
        wall_s = counts["wall_s"]
        return {
            "transitions_per_s": self.account.transitions / wall_s,
            "utilisation": {name: busy / wall_s for name, busy in counts["busy_s"].items()},
            "faults": self.account.faults,
            "stations": self._pipeline.launcher.statistics(),
        }
