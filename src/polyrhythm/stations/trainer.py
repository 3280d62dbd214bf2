"""The trainer station: turns lent samples into updates, one optimizer step per unit of work, and publishes weights.

Invariant: commands are obeyed in order, so weights are published only between two updates; a sample is read only
between `LendSamples` and `UpdateDone`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from polyrhythm.flow.records import Command, Event, LendSamples, Published, PublishWeights, TrainerJoined, UpdateDone
from polyrhythm.policies.base import as_module
from polyrhythm.runtime.messages import Report
from polyrhythm.runtime.payloads import Payloads
from polyrhythm.runtime.weights import Weights
from polyrhythm.specs import Trajectory
from polyrhythm.training.learner import Learner
from polyrhythm.training.steps import Metrics, Steps


class Trainer:
    """Trains with `learner`; the figures of each update go to `report` under the topic "update"."""

    def __init__(
        self,
        name: str,
        epoch: int,
        learner: Learner,
        payloads: Payloads,
        weights: Weights,
        emit: Callable[[Event], None],
        report: Callable[[Report], None],
    ) -> None:
        self.name, self.epoch = name, epoch
        self._learner, self._payloads, self._weights = learner, payloads, weights
        self._emit, self._report = emit, report
        self._todo: deque[LendSamples | PublishWeights] = deque()
        self._steps: Steps | None = None
        self._figures: Metrics = {}
        self._optimizer_steps = 0

    def joined(self) -> TrainerJoined:
        """The event that announces it."""
        return TrainerJoined(self.name, self.epoch, self._learner.updates)

    def handle(self, command: Command) -> None:
        if not isinstance(command, LendSamples | PublishWeights):
            raise TypeError(f"a trainer does not do {type(command).__name__}")
        self._todo.append(command)

    def work(self) -> bool:
        """One optimizer step, or one publication.

        Consumes: lent samples and requests to publish, in the order commanded. Waits for: nothing.
        Unblocked by: `handle`. Produces: `UpdateDone` and a report after an update's last step; `Published`.
        """
        if not self._todo:
            return False
        command = self._todo[0]
        if isinstance(command, PublishWeights):
            self._weights.publish(command.version, as_module(self._learner.policy).state_dict())
            self._todo.popleft()
            self._emit(Published(self.name, self.epoch, command.version))
            return True
        if self._steps is None:
            samples = [self._payloads.get(handle) for handle in command.handles]
            self._figures = _describe(samples, command)
            self._steps = self._learner.update(samples, command.update)
        try:
            next(self._steps)
            self._optimizer_steps += 1
        except StopIteration as stop:
            self._finish(command, stop.value)
        return True

    def _finish(self, command: LendSamples, metrics: Metrics) -> None:
        self._todo.popleft()
        self._steps = None
        self._report(Report(self.name, "update", command.update, {**self._figures, **metrics}))
        self._emit(UpdateDone(self.name, self.epoch, command.update))

    def outstanding(self) -> list[str]:
        return [f"{self.name} has {type(command).__name__} to do" for command in self._todo]

    def statistics(self) -> dict[str, float]:
        return {"optimizer_steps": float(self._optimizer_steps), "updates": float(self._learner.updates)}

    def close(self) -> None:
        if self._steps is not None:
            self._steps.close()


def _describe(samples: list[Trajectory], command: LendSamples) -> Metrics:
    """Figures of the samples themselves. lag: trainer's version minus the oldest behaviour version of each."""
    lags = [command.version - int(sample.version.min()) for sample in samples]
    count = len(samples)
    return {
        "env/sample_env_steps": sum(sample.env_steps for sample in samples) / count,
        "env/sample_chunk_steps": sum(sample.steps for sample in samples) / count,
        "staleness/lag_mean": sum(lags) / count,
        "staleness/lag_max": float(max(lags)),
        "train/actor/current_version": float(command.version),
    }
