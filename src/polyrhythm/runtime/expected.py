"""What each station may say next, by what it has announced and was told; everything else is impossible.

Events carry numbers and names that the conductor takes for true. Here each is held against the commands that went out,
so that a damaged, repeated or invented event is dropped before anyone acts on it.

Invariant: an event that was accepted belongs to the incarnation that joined last, and is not accepted again.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from polyrhythm.flow import records
from polyrhythm.runtime.arena import ArenaLayout
from polyrhythm.runtime.drops import UnfitMessage
from polyrhythm.runtime.messages import Report, Start

Joined = records.SimulatorJoined | records.GeneratorJoined | records.TrainerJoined


@dataclass(slots=True)
class _Sample:
    """One attempt under way. handle: what its sample will have; version: of its ticket."""

    handle: str
    version: int


@dataclass(slots=True)
class _Station:
    """One incarnation. addresses: of its inboxes; rows, sequences: of each slot, and its next request's number;
    samples: under way by ticket and attempt; passes: batches that it serves; applying: (version, pinned) that it was
    told to apply; update: that it works on, -1 for none; publishing: versions; updates: most that it can have done."""

    joined: Joined
    addresses: Collection[str]
    rows: dict[str, int] = field(default_factory=dict)
    sequences: dict[str, int] = field(default_factory=dict)
    samples: dict[tuple[int, int], _Sample] = field(default_factory=dict)
    passes: set[int] = field(default_factory=set)
    applying: list[tuple[int, bool]] = field(default_factory=list)
    update: int = -1
    publishing: set[int] = field(default_factory=set)
    updates: int = 0


class ExpectedEvents:
    """Of the present incarnation of each station. newest: version of the weights that anyone was told of."""

    def __init__(self, layout: ArenaLayout) -> None:
        self._layout = layout
        self._stations: dict[str, _Station] = {}
        self._newest = -1
        self._granted = -1

    # ------------------------------------------------------------ stations and commands

    def join(self, joined: Joined, addresses: Collection[str]) -> None:
        """A station announces itself, with the addresses of its inboxes. UnfitMessage: it cannot be so."""
        name = name_of(joined)
        before = self._stations.get(name)
        if before is not None and type(before.joined) is not type(joined):
            raise UnfitMessage("impossible", f"{name} came back as another kind of station")
        station = _Station(joined, addresses)
        parts = 1
        if isinstance(joined, records.SimulatorJoined):
            parts = len(joined.batches)
            station.rows = {slot.slot: slot.rows for info in joined.batches for slot in info.slots}
            station.sequences = dict.fromkeys(station.rows, 0)
            known = all(self._layout.slots.get(slot) == rows for slot, rows in station.rows.items())
            if not known or (
                isinstance(old := before and before.joined, type(joined)) and old.batches != joined.batches
            ):
                raise UnfitMessage("impossible", f"{name} announced slots that are not its own")
        if isinstance(joined, records.TrainerJoined):
            most = joined.updates if before is None else before.updates
            if not 0 <= joined.updates <= most:
                raise UnfitMessage("impossible", f"{name} came back with {joined.updates} updates; {most} can be")
            station.updates = most
        if isinstance(joined, records.GeneratorJoined) and not -1 <= joined.version <= self._newest:
            raise UnfitMessage(
                "impossible", f"{name} announced weights {joined.version}; {self._newest} are the newest"
            )
        if len(addresses) != max(1, parts):
            raise UnfitMessage("impossible", f"{name} announced {len(addresses)} inboxes for {parts} parts")
        self._stations[name] = station

    def note(self, command: object) -> None:
        """A command has been sent to its station."""
        match command:
            case records.Serve(generator=name, batch=batch):
                self._stations[name].passes.add(batch.number)
            case Start():
                self._note_grants(command)
            case records.ApplyWeights(generator=name, version=version, pinned=pinned):
                self._stations[name].applying.append((version, pinned))
                self._newest = max(self._newest, version)
            case records.LendSamples(trainer=name, update=update):
                station = self._stations[name]
                station.update, station.updates = update, max(station.updates, update + 1)
            case records.PublishWeights(trainer=name, version=version):
                self._stations[name].publishing.add(version)
                self._newest = max(self._newest, version)

    def _note_grants(self, start: Start) -> None:
        station = self._stations[start.command.simulator]
        for grant, block in zip(start.command.grants, start.blocks, strict=True):
            ticket = grant.ticket
            handle = "" if ticket.evaluation else str(block)
            station.samples[ticket.number, ticket.attempt] = _Sample(handle, ticket.version)
            self._granted = max(self._granted, ticket.version)

    # ------------------------------------------------------------ what they say

    def accept(self, event: object) -> None:
        """Take note of an event of a station. UnfitMessage: nothing that was told or announced leads to it."""
        match event:
            case records.RequestArrived():
                possible = self._accept_request(event)
            case records.BatchDone(generator=name, epoch=epoch, batch=batch):
                passes = self._station(name, epoch).passes
                possible = batch in passes
                passes.discard(batch)
            case records.SampleFinished() | records.SampleFailed():
                possible = self._accept_sample(event)
            case records.UpdateDone(trainer=name, epoch=epoch, update=update):
                station = self._station(name, epoch)
                possible = 0 <= update == station.update
                station.update = -1 if possible else station.update
            case records.Published(trainer=name, epoch=epoch, version=version):
                publishing = self._station(name, epoch).publishing
                possible = version in publishing
                publishing.discard(version)
            case records.Checkpointed(trainer=name, epoch=epoch, updates=updates):
                station = self._station(name, epoch)
                possible = self._least_updates(station) <= updates <= station.updates
            case records.WeightsApplied():
                possible = self._accept_weights(event)
            case _:
                raise UnfitMessage("misdirected", f"{type(event).__name__} is not for the main process")
        if not possible:
            raise UnfitMessage("impossible", f"nothing leads to {event}")

    def check_report(self, report: Report) -> None:
        """UnfitMessage: it is not of the update under way."""
        if report.topic != "update" or not 0 <= report.step == self._station(report.station, report.epoch).update:
            raise UnfitMessage("impossible", f"a report of {report.station} on {report.topic!r} {report.step}")

    def _station(self, name: str, epoch: int) -> _Station:
        station = self._stations.get(name)
        if station is None or station.joined.epoch != epoch:
            raise UnfitMessage("impossible", f"an event of {name}, which has not announced itself")
        return station

    def _accept_request(self, event: records.RequestArrived) -> bool:
        station, slot = self._station(event.simulator, event.epoch), event.slot
        if not (
            station.sequences.get(slot) == event.sequence
            and 0 < event.rows <= station.rows[slot]
            and 0 <= event.version <= self._granted
            and event.handle in station.addresses
        ):
            return False
        station.sequences[slot] += 1
        return True

    def _accept_sample(self, event: records.SampleFinished | records.SampleFailed) -> bool:
        samples = self._station(event.simulator, event.epoch).samples
        sample = samples.get((event.ticket, event.attempt))
        if sample is None:
            return False
        if isinstance(event, records.SampleFinished) and not (
            event.handle == sample.handle
            and 0 < event.chunk_steps <= event.env_steps
            and (not event.handle or event.chunk_steps <= self._layout.steps)
            and sample.version <= event.oldest <= event.newest <= self._newest
        ):
            return False
        del samples[event.ticket, event.attempt]
        return True

    def _accept_weights(self, event: records.WeightsApplied) -> bool:
        """What was told, or newer weights that have come since."""
        applying = self._station(event.generator, event.epoch).applying
        for told in applying:
            if told[1] == event.pinned and told[0] <= event.version <= self._newest:
                applying.remove(told)
                return True
        return False

    @staticmethod
    def _least_updates(station: _Station) -> int:
        return station.joined.updates if isinstance(station.joined, records.TrainerJoined) else 1


def name_of(joined: Joined) -> str:
    """The station that announces itself."""
    match joined:
        case records.SimulatorJoined(simulator=name) | records.GeneratorJoined(generator=name):
            return name
        case records.TrainerJoined(trainer=name):
            return name
