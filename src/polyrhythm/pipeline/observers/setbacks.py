"""Logs training alarms while the run goes on."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from polyrhythm.observe.setbacks import SetbackWatch
from polyrhythm.pipeline.observers.base import Observer
from polyrhythm.pipeline.observers.metrics import UpdateMetrics
from polyrhythm.runtime.messages import Report

log = logging.getLogger(__name__)


def warn_of_setbacks(watch: SetbackWatch, line: Mapping[str, Any]) -> None:
    """Log what there is to say about a line of metrics."""
    for sentence in watch.take(line):
        log.warning("%s", sentence)


class SetbackWarning(Observer):
    """Logs the alarms of each update's line of metrics; attach it after `metrics`."""

    def __init__(self, watch: SetbackWatch, metrics: UpdateMetrics) -> None:
        self._watch, self._metrics = watch, metrics

    def on_report(self, now: float, report: Report) -> None:  # noqa: ARG002
        warn_of_setbacks(self._watch, self._metrics.latest)
