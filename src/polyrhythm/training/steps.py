"""Training in small turns: a generator that does one optimizer step per `next()` and returns its metrics.

Inside another generator: `metrics = yield from learner.update(...)`; all at once: `finish(learner.update(...))`.
"""

from __future__ import annotations

from collections.abc import Generator

Metrics = dict[str, float]
Steps = Generator[None, None, Metrics]


def finish(steps: Steps) -> Metrics:
    """Run what is left of `steps` and return its metrics."""
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            metrics: Metrics = stop.value
            return metrics
