"""Meters of idle rows, of the idle trainer and of the fill of passes, computed from decisions alone and thus equal for
every launcher."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

from polyrhythm.pipeline.observers.base import Observer
from polyrhythm.scheduler import records
from polyrhythm.scheduler.conductor import AnyConductor
from polyrhythm.scheduler.inference.batching import padded


class IdleMeter(Observer):
    """Integrates over time the number of rows with a ticket, and whether the trainer trains or publishes.

    An update counts as training from when it has all of its samples, since decisions do not show when passes over parts
    end. `hears` has every type that can change one of these numbers, so the integral is exact.
    """

    hears: ClassVar[tuple[type, ...]] = (
        *(records.SimulatorJoined, records.GeneratorJoined, records.TrainerJoined, records.StationLost),
        *(records.SampleFinished, records.SampleFailed, records.UpdateDone, records.Published),
        *(records.StartRows, records.CancelRow, records.StartUpdate, records.PublishWeights),
    )

    def __init__(self, conductor: AnyConductor, now: float) -> None:
        self._conductor, self._now, self._began = conductor, now, now
        self._rows, self._running = self._rows_there(), 0
        self._training = self._publishing = False
        self._row_s = self._running_s = self._trainer_s = 0.0

    def on_decision(self, now: float, event: records.Event, commands: Sequence[records.Command]) -> None:
        self._pass_time(now)
        if isinstance(event, records.Published | records.TrainerJoined) or not self._conductor.updates.trainer:
            self._publishing = False
        self._publishing |= any(isinstance(command, records.PublishWeights) for command in commands)
        if isinstance(event, records.SimulatorJoined | records.StationLost):
            self._rows = self._rows_there()
        self._running = self._conductor.ledger.running
        self._training = self._conductor.updates.is_complete

    def _rows_there(self) -> int:
        batches = self._conductor.rollout.rows.env_batches.values()
        return sum(len(batch.slot_of) for batch in batches if not batch.reserved)

    def _pass_time(self, now: float) -> None:
        passed, self._now = now - self._now, now
        self._row_s += passed * self._rows
        self._running_s += passed * self._running
        self._trainer_s += passed * (self._training or self._publishing)

    def take(self, now: float, worked_s: float = 0.0) -> dict[str, float]:
        """`rollouter/idle_ratio` and `trainer/idle_ratio`, 0..1, since the last call.

        worked_s: seconds that the trainer reports for the update; more than decisions show if the update came in parts.
        """
        self._pass_time(now)
        seconds = max(now - self._began, 1e-9)
        rollouter = 1.0 - self._running_s / self._row_s if self._row_s else 0.0
        self._began, trainer_s = now, max(self._trainer_s, worked_s)
        self._row_s, self._running_s, self._trainer_s = 0.0, 0.0, 0.0
        return {
            "rollouter/idle_ratio": min(1.0, max(0.0, rollouter)),
            "trainer/idle_ratio": min(1.0, max(0.0, 1.0 - trainer_s / seconds)),
        }


class PassMeter(Observer):
    """Counts training's forward passes and their rows before and after padding, and measures their waiting.

    max_wait_s: longest time for which a batch waits for more requests (`dynamic`); measured is the share of time in
    which a pass waited that long.
    """

    hears: ClassVar[tuple[type, ...]] = (records.Serve,)

    def __init__(self, buckets: Sequence[int], max_wait_s: float = math.inf, now: float = 0.0) -> None:
        self._buckets, self._max_wait_s, self._began = tuple(buckets), max_wait_s, now
        self._passes = self._rows = self._padded = 0
        self._waited_s, self._waited_until = 0.0, now

    def on_decision(self, now: float, event: records.Event, commands: Sequence[records.Command]) -> None:
        for command in commands:
            if isinstance(command, records.Serve) and not command.batch.requests[0].evaluation:
                due = min(request.arrived for request in command.batch.requests) + self._max_wait_s
                if isinstance(event, records.Wake) and now >= due:  # otherwise it waited for its generator
                    begun = max(due - self._max_wait_s, self._waited_until)
                    self._waited_s += max(0.0, due - begun)
                    self._waited_until = max(due, begun)
                rows = sum(request.rows for request in command.batch.requests)
                self._passes, self._rows = self._passes + 1, self._rows + rows
                self._padded += padded(rows, self._buckets)

    def take(self, now: float) -> dict[str, float]:
        """Metrics of the passes that began since the last call; empty if none began.

        `rollouter/batch_rows`: mean rows without padding; `rollouter/padding_ratio`: 0..1;
        `rollouter/batch_wait_ratio`: share of the time in which a pass waited out `max_wait_s`, if that is finite.
        """
        seconds, self._began = max(now - self._began, 1e-9), now
        if not self._passes:
            return {}
        found = {
            "rollouter/batch_rows": self._rows / self._passes,
            "rollouter/padding_ratio": 1.0 - self._rows / self._padded,
        }
        if self._max_wait_s < math.inf:
            found["rollouter/batch_wait_ratio"] = min(1.0, self._waited_s / seconds)
        self._passes = self._rows = self._padded = 0
        self._waited_s = 0.0
        return found
