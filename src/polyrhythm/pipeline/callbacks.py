"""Calls user functions during a run, in the run's thread, between two events.

Observers queue the calls, and the run loop makes them. A function that raises ends the run after a save that allows to
resume; StopTraining is not passed on, any other exception is raised again at the end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

from polyrhythm.pipeline.observers.base import Observer
from polyrhythm.pipeline.observers.metrics import UpdateMetrics
from polyrhythm.runtime.messages import Report


class StopTraining(Exception):
    """Raised by a callback to end the run cleanly."""


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """Result of an evaluation in one action mode.

    name: before, during or after training (with _sampled if the policy acted with noise), swapped, or evaluation.
    version: of the weights. greedy: without noise. rate, low, high: success rate with its Wilson 95% interval;
    successes: number of successful `episodes`; these four are None if no episode reported success. mean_return: mean
    episode return. metrics: means of the environment's own metrics. tasks, suites: the same fields by task and by
    suite, if there are several. variants, kinds: the same by requested variant of the environment and by kind of
    variant. at: mean@n and pass@k, each with rate, low, high and starts, if initial states have several samples.
    dropped: episodes that failed and are missing. sampling: sampling settings of a language model, if not greedy
    (`evaluate` only). env: overridden settings of the environment. video: file, episodes, successes and failed
    episodes, if requested. conversations: transcripts of the first episodes of a text environment, each with prompt,
    turns (message, reply), success and return.
    """

    name: str
    version: int
    greedy: bool
    rate: float | None
    low: float | None
    high: float | None
    successes: int | None
    episodes: int
    mean_return: float
    tasks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, repr=False)
    suites: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, repr=False)
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, repr=False)
    kinds: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, repr=False)
    metrics: Mapping[str, float] = field(default_factory=dict)
    video: Mapping[str, Any] | None = None
    dropped: int = 0
    conversations: Sequence[Mapping[str, Any]] = field(default=(), repr=False)
    sampling: Mapping[str, float] = field(default_factory=dict)
    at: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    env: Sequence[str] = ()

    @classmethod
    def of(cls, name: str, found: Mapping[str, Any]) -> EvaluationResult:
        """Build a result from `found`, the other fields by name; unknown names are ignored."""
        own = {field.name: found[field.name] for field in fields(cls) if field.name in found}
        return cls(**{**own, "name": name})


class Callback(Protocol):
    """An element of `callbacks`; either method may be missing. A plain function counts as `on_update`."""

    def on_update(self, metrics: Mapping[str, float | None]) -> None:
        """Called after each update with its line of metrics.jsonl.

        env/success_once is None if no episode reported success. An update that is repeated after the trainer was lost
        is reported again.
        """

    def on_evaluation(self, result: EvaluationResult) -> None:
        """Called after each evaluation: before, during and after training."""


class Callbacks:
    """The callbacks of one run. ended: the exception that one of them raised; after it none is called."""

    def __init__(self, given: object = ()) -> None:
        """given: a callback, a function of an update's metrics, or a list of these. ValueError: anything else."""
        listed = list(given) if isinstance(given, list | tuple) else [given]
        self._updates = [found for one in listed if (found := _function(one, "on_update"))]
        self._evaluations = [found for one in listed if (found := _function(one, "on_evaluation"))]
        for one in listed:
            if _function(one, "on_update") is None and _function(one, "on_evaluation") is None:
                raise ValueError(
                    f"callbacks: {type(one).__name__} is not a function and has neither on_update nor on_evaluation; "
                    "add one of them"
                )
        self.ended: Exception | None = None
        self._queue: deque[tuple[Callable[[Any], object], Any]] = deque()

    def on_update(self, metrics: Mapping[str, float | None]) -> None:
        self._queue += ((function, metrics) for function in self._updates)

    def on_evaluation(self, result: EvaluationResult) -> None:
        self._queue += ((function, result) for function in self._evaluations)

    def deliver(self) -> bool:
        """Make the queued calls and return whether a callback has ended the run."""
        while self._queue and self.ended is None:
            function, content = self._queue.popleft()
            try:
                function(content)
            except Exception as error:  # noqa: BLE001 - raised again at the end of the run
                self.ended = error
        return self.ended is not None


class UpdateForwarder(Observer):
    """Observer that forwards the metrics of each update to the callbacks; attach it after `metrics`."""

    def __init__(self, metrics: UpdateMetrics, callbacks: Callbacks) -> None:
        self._metrics, self._callbacks = metrics, callbacks

    def on_report(self, now: float, report: Report) -> None:  # noqa: ARG002
        self._callbacks.on_update(self._metrics.latest)


def _function(given: object, name: str) -> Callable[[Any], object] | None:
    """The method of this name; a callable without either method counts as `on_update`."""
    found = getattr(given, name, None)
    if found is None and name == "on_update" and not hasattr(given, "on_evaluation") and callable(given):
        found = given
    return found if callable(found) else None
