"""Functions of the user's that a run calls: between two events, in the thread that runs it.

What they are told is queued by observers and passed on when the loop asks whether to stop. A function that raises ends
the run in good order, saved so that it can go on: StopTraining quietly, anything else comes out as it was raised.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

from polyrhythm.pipeline.observers.base import Observer
from polyrhythm.pipeline.observers.metrics import UpdateMetrics
from polyrhythm.runtime.messages import Report


class StopTraining(Exception):
    """Raised by a callback: end the run here, in good order."""


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """What an evaluation came to.

    name: before, during or after training (with _sampled where the policy acted with noise), swapped, or evaluation;
    version: of the weights; rate: of success, low and high its Wilson 95% interval, successes of `episodes`;
    mean_return; metrics: means of what the environment measures itself; tasks: the same numbers by task, where there
    are several; greedy: without noise; video: the file, its episodes and how many of them succeeded, where one was
    asked for.
    """

    name: str
    version: int
    greedy: bool
    rate: float
    low: float
    high: float
    successes: int
    episodes: int
    mean_return: float
    tasks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    video: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, name: str, found: Mapping[str, Any]) -> EvaluationResult:
        """found: all else, by name; what has no place here is left out."""
        own = {field.name: found[field.name] for field in fields(cls) if field.name in found}
        return cls(**{**own, "name": name})


class Callback(Protocol):
    """What `callbacks` may hold; either method may be missing. A plain function is an `on_update`."""

    def on_update(self, metrics: Mapping[str, float]) -> None:
        """After each update of the trainer: what its line of metrics.jsonl says. An update that is done again, because
        the trainer was lost, is told again."""
        ...

    def on_evaluation(self, result: EvaluationResult) -> None:
        """After each evaluation: before, during and after training."""
        ...


class Callbacks:
    """The functions of one run. ended: what one of them raised, after which none is called any more."""

    def __init__(self, given: object = ()) -> None:
        """given: a callback, a function of an update's metrics, or a list of them. ValueError: one is neither."""
        listed = list(given) if isinstance(given, list | tuple) else [given]
        self._updates = [found for one in listed if (found := _function(one, "on_update"))]
        self._evaluations = [found for one in listed if (found := _function(one, "on_evaluation"))]
        for one in listed:
            if _function(one, "on_update") is None and _function(one, "on_evaluation") is None:
                raise ValueError(
                    f"callbacks: {type(one).__name__} is no function and has neither on_update nor on_evaluation; "
                    "give it one of them"
                )
        self.ended: Exception | None = None
        self._queue: deque[tuple[Callable[[Any], object], Any]] = deque()

    def on_update(self, metrics: Mapping[str, float]) -> None:
        """To be told when the time comes."""
        self._queue += ((function, metrics) for function in self._updates)

    def on_evaluation(self, result: EvaluationResult) -> None:
        """To be told when the time comes."""
        self._queue += ((function, result) for function in self._evaluations)

    def deliver(self) -> bool:
        """Call what is due; whether one of them has ended the run."""
        while self._queue and self.ended is None:
            function, content = self._queue.popleft()
            try:
                function(content)
            except Exception as error:  # noqa: BLE001 - the user's own, raised again where the run ends
                self.ended = error
        return self.ended is not None


class UpdatesHeard(Observer):
    """An observer that passes on what `metrics` made of an update's report; it must be told after that one."""

    def __init__(self, metrics: UpdateMetrics, callbacks: Callbacks) -> None:
        self._metrics, self._callbacks = metrics, callbacks

    def on_report(self, now: float, report: Report) -> None:  # noqa: ARG002
        self._callbacks.on_update(self._metrics.latest)


def _function(given: object, name: str) -> Callable[[Any], object] | None:
    """The method of this name; where there is neither method, what is callable is told of updates."""
    found = getattr(given, name, None)
    if found is None and name == "on_update" and not hasattr(given, "on_evaluation") and callable(given):
        found = given
    return found if callable(found) else None
