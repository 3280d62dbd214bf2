"""What `GuaranteeChecker` checks of scorers: a sample is scored before it is trained, and its payload stays until then.

No scorer has more samples than places, and none that could score idles while one waits. A sample is tried at most
`max_attempts` times. One whose scorer was lost is alone with its next one. What a score has come for is trained with
it, or given up; what is given up is released once its scorer has answered or is gone, and not before.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from polyrhythm.scheduler.conductor import AnyConductor
from polyrhythm.scheduler.records import (
    Command,
    Event,
    ReleasePayloads,
    SampleFinished,
    SampleScored,
    ScorerJoined,
    ScoreSample,
    ScoringFailed,
    StartUpdate,
    StationLost,
)
from polyrhythm.scheduler.samples.groups import SampleState
from polyrhythm.scheduler.settings import ScoringRules


@dataclass(slots=True)
class ScoringAudit:
    """Kept from events and commands. places: present scorers; under_way: number of a try → it; scores: payload → its
    score; tries: payload → how many failed; shaken: payloads whose scorer was lost; finished: payload → its ticket."""

    rules: ScoringRules | None
    places: dict[str, int] = field(default_factory=dict)
    under_way: dict[int, ScoreSample] = field(default_factory=dict)
    scores: dict[str, float] = field(default_factory=dict)
    tries: Counter[str] = field(default_factory=Counter)
    shaken: set[str] = field(default_factory=set)
    finished: dict[str, int] = field(default_factory=dict)

    def note(self, event: Event, commands: list[Command], conductor: AnyConductor) -> str:
        """What is wrong with this decision, in words, or nothing."""
        if self.rules is None:
            scores = any(isinstance(command, ScoreSample) for command in commands)
            return "a sample is scored in a run without scorers" if scores else ""
        self._hear(event)
        for command in commands:
            wrong = ""
            if isinstance(command, ScoreSample):
                wrong = self._begin(command)
            elif isinstance(command, ReleasePayloads):
                wrong = self._release(command)
            elif isinstance(command, StartUpdate):
                wrong = self._lend(command)
            if wrong:
                return wrong
        return self._waiting(conductor)

    def _hear(self, event: Event) -> None:
        if isinstance(event, ScorerJoined):
            self._lose(event.scorer)
            self.places[event.scorer] = event.places
        elif isinstance(event, StationLost) and event.station in self.places:
            self._lose(event.station)
        elif isinstance(event, SampleFinished):
            self.finished[event.payload_id] = event.ticket
        elif isinstance(event, SampleScored):
            self.scores[self.under_way.pop(event.number).payload_id] = event.score
        elif isinstance(event, ScoringFailed):
            self.tries[self.under_way.pop(event.number).payload_id] += 1

    def _lose(self, scorer: str) -> None:
        self.places.pop(scorer, None)
        for number, begun in list(self.under_way.items()):
            if begun.scorer == scorer:
                del self.under_way[number]
                self.tries[begun.payload_id] += 1
                self.shaken.add(begun.payload_id)

    def _begin(self, command: ScoreSample) -> str:
        payload_id, others = command.payload_id, self._of(command.scorer)
        if command.scorer not in self.places or len(others) >= self.places[command.scorer]:
            return f"{command.scorer} has no place for {command}"
        alone = payload_id in self.shaken or any(other.payload_id in self.shaken for other in others)
        if others and alone:
            return f"{command} should be alone, but {others} are there"
        if self.finished.get(payload_id) != command.ticket or payload_id in self.scores:
            return f"{command} is not what waits for a score"
        if self.rules is not None and self.tries[payload_id] >= self.rules.max_attempts:
            return f"{command} had {self.tries[payload_id]} tries, {self.rules.max_attempts} are allowed"
        if command.number in self.under_way or any(b.payload_id == payload_id for b in self.under_way.values()):
            return f"{command} is under way already"
        self.under_way[command.number] = command
        return ""

    def _of(self, scorer: str) -> list[ScoreSample]:
        return [begun for begun in self.under_way.values() if begun.scorer == scorer]

    def _release(self, command: ReleasePayloads) -> str:
        read = {begun.payload_id for begun in self.under_way.values()}
        for payload_id in command.payload_ids:
            if payload_id in read:
                return f"{payload_id} is released while it is scored"
            self.finished.pop(payload_id, None)
            self.scores.pop(payload_id, None)
            self.tries.pop(payload_id, None)
            self.shaken.discard(payload_id)
        return ""

    def _lend(self, command: StartUpdate) -> str:
        told = [self.scores.get(payload_id) for payload_id in command.payload_ids]
        return "" if told == list(command.scores) else f"{command} has the scores {command.scores}; they are {told}"

    def _waiting(self, conductor: AnyConductor) -> str:
        """A scorer with nothing to do although a sample waits; or a sample that nobody will score."""
        samples = conductor.rollout.samples.values()
        unscored = {s.payload_id for s in samples if s.state is SampleState.SCORING}
        waiting = unscored - {begun.payload_id for begun in self.under_way.values()}
        idle = [name for name in self.places if not self._of(name)]
        if idle and waiting:
            return f"{idle} are idle although {waiting} wait for their scores"
        queued = {conductor.rollout.samples[entry.ticket].payload_id for entry in conductor.rollout.scoring.waiting}
        return "" if queued == waiting else f"{waiting} wait for scores, the queue has {queued}"
