"""Where every ticket is, kept from events and commands alone: an independent check of the conductor and its ledger.

    granted → running (→ scoring) → finished → lent → trained → rolled back
                 ↓ ↑                 └──→ finished (the trainer was lost)
                lost ←──────────── finished, scoring (its host was lost)

A ticket that goes another way is a violation: lent while lent or after it was trained, trained without having been
lent, granted while it runs. So is a sample that is lent too late.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from typing import Any, ClassVar, Literal

from polyrhythm.pipeline.observers.base import Observer
from polyrhythm.scheduler import records
from polyrhythm.scheduler.samples.groups import SampleLedger

#: Violations of one kind are alike; so many are told.
_TOLD = 20


class Place(StrEnum):
    """Where a ticket is; the names are those of the ledger."""

    RUNNING = "running"
    LOST = "reissuing"
    SCORING = "scoring"
    FINISHED = "buffered"
    LENT = "lent"
    TRAINED = "trained"
    ROLLED_BACK = "rolled_back"


@dataclass(slots=True)
class Entry:
    """One ticket. simulator: where it runs; oldest, payload_id: of its sample; update: that trained it; blame: its loss
    counts as an attempt."""

    place: Place
    attempt: int
    simulator: str
    oldest: int = -1
    update: int = -1
    payload_id: str = ""
    blame: bool = True


class TicketAudit(Observer):
    """An observer. max_lag, bound: the promise about lags; scored: whether samples are scored."""

    hears: ClassVar[tuple[type, ...]] = (
        *(records.SampleFinished, records.SampleFailed, records.StationLost, records.PayloadsLost),
        *(records.UpdateDone, records.TrainerJoined),
        *(records.StartRows, records.CancelRow, records.StartUpdate, records.ScoreCounted),
    )

    def __init__(self, max_lag: float, bound: Literal["sample", "mean"], *, scored: bool = False) -> None:
        self._said: list[str] = []
        self._unsaid = 0
        self._max_lag, self._bound = max_lag, bound
        self._ends_as = Place.SCORING if scored else Place.FINISHED
        self._entries: dict[int, Entry] = {}
        self._lent: list[int] = []
        self._more = -1  # the update that is lent in part
        self._trainer = ""
        self._lags: Counter[int] = Counter()

    # ------------------------------------------------------------ as observer

    def on_decision(self, now: float, event: records.Event, commands: Sequence[records.Command]) -> None:  # noqa: ARG002
        self._hear(event)
        for command in commands:
            match command:
                case records.StartRows(simulator=simulator, grants=grants):
                    for grant in grants:
                        self._grant(grant.ticket, simulator)
                case records.CancelRow(ticket=ticket, attempt=attempt):
                    self._lose(ticket, attempt)
                case records.ScoreCounted(ticket=ticket):
                    self._score(ticket)
                case records.StartUpdate():
                    self._lend(command)

    # ------------------------------------------------------------ events

    def _hear(self, event: records.Event) -> None:
        match event:
            case records.SampleFinished():
                self._finish(event)
            case records.SampleFailed(ticket=ticket, attempt=attempt):
                self._lose(ticket, attempt)
            case records.UpdateDone(update=update):
                self._train(update)
            case records.TrainerJoined(trainer=trainer, updates=updates):
                self._trainer = trainer
                self._roll_back(updates)
            case records.StationLost(station=station) if station == self._trainer:
                self._come_back()
            case records.StationLost() | records.PayloadsLost():
                self._lose_several(event)

    def _lose_several(self, event: records.StationLost | records.PayloadsLost) -> None:
        for entry in self._entries.values():
            match event:
                case records.StationLost(station=station, blame=blame):
                    if entry.place is Place.RUNNING and entry.simulator == station:
                        entry.place, entry.blame = Place.LOST, blame
                case records.PayloadsLost(payload_ids=payload_ids):
                    if entry.place in (Place.FINISHED, Place.SCORING) and entry.payload_id in payload_ids:
                        entry.place, entry.blame = Place.LOST, False

    def _grant(self, ticket: records.Ticket, simulator: str) -> None:
        if ticket.evaluation:
            return
        entry = self._entries.get(ticket.number)
        if entry is None:
            self._entries[ticket.number] = Entry(Place.RUNNING, ticket.attempt, simulator)
            return
        if entry.place is not Place.LOST or ticket.attempt != entry.attempt + entry.blame:
            self._complain(f"attempt {ticket.attempt} of ticket {ticket.number} is granted while {self._where(entry)}")
        entry.place, entry.attempt, entry.simulator = Place.RUNNING, ticket.attempt, simulator

    def _runs(self, ticket: int, attempt: int) -> Entry | None:
        """The entry, if this attempt of the ticket runs; an older one was cancelled."""
        entry = self._entries.get(ticket)
        return entry if entry is not None and entry.place is Place.RUNNING and entry.attempt == attempt else None

    def _finish(self, event: records.SampleFinished) -> None:
        entry = self._runs(event.ticket, event.attempt)
        if entry is not None:
            entry.place, entry.oldest, entry.payload_id = self._ends_as, event.oldest, event.payload_id

    def _score(self, ticket: int) -> None:
        entry = self._entries.get(ticket)
        if entry is None or entry.place is not Place.SCORING:
            self._complain(f"ticket {ticket} is scored, but {self._where(entry) if entry else 'was never granted'}")
        else:
            entry.place = Place.FINISHED

    def _lose(self, ticket: int, attempt: int) -> None:
        entry = self._runs(ticket, attempt)
        if entry is not None:
            entry.place, entry.blame = Place.LOST, True

    def _lend(self, command: records.StartUpdate) -> None:
        if self._lent and self._more != command.update:
            self._complain(f"update {command.update} is lent while the one before is under way")
        self._more = command.update if command.more else -1
        for ticket, told in zip(command.tickets, command.oldest, strict=True):
            entry = self._entries.get(ticket)
            if entry is None:
                self._complain(f"ticket {ticket} is lent for update {command.update}, but was never granted")
                continue
            if entry.place is not Place.FINISHED:
                self._complain(f"ticket {ticket} is lent for update {command.update} while {self._where(entry)}")
            if told != entry.oldest:
                self._complain(f"ticket {ticket} is lent as of version {told}, but finished with {entry.oldest}")
            self._note_lag(ticket, command.version - entry.oldest)
            entry.place = Place.LENT
            self._lent.append(ticket)

    def _note_lag(self, ticket: int, lag: int) -> None:
        self._lags[lag] += 1
        if lag < 0 or (self._bound == "sample" and lag > math.ceil(self._max_lag)):
            self._complain(f"ticket {ticket} is lent {lag} versions late, {math.ceil(self._max_lag)} are allowed")

    def _train(self, update: int) -> None:
        if not self._lent or self._more >= 0:
            self._complain(f"update {update} is done, but {'only a part' if self._lent else 'nothing'} is lent")
        for ticket in self._lent:
            entry = self._entries[ticket]
            entry.place, entry.update = Place.TRAINED, update
        self._lent = []

    def _come_back(self) -> None:
        for ticket in self._lent:
            self._entries[ticket].place = Place.FINISHED
        self._lent = []

    def _roll_back(self, updates: int) -> None:
        for entry in self._entries.values():
            if entry.place is Place.TRAINED and entry.update >= updates:
                entry.place = Place.ROLLED_BACK

    # ------------------------------------------------------------ the verdict

    def settle(self, ledger: SampleLedger, *, may_roll_back: bool) -> None:
        """Compare with the ledger at the end: every ticket is somewhere, at the same place, and none is dropped.

        But those that the recipe wants dropped: filtered, or redundant. may_roll_back: some may be, where a lost
        trainer goes back by whole versions.
        """
        said = ledger.as_dict()
        allowed = records.NO_FAULTS | ({records.DropReason.ROLLBACK} if may_roll_back else set())
        if dropped := {reason.value: count for reason, count in ledger.dropped.items() if reason not in allowed}:
            self._complain(f"samples were dropped: {dropped}")
        found = Counter(entry.place for entry in self._entries.values())
        if len(self._entries) != ledger.started:
            self._complain(f"{len(self._entries)} tickets were granted, the ledger has {ledger.started} started")
        if ledger.dropped_total:
            return  # where a ticket was when it was dropped is not told
        for place in Place:
            if said[place] != found[place]:
                self._complain(f"{found[place]} tickets are {place}, the ledger has {said[place]}")
        mean = self.mean_lag
        if self._bound == "mean" and mean > self._max_lag:
            self._complain(f"the mean lag is {float(mean):.3f}, {self._max_lag:g} is allowed")

    @property
    def violations(self) -> list[str]:
        """What went wrong so far, in words; after the first ones only how many more."""
        return [*self._said, f"and {self._unsaid} more like these"] if self._unsaid else list(self._said)

    @property
    def mean_lag(self) -> Fraction:
        """Exactly; 0 before the first sample is lent."""
        total = self._lags.total()
        return Fraction(sum(lag * count for lag, count in self._lags.items()), total) if total else Fraction(0)

    def lag(self) -> dict[str, Any]:
        """mean and max over all lent samples, and samples by lag."""
        counts = {str(lag): count for lag, count in sorted(self._lags.items())}
        return {"mean": round(float(self.mean_lag), 4), "max": max(self._lags, default=0), "counts": counts}

    def _where(self, entry: Entry) -> str:
        update = f" in update {entry.update}" if entry.update >= 0 else ""
        return f"it is {entry.place}{update} (attempt {entry.attempt})"

    def _complain(self, what: str) -> None:
        if len(self._said) < _TOLD:
            self._said.append(what)
        else:
            self._unsaid += 1
