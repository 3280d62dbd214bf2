"""Advice in a run: in its summary and log when it is complete, and its first step in the live display meanwhile."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from polyrhythm.config.schema import RunConfig
from polyrhythm.pipeline.hooks import RunHooks, RunPart, all_alarms
from polyrhythm.plugins.advice.findings import in_short
from polyrhythm.plugins.advice.measures import Line, newest_utilisation
from polyrhythm.plugins.advice.order import advice

log = logging.getLogger(__name__)

#: Lines of metrics from which live advice is given: the first, which alarms compare with, and the newest, which give
#: the shares of time.
_FIRST, _NEWEST = 5, 40
#: Seconds between two pieces of live advice.
_AGAIN_S = 5.0
#: Seconds and share of a run's time that predictions may take at its end; with fewer seconds there are none.
_PREDICT_S, _PREDICT_SHARE, _LEAST_S = 5.0, 0.02, 0.5


class AdvicePart(RunPart):
    """The first step of the advice so far, worked out when the live display asks for it."""

    def __init__(self, config: RunConfig) -> None:
        self._config, self._first = config, list[Line]()
        self._newest: deque[Line] = deque(maxlen=_NEWEST)
        self._status: tuple[str, ...] = ()
        self._is_new = False
        self._due = self._began = time.monotonic()

    def on_metrics(self, step: int, values: Mapping[str, float | None]) -> None:
        if "trainer/idle_ratio" not in values:
            return
        kept = self._first if len(self._first) < _FIRST else self._newest
        kept.append({"step": step, **values, "time_s": time.monotonic() - self._began})
        self._is_new = True

    def _weighed(self, lines: Sequence[Line]) -> list[Line]:
        """The lines with the seconds since the first of the newest: those before it have no part in the shares."""
        start = self._newest[0]["time_s"]
        return [{**line, "time_s": max(0.0, line["time_s"] - start)} for line in lines]

    def status(self) -> Sequence[str]:
        now = time.monotonic()
        if self._is_new and now >= self._due and len(self._newest) > 1:
            self._is_new, self._due = False, now + _AGAIN_S
            lines = [*self._first, *self._newest]
            found = advice(self._config, newest_utilisation(lines[-1]), self._weighed(lines), all_alarms(lines))
            self._status = tuple(map(in_short, found[:1]))
        return self._status


class AdviceHooks(RunHooks):
    def begin(self, config: RunConfig) -> RunPart:
        return AdvicePart(config)

    def summarise(
        self,
        config: RunConfig,
        summary: Mapping[str, Any],
        lines: Sequence[Line],
    ) -> Mapping[str, Any]:
        found = advice(config, summary.get("utilisation", {}), lines, all_alarms(lines))
        seconds = min(_PREDICT_S, _PREDICT_SHARE * summary.get("wall_s", {}).get("total", 0.0))
        if found and seconds >= _LEAST_S:
            from polyrhythm.plugins.advice.predicted import Predictor  # the simulated cluster, not before a run

            found = Predictor(config, summary, lines, seconds).predict(found)
        for number, finding in enumerate(found, 1):
            log.info("advice %d, %s", number, in_short(finding))
        return {"advice": [finding.as_json() for finding in found]} if found else {}


HOOKS = AdviceHooks()
