"""An observer that tells of samples which failed in their environment, before so many have that the run halts."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from polyrhythm.flow import records
from polyrhythm.runtime.crew import log_file
from polyrhythm.runtime.messages import Report

log = logging.getLogger(__name__)

#: The reason of a sample that was given up by command.
_CANCELLED = "cancelled"


class Failures:
    """Warns at the first failure of each kind (call and error's type), the tenth, the hundredth, and so on.

    logs: where the stations' logs with the tracebacks are; None where the stations log here. counts: failures by kind;
    last: the last one, in words.
    """

    def __init__(self, logs: Path | None) -> None:
        self._logs = logs
        self.counts: Counter[str] = Counter()
        self.last = "it ran out of attempts"

    def decided(self, now: float, event: records.Event, commands: Sequence[records.Command]) -> None:  # noqa: ARG002
        if isinstance(event, records.SampleFailed) and event.reason != _CANCELLED:
            kind = ": ".join(event.reason.split(": ")[:2])
            self.counts[kind] += 1
            self.last, count = event.reason, self.counts[kind]
            if count == 10 ** (len(str(count)) - 1):
                self._warn(event, count)

    def _warn(self, event: records.SampleFailed, count: int) -> None:
        times = "" if count == 1 else f" ({count} times so far)"
        where = f"; the traceback: {log_file(self._logs, event.simulator, event.epoch)}" if self._logs else ""
        log.warning("%s: a sample failed%s: %s%s", event.simulator, times, event.reason, where)

    def reported(self, now: float, report: Report) -> None:
        pass
