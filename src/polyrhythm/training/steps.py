"""Training as a generator: one optimizer step per `next()`, metrics as its return value.

Inside another generator: `metrics = yield from learner.update(...)`; all at once: `finish(learner.update(...))`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator

Metrics = dict[str, float]
Steps = Generator[None, None, Metrics]


def finish(steps: Steps, each: Callable[[int], None] = lambda _: None) -> Metrics:
    """Run the remaining `steps` and return their metrics. each: told after every step how many were done here."""
    done = 0
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            metrics: Metrics = stop.value
            return metrics
        done += 1
        each(done)
