"""Training as a generator: one optimizer step per `next()`, metrics as its return value.

Inside another generator: `metrics = yield from learner.update(...)`; all at once: `finish(learner.update(...))`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator

Metrics = dict[str, float]
Steps = Generator[None, None, Metrics]


class PhaseTimes:
    """Seconds of an update by phase, on the host's clock. Measuring waits for no device, so a device's time counts in
    the phase that waits for its result."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._since = time.monotonic()

    def end(self, phase: str) -> None:
        """Attribute the time since the last call to this phase."""
        before, self._since = self._since, time.monotonic()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + self._since - before

    def skip(self) -> None:
        """Attribute the time since the last call to no phase."""
        self._since = time.monotonic()


def finish(steps: Steps, each: Callable[[int], None] = lambda _: None) -> Metrics:
    """Run the remaining `steps` and return their metrics. each: called after every step with the number done here."""
    done = 0
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            metrics: Metrics = stop.value
            return metrics
        done += 1
        each(done)
