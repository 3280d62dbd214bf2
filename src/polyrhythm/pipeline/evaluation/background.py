"""Evaluations while training goes on: when one is asked for, and what becomes of its results. See docs/design/007."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Sequence
from typing import ClassVar

from polyrhythm.config.schema import RunConfig
from polyrhythm.pipeline.build import Pipeline
from polyrhythm.pipeline.evaluation.best import BestCheckpoints
from polyrhythm.pipeline.observers.base import Observer
from polyrhythm.pipeline.persistence.checkpoints import save_policy
from polyrhythm.scheduler import records

log = logging.getLogger(__name__)

#: Told of each evaluation: its version and all its results.
Told = Callable[[int, Sequence[records.SampleEvaluated]], None]


class BackgroundEvaluator(Observer):
    """An observer that asks for an evaluation every `evaluation.every` versions (0: never), one at a time.

    episodes: of each; told: hears what a whole one came to, when its weights are in the place that `best` has for them.
    """

    hears: ClassVar[tuple[type, ...]] = (
        # Those that can raise the applied version, the first of a run or of a part of it included.
        *(records.WeightsApplied, records.GeneratorJoined, records.StationLost, records.TrainUntil),
        *(records.StartRows, records.SampleEvaluated, records.EvaluationDone),
    )

    def __init__(
        self,
        config: RunConfig,
        pipeline: Pipeline,
        best: BestCheckpoints,
        episodes: Sequence[records.Episode],
        told: Told,
    ) -> None:
        self._config, self._pipeline, self._best = config, pipeline, best
        self._episodes, self._told = tuple(episodes), told
        self._every = config.evaluation.every or math.inf
        self._next = best.newest + self._every
        self._name = ""
        self._version = -1
        self._results: list[records.SampleEvaluated] = []
        self._keeping: threading.Thread | None = None

    def memory(self) -> str:
        """What they cost in memory, in words."""
        evaluation = self._config.evaluation
        copy = f"{self._pipeline.weights.layout.nbytes / 1e6:.3g} MB of weights"
        rows = f"{evaluation.reserved_rows} rows in a simulator of their own"
        return {
            "pause": "no memory, training waits",
            "second_copy": f"{copy} more in the first generator, {rows}",
            "own_generator": f"a generator with {copy}, {rows}",
        }[evaluation.weights]

    @property
    def under_way(self) -> bool:
        """An evaluation was asked for and is not done."""
        return bool(self._name)

    def finish(self) -> None:
        """Wait for the evaluation under way."""
        self._pipeline.loop.await_evaluation(self._name)

    def close(self) -> None:
        """Wait until the weights that are being kept are written. An evaluation that is under way is given up."""
        if self._name:
            log.info("the evaluation under way is given up; a resumed run makes another")
        if self._keeping is not None:
            self._keeping.join()

    # ------------------------------------------------------------ as observer

    def on_decision(self, now: float, event: records.Event, commands: Sequence[records.Command]) -> None:  # noqa: ARG002
        if self._name:
            self._hear(event, commands)
        versions, last = self._pipeline.loop.conductor.versions, self._config.training.versions
        if not self._name and self._next <= versions.applied < last:
            self._ask(versions.applied)

    def _hear(self, event: records.Event, commands: Sequence[records.Command]) -> None:
        if isinstance(event, records.WeightsApplied) and event.pinned:
            self._begin(event.version)
        for command in commands:
            match command:
                case records.StartRows(grants=grants) if self._version < 0:
                    for grant in grants:
                        if grant.ticket.evaluation == self._name:
                            self._begin(grant.ticket.version)
                case records.SampleEvaluated(name=self._name):
                    self._results.append(command)
                case records.EvaluationDone(name=self._name, dropped=dropped):
                    self._end(dropped)

    def _ask(self, version: int) -> None:
        self._name, self._version, self._results = f"during-{version}", -1, []
        beside = self._config.evaluation.weights != "pause"
        self._pipeline.loop.submit_later(records.Evaluate(self._name, self._episodes, beside))

    def _begin(self, version: int) -> None:
        """The evaluation is pinned to this version: take its weights while they are on the bus."""
        if self._version < 0:
            self._version, self._next = version, version + self._every
            self._keeping = threading.Thread(target=self._keep, args=(version,), name="keeping")
            self._keeping.start()

    def _keep(self, version: int) -> None:
        try:
            found, weights = self._pipeline.weights.read(version)
            if found == version:
                save_policy(weights, self._config, self._best.path(version), version, self._pipeline.spec)
            else:
                log.warning("version %d is evaluated, but its weights were replaced before they could be kept", version)
        except OSError as error:
            log.error("the weights of version %d cannot be kept (%s); make room", version, error.strerror)

    def _end(self, dropped: int) -> None:
        self._name = ""
        self.close()
        if not dropped:
            self._told(self._version, self._results)
            return
        log.warning(
            "the evaluation of version %d is given up: %d of its %d episodes ended; the next one is of version %g",
            *(self._version, len(self._results), len(self._episodes), self._next),
        )
        self._best.forget(self._version)
