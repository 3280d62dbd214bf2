"""Checks each event of a station against its announcement and the commands that it was sent.

The conductor trusts the names and numbers in events. So an event that no command leads to, because it was damaged,
repeated or invented, is dropped here before the conductor sees it.

Invariant: an event that was accepted belongs to the incarnation that joined last, and is not accepted again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from polyrhythm.runtime import spans as kinds
from polyrhythm.runtime.memory.arena import ArenaLayout
from polyrhythm.runtime.messages import FromWorker, Joined, Report, Spans, WorkerJoined, sender_of
from polyrhythm.runtime.spans import Span
from polyrhythm.runtime.transport.drops import UnfitMessage
from polyrhythm.scheduler import records


@dataclass(slots=True)
class _Sample:
    """One attempt under way. payload_id: of its sample; version: of its ticket; shown: whether it says its texts."""

    payload_id: str
    version: int
    shown: bool


@dataclass(slots=True)
class _Station:
    """One incarnation. addresses: of its parts; rows, sequences: by slot, its rows and the number of its next request;
    samples: under way by ticket and attempt; passes: batches that it serves, in their order; streams: that it answers,
    with whether it was told to abort them; scores: (number, ticket) of samples that it scores; applying: (version,
    pinned) that it was told to apply; switches: devices to take (True) or to leave; update: that it works on, -1 for
    none; publishing: versions; updates: most that it can have done; said: messages of a worker."""

    joined: Joined
    addresses: Collection[str]
    rows: dict[str, int] = field(default_factory=dict)
    sequences: dict[str, int] = field(default_factory=dict)
    samples: dict[tuple[int, int], _Sample] = field(default_factory=dict)
    passes: list[int] = field(default_factory=list)
    streams: dict[int, bool] = field(default_factory=dict)
    scores: set[tuple[int, int]] = field(default_factory=set)
    applying: list[tuple[int, bool]] = field(default_factory=list)
    switches: list[tuple[int, bool]] = field(default_factory=list)
    update: int = -1
    publishing: set[int] = field(default_factory=set)
    updates: int = 0
    said: int = 0


class ExpectedEvents:
    """Events that the present incarnation of each station may send."""

    def __init__(self, layout: ArenaLayout) -> None:
        self._layout = layout
        self._stations: dict[str, _Station] = {}
        self._newest = -1
        self._granted = -1

    # ------------------------------------------------------------ stations and commands

    def join(self, joined: Joined, addresses: Collection[str]) -> None:
        """Take in a station's announcement, with the addresses of its parts. UnfitMessage: it contradicts the run."""
        name, _ = sender_of(joined) or ("", 0)
        before = self._stations.get(name)
        station = _Station(joined, addresses)
        parts = 1
        if isinstance(joined, records.SimulatorJoined):
            parts = max(1, len(joined.batches))
            station.rows = {slot.slot: slot.rows for info in joined.batches for slot in info.slots}
            station.sequences = dict.fromkeys(station.rows, 0)
        if isinstance(joined, records.TrainerJoined):
            station.updates = joined.updates if before is None else before.updates
        wrong = self._why_not(name, station, before)
        if len(addresses) != parts:
            wrong = f"it has {len(addresses)} addresses for {parts} parts"
        if wrong:
            raise UnfitMessage("impossible", f"the announcement of {name} ({type(joined).__name__}): {wrong}")
        self._stations[name] = station

    def _why_not(self, name: str, station: _Station, before: _Station | None) -> str:
        """Why it cannot join, "" if it can: kind, slots, weights and updates must be possible for it."""
        joined = station.joined
        if before is not None and type(before.joined) is not type(joined):
            return f"it was a {type(before.joined).__name__} before"
        match joined:
            case records.SimulatorJoined():
                return self._why_not_slots(name, station.rows, before)
            case records.TrainerJoined(updates=updates):
                return "" if 0 <= updates <= station.updates else f"{updates} updates; at most {station.updates}"
            case WorkerJoined():
                return ""
            case records.GeneratorJoined(version=version, depth=depth):
                if depth not in (1, 2):
                    return f"{depth} batches at once; 1 or 2"
                return "" if -1 <= version <= self._newest else f"version {version}; the newest is {self._newest}"
            case records.ScorerJoined(places=places):
                return "" if places > 0 else f"{places} places"

    def _why_not_slots(self, name: str, rows: dict[str, int], before: _Station | None) -> str:
        """The reason why a simulator cannot have these slots, "" if it can."""
        for slot, count in rows.items():
            if self._layout.slots.get(slot) != count:
                return f"slot {slot} has {count} rows; the run's has {self._layout.slots.get(slot, 0)}"
        for other, station in self._stations.items():
            if other != name and (shared := rows.keys() & station.rows.keys()):
                return f"slot {min(shared)} is {other}'s"
        return "" if before is None or before.rows == rows else f"{len(rows)} slots; before it had {len(before.rows)}"

    def note(self, command: object) -> None:
        """A command has been sent to its station."""
        noting = _NOTING.get(type(command))
        if noting is not None:
            noting(self, command)

    def _note_pass(self, command: records.Serve) -> None:
        self._stations[command.generator].passes.append(command.batch.number)

    def _note_stream(self, command: records.StartStream) -> None:
        self._stations[command.generator].streams[command.stream.number] = False

    def _note_abort(self, command: records.AbortStream) -> None:
        streams = self._stations[command.generator].streams
        if command.stream in streams:
            streams[command.stream] = True

    def _note_grants(self, start: records.StartRows) -> None:
        station = self._stations[start.simulator]
        for grant in start.grants:
            ticket = grant.ticket
            payload_id = "" if ticket.evaluation and not self._layout.scored else str(grant.block)
            station.samples[ticket.number, ticket.attempt] = _Sample(payload_id, ticket.version, ticket.shown)
            self._granted = max(self._granted, ticket.version)

    def _note_scoring(self, command: records.ScoreSample) -> None:
        self._stations[command.scorer].scores.add((command.number, command.ticket))

    def _note_weights(self, command: records.ApplyWeights) -> None:
        self._stations[command.generator].applying.append((command.version, command.pinned))
        self._newest = max(self._newest, command.version)

    def _note_update(self, command: records.StartUpdate) -> None:
        station = self._stations[command.trainer]
        station.update, station.updates = command.update, max(station.updates, command.update + 1)

    def _note_publication(self, command: records.PublishWeights) -> None:
        self._stations[command.trainer].publishing.add(command.version)
        self._newest = max(self._newest, command.version)

    def _note_switch(self, command: records.TakeDevice | records.YieldDevice) -> None:
        takes = isinstance(command, records.TakeDevice)
        self._stations[command.station].switches.append((command.device, takes))

    def note_version(self, version: int) -> None:
        """Weights of this version exist."""
        self._newest = max(self._newest, version)

    def is_due(self, command: object) -> bool:  # noqa: PLR0911 - a kind of command each
        """Whether main sent this command to the present incarnation, and nothing has answered it yet."""
        match command:
            case records.Serve(generator=name, batch=batch):
                return batch.number in self._of(name).passes
            case records.StartStream(generator=name, stream=stream):
                return stream.number in self._of(name).streams
            case records.StartRows(simulator=name, grants=grants):
                samples = self._of(name).samples
                return bool(grants) and all((g.ticket.number, g.ticket.attempt) in samples for g in grants)
            case records.ScoreSample(scorer=name, number=number, ticket=ticket):
                return (number, ticket) in self._of(name).scores
            case records.ApplyWeights(generator=name, version=version, pinned=pinned):
                return (version, pinned) in self._of(name).applying
            case records.StartUpdate(trainer=name, update=update):
                return 0 <= update == self._of(name).update
            case records.PublishWeights(trainer=name, version=version):
                return version in self._of(name).publishing
            case records.TakeDevice(station=name, device=device):
                return (device, True) in self._of(name).switches
            case records.YieldDevice(station=name, device=device):
                return (device, False) in self._of(name).switches
        return False

    def _of(self, name: str) -> _Station:
        return self._stations.get(name) or _Station(records.TrainerJoined(name, -1, 0), ())

    # ------------------------------------------------------------ what they say

    def accept(self, event: object) -> None:
        """Note an event of a station. UnfitMessage: no command or announcement leads to it."""
        accepting = _ACCEPTING.get(type(event))
        if accepting is None:
            raise UnfitMessage("misdirected", f"{type(event).__name__} is not for the main process")
        if not accepting(self, event):
            raise UnfitMessage("impossible", f"nothing leads to {event}")

    def check_report(self, report: Report) -> None:
        """UnfitMessage: it is not of the update under way."""
        update = self._station(report.station, report.incarnation).update
        if report.topic != "update" or not 0 <= report.step == update:
            due = f"update {update} is under way" if update >= 0 else "it has no update to do"
            raise UnfitMessage("impossible", f"a report of {report.station} on {report.topic!r} {report.step}; {due}")

    def check_spans(self, spans: Spans, now: float, uncertainty_s: float = 0.0) -> None:
        """UnfitMessage: at `now`, the station cannot have measured that. uncertainty_s: of its clock."""
        station = self._station(spans.station, spans.incarnation)
        own = _KINDS[type(station.joined)]
        slots = station.rows if isinstance(station.joined, records.SimulatorJoined) else self._layout.slots
        for span in spans.spans:
            lane = span.lane in slots if span.kind in _OF_SLOTS else span.lane == spans.station
            if span.kind not in own or not lane or not _is_plausible(span, now + uncertainty_s):
                raise UnfitMessage("impossible", f"{spans.station} cannot have measured {span}")
        if spans.lost < 0:
            raise UnfitMessage("impossible", f"{spans.station} cannot have lost {spans.lost} spans")

    def _station(self, name: str, incarnation: int) -> _Station:
        station = self._stations.get(name)
        if station is None or station.joined.incarnation != incarnation:
            raise UnfitMessage("impossible", f"an event of {name}, which has not announced itself")
        return station

    def _accept_request(self, event: records.RequestArrived) -> bool:
        station, slot = self._station(event.simulator, event.incarnation), event.slot
        if not (
            station.sequences.get(slot) == event.sequence
            and 0 < event.rows <= station.rows[slot]
            and 0 <= event.version <= self._granted
            and event.reply_to in station.addresses
        ):
            return False
        station.sequences[slot] += 1
        return True

    def _accept_pass(self, event: records.BatchDone) -> bool:
        """Passes end in the order in which they were told."""
        passes = self._station(event.generator, event.incarnation).passes
        if passes[:1] != [event.batch]:
            return False
        del passes[0]
        return True

    def _accept_stream(self, event: records.StreamDone) -> bool:
        """An abort only where it was told to; a reply carries a version, and tokens."""
        streams = self._station(event.generator, event.incarnation).streams
        told = streams.get(event.stream)
        lowest = -1 if event.aborted else 0
        if told is None or (event.aborted and not told) or not lowest <= event.version <= self._newest:
            return False
        if event.tokens < (0 if event.aborted else 1):
            return False
        del streams[event.stream]
        return True

    def _accept_sample(self, event: records.SampleFinished | records.SampleFailed) -> bool:
        samples = self._station(event.simulator, event.incarnation).samples
        sample = samples.get((event.ticket, event.attempt))
        if sample is None:
            return False
        if isinstance(event, records.SampleFinished) and not (
            event.payload_id == sample.payload_id
            and 0 < event.chunk_steps <= event.env_steps
            and (not event.payload_id or event.chunk_steps <= self._layout.steps)
            and sample.version <= event.oldest <= event.newest <= self._newest
            and (sample.shown or not event.texts)
        ):
            return False
        del samples[event.ticket, event.attempt]
        return True

    def _accept_score(self, event: records.SampleScored | records.ScoringFailed) -> bool:
        scores, due = self._station(event.scorer, event.incarnation).scores, (event.number, event.ticket)
        if due not in scores or (isinstance(event, records.SampleScored) and not math.isfinite(event.score)):
            return False
        scores.remove(due)
        return True

    def _accept_weights(self, event: records.WeightsApplied) -> bool:
        """The version of the command, or a newer one that replaced it."""
        applying = self._station(event.generator, event.incarnation).applying
        for version, pinned in applying:
            if pinned == event.pinned and version <= event.version <= self._newest:
                applying.remove((version, pinned))
                return True
        return False

    def _accept_update(self, event: records.UpdateDone) -> bool:
        station = self._station(event.trainer, event.incarnation)
        if not 0 <= event.update == station.update:
            return False
        station.update = -1
        return True

    def _accept_publication(self, event: records.Published) -> bool:
        publishing = self._station(event.trainer, event.incarnation).publishing
        if event.version not in publishing:
            return False
        publishing.remove(event.version)
        return True

    def _accept_switch(self, event: records.DeviceTaken | records.DeviceYielded) -> bool:
        switches = self._station(event.station, event.incarnation).switches
        due = (event.device, isinstance(event, records.DeviceTaken))
        if due not in switches or not 0 <= event.seconds < math.inf or getattr(event, "freed_bytes", 0) < 0:
            return False
        switches.remove(due)
        return True

    def _accept_worker(self, event: FromWorker) -> bool:
        station = self._station(event.station, event.incarnation)
        if not isinstance(station.joined, WorkerJoined) or event.number != station.said:
            return False
        station.said += 1
        return True

    def _accept_checkpoint(self, event: records.Checkpointed) -> bool:
        station = self._station(event.trainer, event.incarnation)
        joined = station.joined
        return isinstance(joined, records.TrainerJoined) and joined.updates <= event.updates <= station.updates


