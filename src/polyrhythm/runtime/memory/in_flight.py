"""Everything that stations have been told and have not answered: attempts with their blocks, batches, updates, …

A block has one owner: free → writing (a simulator, for one attempt of a ticket) → finished (the conductor, by payload
id) → free. Only the conductor frees a finished block; a failed attempt frees its own. The blocks of a lost simulator
are freed by `lose`, after its process has ended. The arena has a block for each row and for each sample that admission
lets wait (`blocks_needed`), so no ticket ever waits for one. While a run is saved, a reader in another thread copies
the finished blocks. One that is released before its turn is held, and is given out last: then it is copied on the spot.

The conductor trusts the names and numbers in events. So where messages come from other processes, `accept` refuses an
event that no command leads to, because it was damaged, repeated or invented, before the conductor sees it.

Invariants: a block is in exactly one of the three states, or held; nobody reads a block any more when it is given out.
An event that was accepted belongs to the incarnation that joined last, and is not accepted again.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from polyrhythm.runtime import spans as kinds
from polyrhythm.runtime.memory.arena import ArenaLayout
from polyrhythm.runtime.messages import FromWorker, Joined, Report, Spans, WorkerJoined, sender_of
from polyrhythm.runtime.transport.drops import UnfitMessage
from polyrhythm.scheduler import records


def blocks_needed(
    rows: int,
    version_samples: int,
    max_lag: float,
    *,
    group_size: int = 1,
    extra_groups: int = 0,
    extra_members: int = 0,
    scored: int = 0,
) -> int:
    """Blocks of an arena: one that each row writes, and the finished samples that admission allows.

    version_samples: consumed for each version. A lent sample is ahead as well: it counts as consumed until its version
    is applied. extra_groups: these are outside admission, and of each all members but one may have finished (with the
    last one it takes the place of another). Extra members need none: a group that has enough gives up the others.

    scored: with scorers, samples that they have or that evaluations let wait for them, more than 0. Then a group has
    enough only once its members are scored, so all its members may have finished.
    """
    ahead = version_samples + math.floor(max_lag * version_samples + 1e-9)
    if not scored:
        return rows + ahead + extra_groups * (group_size - 1)
    groups = -(-ahead // group_size) + extra_groups
    return rows + scored + ahead + extra_groups * group_size + groups * extra_members


class BlockReader(Protocol):
    """Copies finished blocks in a thread of its own. is_pending: whether it has yet to copy this block; copy_now:
    copies the block if it is pending, so that it may be overwritten."""

    def is_pending(self, block: int) -> bool: ...
    def copy_now(self, block: int) -> None: ...


_Key = tuple[str, int, int]


@dataclass(slots=True)
class Attempt:
    """An attempt of a ticket under way, of an incarnation of `station` (-1: nobody has announced one). block: that it
    writes, of this table if it is `owned`; payload_id: of its sample, "" for one that nobody reads; version: of the
    ticket; shown: whether its texts are reported; answered: its end was accepted, and has not been passed on yet."""

    station: str
    incarnation: int
    block: int
    payload_id: str
    version: int
    shown: bool
    owned: bool
    answered: bool = False


@dataclass(slots=True)
class _Station:
    """One incarnation. addresses: of its parts; rows, sequences: by slot, its rows and the number of its next request;
    passes: batches that it serves, in their order; streams: that it answers, with whether it was told to abort them;
    due: keys of its other commands (`_KEYS`); update: that it works on, -1 for none; updates: most that it can have
    done; said: messages of a worker."""

    joined: Joined
    addresses: Collection[str]
    rows: dict[str, int] = field(default_factory=dict)
    sequences: dict[str, int] = field(default_factory=dict)
    passes: list[int] = field(default_factory=list)
    streams: dict[int, bool] = field(default_factory=dict)
    due: list[_Key] = field(default_factory=list)
    update: int = -1
    updates: int = 0
    said: int = 0


class InFlight:
    """The table of one run. layout: of its arena; attempts: under way, by ticket and attempt; check_values: raises
    ValueError for metrics of a report that the observers do not know."""

    def __init__(
        self, layout: ArenaLayout, check_values: Callable[[Mapping[str, float]], None] = lambda _: None
    ) -> None:
        self.layout, self._check_values = layout, check_values
        self.attempts: dict[tuple[int, int], Attempt] = {}
        self._free = list(range(layout.blocks))  # a heap: rows that start together get blocks side by side if possible
        self._finished: set[int] = set()
        self._held: deque[int] = deque()  # released, but the reader may have yet to copy them
        self._reader: BlockReader | None = None
        self._stations: dict[str, _Station] = {}
        self._newest = self._granted = -1

    # ------------------------------------------------------------ attempts and blocks

    def assign(self, command: records.StartRows) -> records.StartRows:
        """The command with a block in each grant."""
        while self._held and len(self._free) < len(command.grants):
            self._free_held()
        assert len(self._free) >= len(command.grants), f"no free block: {self.describe()}"
        command = replace(
            command, grants=tuple(replace(grant, block=heapq.heappop(self._free)) for grant in command.grants)
        )
        self._grant(command, owned=True)
        return command

    def _grant(self, command: records.StartRows, *, owned: bool) -> None:
        station = self._stations.get(command.simulator)
        incarnation = station.joined.incarnation if station is not None else -1
        for grant in command.grants:
            ticket = grant.ticket
            payload_id = "" if ticket.evaluation and not self.layout.scored else str(grant.block)
            self.attempts.setdefault(
                (ticket.number, ticket.attempt),
                Attempt(command.simulator, incarnation, grant.block, payload_id, ticket.version, ticket.shown, owned),
            )
            self._granted = max(self._granted, ticket.version)

    def on_event(self, event: records.Event) -> None:
        """An event that is passed on to the conductor: update the owners of blocks."""
        if isinstance(event, records.StationLost):
            self.lose(event.station)
        elif isinstance(event, records.SampleFinished | records.SampleFailed):
            block = self.attempts.pop((event.ticket, event.attempt)).block
            if isinstance(event, records.SampleFinished) and event.payload_id:
                assert event.payload_id == str(block), (
                    f"sample {event.ticket} should lie in {block}, not in {event.payload_id}"
                )
                self._finished.add(block)
            else:
                heapq.heappush(self._free, block)

    def lose(self, simulator: str) -> None:
        """Free the blocks that the simulator was writing. Its process must have ended."""
        for key, attempt in list(self.attempts.items()):
            if attempt.station == simulator:
                del self.attempts[key]
                heapq.heappush(self._free, attempt.block)

    def release(self, payload_ids: Iterable[str]) -> None:
        """Free finished blocks; KeyError if one is not finished. The empty payload id is an evaluation's that is not
        scored: its block is free."""
        for payload_id in payload_ids:
            if payload_id:
                block = int(payload_id)
                self._finished.remove(block)
                if self._reader is not None and self._reader.is_pending(block):
                    self._held.append(block)
                else:
                    heapq.heappush(self._free, block)

    def hand_over(self, reader: BlockReader) -> None:
        """Let `reader` copy the finished blocks while the run goes on. An earlier one has copied all of its own."""
        while self._held:
            self._free_held()
        self._reader = reader

    def _free_held(self) -> None:
        assert self._reader is not None, "blocks are held for a reader"
        block = self._held.popleft()
        self._reader.copy_now(block)
        heapq.heappush(self._free, block)

    def restore(self, payload_ids: Sequence[str]) -> None:
        """These blocks hold finished samples (of a resumed run)."""
        self._finished = {int(payload_id) for payload_id in payload_ids}
        self._free = sorted(set(self._free) - self._finished)

    def finished(self) -> tuple[str, ...]:
        return tuple(str(block) for block in sorted(self._finished))

    def describe(self) -> str:
        free = len(self._free) + len(self._held)
        return f"{free} blocks free, {len(self.attempts)} being written, {len(self._finished)} finished"

    # ------------------------------------------------------------ announcements and commands

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
        for slot, count in rows.items():
            if self.layout.slots.get(slot) != count:
                return f"slot {slot} has {count} rows; the run's has {self.layout.slots.get(slot, 0)}"
        for other, station in self._stations.items():
            if other != name and (shared := rows.keys() & station.rows.keys()):
                return f"slot {min(shared)} is {other}'s"
        return "" if before is None or before.rows == rows else f"{len(rows)} slots; before it had {len(before.rows)}"

    def on_command(self, command: object) -> None:
        if (key := _KEYS.get(type(command))) is not None:
            name, due = key(command)
            self._stations[name].due.append(due)
        match command:
            case records.Serve(generator=name, batch=batch):  # first: the most frequent
                self._stations[name].passes.append(batch.number)
            case records.ApplyWeights(version=version) | records.PublishWeights(version=version):
                self.on_version(version)
            case records.StartRows():
                self._grant(command, owned=False)
            case records.StartStream(generator=name, stream=stream):
                self._stations[name].streams[stream.number] = False
            case records.AbortStream(generator=name, stream=number):
                if number in self._stations[name].streams:
                    self._stations[name].streams[number] = True
            case records.StartUpdate(trainer=name, update=update):
                station = self._stations[name]
                station.update, station.updates = update, max(station.updates, update + 1)

    def on_version(self, version: int) -> None:
        self._newest = max(self._newest, version)

    def is_due(self, command: object) -> bool:
        """Whether main sent this command to the present incarnation, and nothing has answered it yet."""
        match command:
            case records.Serve(generator=name, batch=batch):
                return batch.number in self._of(name).passes
            case records.StartStream(generator=name, stream=stream):
                return stream.number in self._of(name).streams
            case records.StartRows(simulator=name, grants=grants):
                incarnation = self._of(name).joined.incarnation
                found = [self.attempts.get((grant.ticket.number, grant.ticket.attempt)) for grant in grants]
                return bool(found) and all(self._is_open(each, name, incarnation) for each in found)
            case records.StartUpdate(trainer=name, update=update):
                return 0 <= update == self._of(name).update
            case _ if (key := _KEYS.get(type(command))) is not None:
                name, due = key(command)
                return due in self._of(name).due
        return False

    def _of(self, name: str) -> _Station:
        return self._stations.get(name) or _Station(records.TrainerJoined(name, -1, 0), ())

    @staticmethod
    def _is_open(attempt: Attempt | None, station: str, incarnation: int) -> bool:
        return (
            attempt is not None
            and (attempt.station, attempt.incarnation) == (station, incarnation)
            and not attempt.answered
        )

    # ------------------------------------------------------------ events of stations

    def accept(self, event: object) -> None:
        """An event of a station has come. UnfitMessage: no command or announcement leads to it; nothing has changed."""
        accepting, answer = _ACCEPTING.get(type(event)), _ANSWERS.get(type(event))
        if accepting is None and answer is None:
            raise UnfitMessage("misdirected", f"{type(event).__name__} is not for the main process")
        if not (accepting(self, event) if accepting is not None else self._accept_answer(event)):
            raise UnfitMessage("impossible", f"nothing leads to {event}")

    def check_report(self, report: Report) -> None:
        """UnfitMessage: it is not of the update under way, or has unknown metrics."""
        update = self._station(report.station, report.incarnation).update
        if report.topic != "update" or not 0 <= report.step == update:
            due = f"update {update} is under way" if update >= 0 else "it has no update to do"
            raise UnfitMessage("impossible", f"a report of {report.station} on {report.topic!r} {report.step}; {due}")
        try:
            self._check_values(report.values)
        except ValueError as error:
            raise UnfitMessage("impossible", str(error)) from error

    def check_spans(self, spans: Spans, now: float, uncertainty_s: float = 0.0) -> None:
        """UnfitMessage: at `now`, the station cannot have measured that. uncertainty_s: of its clock."""
        station = self._station(spans.station, spans.incarnation)
        own = _KINDS[type(station.joined)]
        slots = station.rows if isinstance(station.joined, records.SimulatorJoined) else self.layout.slots
        for span in spans.spans:
            lane = span.lane in slots if span.kind in _OF_SLOTS else span.lane == spans.station
            plausible = -math.inf < span.begin <= span.end <= now + uncertainty_s and span.slots >= 1  # False for NaN
            if span.kind not in own or not lane or not plausible:
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
        self._station(event.simulator, event.incarnation)
        key = event.ticket, event.attempt
        attempt = self.attempts.get(key)
        if attempt is None or not self._is_open(attempt, event.simulator, event.incarnation):
            return False
        if isinstance(event, records.SampleFinished) and not (
            event.payload_id == attempt.payload_id
            and 0 < event.chunk_steps <= event.env_steps
            and (not event.payload_id or event.chunk_steps <= self.layout.steps)
            and attempt.version <= event.oldest <= event.newest <= self._newest
            and (attempt.shown or not event.texts)
        ):
            return False
        attempt.answered = True
        if not attempt.owned:
            del self.attempts[key]
        return True

    def _accept_weights(self, event: records.WeightsApplied) -> bool:
        """The version of the command, or a newer one that replaced it."""
        due = self._station(event.generator, event.incarnation).due
        for key in due:
            kind, pinned, version = key
            if (kind, pinned) == ("apply", event.pinned) and version <= event.version <= self._newest:
                due.remove(key)
                return True
        return False

    def _accept_update(self, event: records.UpdateDone) -> bool:
        station = self._station(event.trainer, event.incarnation)
        if not 0 <= event.update == station.update:
            return False
        station.update = -1
        return True

    def _accept_answer(self, event: Any) -> bool:
        """The answer to a command of `_KEYS` was due; it is not any more."""
        name, key, possible = _ANSWERS[type(event)](event)
        due = self._station(name, event.incarnation).due
        if not possible or key not in due:
            return False
        due.remove(key)
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


#: Station and key of a command that is answered once, in any order.
_KEYS: dict[type, Callable[[Any], tuple[str, _Key]]] = {
    records.ScoreSample: lambda command: (command.scorer, ("score", command.number, command.ticket)),
    records.ApplyWeights: lambda command: (command.generator, ("apply", command.pinned, command.version)),
    records.PublishWeights: lambda command: (command.trainer, ("publish", command.version, 0)),
    records.TakeDevice: lambda command: (command.station, ("take", command.device, 0)),
    records.YieldDevice: lambda command: (command.station, ("yield", command.device, 0)),
}
#: Station and key of the answer to such a command, and whether its numbers are possible.
_ANSWERS: dict[type, Callable[[Any], tuple[str, _Key, bool]]] = {
    records.SampleScored: lambda event: (
        event.scorer,
        ("score", event.number, event.ticket),
        math.isfinite(event.score),
    ),
    records.ScoringFailed: lambda event: (event.scorer, ("score", event.number, event.ticket), True),
    records.Published: lambda event: (event.trainer, ("publish", event.version, 0), True),
    records.DeviceTaken: lambda event: (event.station, ("take", event.device, 0), 0 <= event.seconds < math.inf),
    records.DeviceYielded: lambda event: (
        *(event.station, ("yield", event.device, 0)),
        0 <= event.seconds < math.inf and event.freed_bytes >= 0,
    ),
}
_ACCEPTING: dict[type, Callable[[InFlight, Any], bool]] = {
    records.RequestArrived: InFlight._accept_request,
    records.BatchDone: InFlight._accept_pass,
    records.StreamDone: InFlight._accept_stream,
    **dict.fromkeys((records.SampleFinished, records.SampleFailed), InFlight._accept_sample),
    records.UpdateDone: InFlight._accept_update,
    records.Checkpointed: InFlight._accept_checkpoint,
    records.WeightsApplied: InFlight._accept_weights,
    FromWorker: InFlight._accept_worker,
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
