"""Simulates a scorer, which scores finished samples, several at a time."""

from __future__ import annotations

from collections.abc import Callable

from polyrhythm.plugins.virtual.clustersim.driver import Payload, ProtocolError, VirtualDriver
from polyrhythm.plugins.virtual.clustersim.settings import ScorerGroup
from polyrhythm.plugins.virtual.clustersim.stations.station import VirtualStation
from polyrhythm.scheduler.records import Command, SampleScored, ScorerJoined, ScoreSample, ScoringFailed


class VirtualScorer(VirtualStation):
    """One incarnation of a scorer. give_up: called when a try reaches the group's deadline."""

    def __init__(
        self,
        name: str,
        incarnation: int,
        driver: VirtualDriver,
        seed: int,
        group: ScorerGroup,
        give_up: Callable[[], None],
    ) -> None:
        super().__init__(name, incarnation, driver, seed)
        self._group, self._give_up = group, give_up
        self._under_way: dict[int, ScoreSample] = {}

    def join(self) -> None:
        self.measures.scorer.join(self.clock.now, self._group.places)
        self.emit(ScorerJoined(self.name, self.incarnation, self._group.places, self._group.host))

    def flush(self) -> None:
        """Nothing: it measures no states."""

    def close(self) -> None:
        self.measures.scorer.leave(self.clock.now, self._group.places, len(self._under_way))
        self.alive = False
        self.vacate()

    def obey(self, command: Command) -> None:
        if not self.alive:
            return
        if not isinstance(command, ScoreSample) or len(self._under_way) >= self._group.places:
            raise ProtocolError(f"scorer {self.name} cannot obey {command!r}")
        self._under_way[command.number] = command
        self.measures.scorer.begin(self.clock.now)
        if self._group.hangs and self.rng.random() < self._group.hangs:
            self.clock.after(self._group.deadline, self._overdue)
        else:
            self.work(self._group.score.draw(self.rng), self._end, command)

    def _overdue(self, _: object) -> None:
        if self.alive:
            self._give_up()

    def _end(self, command: ScoreSample) -> None:
        if not self.alive:
            return
        del self._under_way[command.number]
        measures = self.measures
        measures.scorer.end(self.clock.now)
        payload = self.driver.payloads.get(command.payload_id)
        if payload is None or (self._group.raises and self.rng.random() < self._group.raises):
            measures.scoring_failed += 1
            self.emit(ScoringFailed(self.name, self.incarnation, command.number, command.ticket, _why(payload)))
            return
        measures.scored += 1
        score = float(payload.success)
        identity = (self.name, self.incarnation, command.number, command.ticket)
        self.emit(SampleScored(*identity, score, payload.success))


def _why(payload: Payload | None) -> str:
    return "the sample is gone" if payload is None else "the reward function raised"