_NOTING: dict[type, Callable[[ExpectedEvents, Any], None]] = {
    records.Serve: ExpectedEvents._note_pass,
    records.StartStream: ExpectedEvents._note_stream,
    records.AbortStream: ExpectedEvents._note_abort,
    records.StartRows: ExpectedEvents._note_grants,
    records.ScoreSample: ExpectedEvents._note_scoring,
    records.ApplyWeights: ExpectedEvents._note_weights,
    records.StartUpdate: ExpectedEvents._note_update,
    records.PublishWeights: ExpectedEvents._note_publication,
    **dict.fromkeys((records.TakeDevice, records.YieldDevice), ExpectedEvents._note_switch),
}
_ACCEPTING: dict[type, Callable[[ExpectedEvents, Any], bool]] = {
    records.RequestArrived: ExpectedEvents._accept_request,
    records.BatchDone: ExpectedEvents._accept_pass,
    records.StreamDone: ExpectedEvents._accept_stream,
    **dict.fromkeys((records.SampleFinished, records.SampleFailed), ExpectedEvents._accept_sample),
    **dict.fromkeys((records.SampleScored, records.ScoringFailed), ExpectedEvents._accept_score),
    records.UpdateDone: ExpectedEvents._accept_update,
    records.Published: ExpectedEvents._accept_publication,
    records.Checkpointed: ExpectedEvents._accept_checkpoint,
    records.WeightsApplied: ExpectedEvents._accept_weights,
    **dict.fromkeys((records.DeviceTaken, records.DeviceYielded), ExpectedEvents._accept_switch),
    FromWorker: ExpectedEvents._accept_worker,
}


#: Kinds of spans of slots; and kinds of spans by kind of station.
_OF_SLOTS = frozenset((kinds.STEPPING, kinds.RESETTING, kinds.TICKETS, kinds.THREAD, kinds.GENERATOR, kinds.IN_BATCH))
_SWITCHES = frozenset((kinds.TAKE, kinds.YIELD))
_KINDS: dict[type, frozenset[str]] = {
    records.SimulatorJoined: _OF_SLOTS - {kinds.IN_BATCH} | _SWITCHES,
    records.GeneratorJoined: frozenset((kinds.PASS, kinds.APPLY, kinds.IN_BATCH)) | _SWITCHES,
    records.TrainerJoined: frozenset((kinds.UPDATE, kinds.PUBLISH, kinds.SAVE)) | _SWITCHES,
    records.ScorerJoined: frozenset((kinds.SCORE,)),
    WorkerJoined: frozenset(),
}


def _is_plausible(span: Span, now: float) -> bool:
    """Whether it begins before it ends and ends by now; False for NaN."""
    return -math.inf < span.begin <= span.end <= now and span.slots >= 1
