"""What `GuaranteeChecker` checks of groups: which tickets may be trained together, and which groups have quota.

A lent group is whole: as many samples as it needs, all of them finished, none of them cancelled, and with a mean return
within the bounds unless the run was told that it need not be.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from polyrhythm.scheduler.conductor import AnyConductor
from polyrhythm.scheduler.records import (
    CancelRow,
    Command,
    Event,
    FilterExhausted,
    PayloadsLost,
    ReleasePayloads,
    SampleFinished,
    ScoreCounted,
    StartRows,
    StartUpdate,
    StationLost,
    TrainerJoined,
)
from polyrhythm.scheduler.samples.buffer import SampleBuffer
from polyrhythm.scheduler.samples.groups import SampleState
from polyrhythm.scheduler.samples.redundancy import oldest_missing
from polyrhythm.scheduler.settings import SchedulerSettings


@dataclass(slots=True)
class GroupAudit:
    """Kept from events and commands, but for what a resumed conductor holds already.

    group: ticket → group; tickets: group → how many it got; returns: finished ticket → its return; finished: group →
    how many; given_up: cancelled attempts; exhausted: the filter keeps every group until the next update; excused:
    groups complete meanwhile; open: the trainer of an update that lacks samples; payloads: finished ticket → its
    payload id; unscored: ticket → what has no score yet.
    """

    settings: SchedulerSettings
    group: dict[int, int] = field(default_factory=dict)
    tickets: Counter[int] = field(default_factory=Counter)
    returns: dict[int, float] = field(default_factory=dict)
    finished: Counter[int] = field(default_factory=Counter)
    given_up: set[tuple[int, int]] = field(default_factory=set)
    exhausted: bool = False
    open: str = ""
    excused: set[int] = field(default_factory=set)
    payloads: dict[int, str] = field(default_factory=dict)
    unscored: dict[int, SampleFinished] = field(default_factory=dict)

    @classmethod
    def of(cls, conductor: AnyConductor, settings: SchedulerSettings) -> GroupAudit:
        """With the samples that it has. Their returns are not told, so the bounds are not checked for their groups."""
        book = cls(settings, exhausted=conductor.rollout.filter.exhausted)
        for number, sample in conductor.rollout.samples.items():
            if not sample.ticket.evaluation:
                book.group[number] = sample.ticket.group
                book.tickets[sample.ticket.group] += 1
                book.excused.add(sample.ticket.group)
                if sample.payload_id and sample.state is not SampleState.SCORING:
                    book.returns[number] = 0.0
        return book

    def note(self, event: Event, commands: list[Command]) -> str:
        """What is wrong with this decision, in words, or nothing."""
        match event:
            case StationLost(station=name) | TrainerJoined(trainer=name) if name == self.open:
                self.open = ""
        self.exhausted |= any(isinstance(command, FilterExhausted) for command in commands)
        if isinstance(event, SampleFinished) and event.ticket in self.group:
            if self.settings.scoring is None:
                self._finish(event)
            elif (event.ticket, event.attempt) not in self.given_up:
                self.unscored[event.ticket] = event
        if isinstance(event, PayloadsLost):
            self._unfinish(event, commands)
        for counted in (command for command in commands if isinstance(command, ScoreCounted)):
            finished = self.unscored.pop(counted.ticket)
            self._finish(replace(finished, episode_return=finished.episode_return + counted.score))
        wrong = [self._follow(command) for command in commands]
        return next((words for words in wrong if words), "")

    def _finish(self, event: SampleFinished) -> None:
        if (event.ticket, event.attempt) in self.given_up:
            return
        group = self.group[event.ticket]
        self.returns[event.ticket] = event.episode_return
        self.payloads[event.ticket] = event.payload_id
        self.finished[group] += 1
        if self.exhausted and self.finished[group] == self.settings.group_size:
            self.excused.add(group)

    def _unfinish(self, event: PayloadsLost, commands: list[Command]) -> None:
        """The samples of these payloads run again, unless they had been lent meanwhile: then nothing is released."""
        released = {p for command in commands if isinstance(command, ReleasePayloads) for p in command.payload_ids}
        self.unscored = {ticket: e for ticket, e in self.unscored.items() if e.payload_id not in released}
        for ticket, payload_id in list(self.payloads.items()):
            if payload_id in released.intersection(event.payload_ids):
                del self.returns[ticket], self.payloads[ticket]
                self.finished[self.group[ticket]] -= 1

    def _follow(self, command: Command) -> str:
        if isinstance(command, StartRows):
            return self._start(command)
        if isinstance(command, CancelRow):
            self.given_up.add((command.ticket, command.attempt))
        elif isinstance(command, StartUpdate):
            return self._lend(command)
        return ""

    def _start(self, command: StartRows) -> str:
        for ticket in (grant.ticket for grant in command.grants if not grant.ticket.evaluation):
            if ticket.number not in self.group:
                self.group[ticket.number] = ticket.group
                self.tickets[ticket.group] += 1
            if self.tickets[ticket.group] > self.settings.group_tickets:
                return f"group {ticket.group} has more than {self.settings.group_tickets} tickets"
        return ""

    def _lend(self, command: StartUpdate) -> str:
        if not self.open:
            self.exhausted = False
        self.open = command.trainer if command.more else ""
        members: dict[int, list[int]] = {}
        for ticket in command.tickets:
            members.setdefault(self.group[ticket], []).append(ticket)
        for group, tickets in members.items():
            if len(tickets) != self.settings.group_size:
                return f"group {group} is lent with {len(tickets)} samples"
            if not all(ticket in self.returns for ticket in tickets):
                return f"group {group} is lent with a sample that was not finished: {tickets}"
            mean = sum(self.returns[ticket] for ticket in tickets) / len(tickets)
            if not self.settings.min_return <= mean <= self.settings.max_return and group not in self.excused:
                return f"group {group} is lent with a mean return of {mean}"
        return ""


def misplaced(conductor: AnyConductor) -> str:
    """What is wrong with the places in admission, in words, or nothing."""
    settings, admission = conductor.settings, conductor.rollout.admission
    places = Counter[int]()
    for group in admission.groups.values():
        if not group.spare:
            places[group.version] += group.size
    if places != admission.outstanding:
        return f"groups with a place are {dict(places)} by version, outstanding are {admission.outstanding}"
    if settings.bound == "sample" and (late := [version for version, slack in admission.slack() if slack < 0]):
        return f"the deadlines of versions {late} cannot be kept"
    return _wrong_spares(conductor.rollout.buffer, conductor)


def _wrong_spares(buffer: SampleBuffer, conductor: AnyConductor) -> str:
    settings, admission = conductor.settings, conductor.rollout.admission
    spare = [group for group in admission.groups.values() if group.spare]
    if sorted(group.number for group in spare) != sorted(admission.spare) or len(spare) > settings.extra_groups:
        return f"spare groups are {spare}, noted are {admission.spare}, allowed are {settings.extra_groups}"
    missing = oldest_missing(admission, buffer)
    for group in spare:
        if group.complete or missing is None or missing > group.version:
            return f"spare group {group} is complete or of no use, the oldest version with a place is {missing}"
    return ""
