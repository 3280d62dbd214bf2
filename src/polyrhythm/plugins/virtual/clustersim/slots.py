"""State of a simulated slot (its rows, its request, its stepping thread), and the episodes in its rows."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

from polyrhythm.plugins.virtual.clustersim.driver import Payload
from polyrhythm.plugins.virtual.clustersim.measures import TICKETS
from polyrhythm.plugins.virtual.clustersim.settings import SimulatorGroup
from polyrhythm.plugins.virtual.clustersim.station import VirtualStation
from polyrhythm.scheduler.records import DropReason, SampleEnd, SampleFailed, SampleFinished, Ticket
from polyrhythm.scheduler.samples.admission import mix


@dataclass(slots=True, eq=False)
class VirtualRow:
    """One row of an env batch. Free: no ticket. Parked: no ticket, in mid-episode.

    seed: of its episode; left: env steps until its episode ends; pace: seconds per chunk step, if the row has its own
    (else 0). chunk_steps, env_steps, oldest, newest: of the sample under way.
    """

    index: int
    ticket: Ticket | None = None
    parked: bool = False
    seed: int = 0
    left: int = 0
    pace: float = 0.0
    chunk_steps: int = 0
    env_steps: int = 0
    oldest: int = -1
    newest: int = -1

    def take(self, ticket: Ticket) -> None:
        """Begin a new sample; the episode may be a parked one."""
        self.ticket = ticket
        self.parked = False
        self.chunk_steps = self.env_steps = 0
        self.oldest = self.newest = -1

    def advance(self, chunk: int, version: int) -> int:
        """Do a chunk step of up to `chunk` env steps with actions of weights `version`; return the env steps done."""
        steps = min(chunk, self.left)
        self.left -= steps
        self.env_steps += steps
        self.chunk_steps += 1
        self.newest = max(self.newest, version)
        self.oldest = version if self.oldest < 0 else min(self.oldest, version)
        return steps

    def release(self, *, parked: bool) -> Ticket:
        ticket, self.ticket = self.ticket, None
        assert ticket is not None
        self.parked = parked
        return ticket


@dataclass(slots=True, eq=False)
class StepThread:
    """A thread that steps and resets slots one at a time, in the order in which they became ready."""

    busy: bool = False
    queue: deque[VirtualSlot] = field(default_factory=deque)


@dataclass(slots=True, eq=False)
class VirtualSlot:
    """A shard of an env batch. first: index of its first row.

    active: rows of the open request or the running step; ready: rows that join the next request; joining: granted rows
    that must still reset; resetting: rows being reset. outstanding: id of the unanswered request, or empty; in_batch: a
    generator has it; answer: version of the reply that waits for its step, or -1; running: the unit of work on the
    thread, or empty; queued: it waits for its thread. cancelled: attempts (ticket, attempt) to cancel as soon as the
    thread is done with them. version: highest among the active rows' tickets; evaluation: one of these is an
    evaluation's. times: random stream of its steps and resets. begun_s: seconds of samples that begin, which its next
    unit takes longer. state, since: for the measures.
    """

    name: str
    first: int
    rows: list[VirtualRow]
    thread: StepThread
    since: float
    times: random.Random
    begun_s: float = 0.0
    state: str = TICKETS
    active: list[VirtualRow] = field(default_factory=list)
    ready: list[VirtualRow] = field(default_factory=list)
    joining: list[VirtualRow] = field(default_factory=list)
    resetting: list[VirtualRow] = field(default_factory=list)
    cancelled: set[tuple[int, int]] = field(default_factory=set)
    sequence: int = 0
    outstanding: str = ""
    in_batch: bool = False
    answer: int = -1
    running: str = ""
    queued: bool = False
    version: int = 0
    evaluation: bool = False

    def on_tickets(self) -> None:
        """Update `version` and `evaluation` after `active` changed."""
        tickets = [row.ticket for row in self.active if row.ticket is not None]
        self.version = max((ticket.version for ticket in tickets), default=0)
        self.evaluation = any(ticket.evaluation for ticket in tickets)

    def rows_of(self, attempts: set[tuple[int, int]]) -> list[VirtualRow]:
        """The rows that work on these attempts (ticket, attempt)."""
        return [row for row in self.rows if row.ticket and (row.ticket.number, row.ticket.attempt) in attempts]

    def drop(self, row: VirtualRow) -> None:
        for rows in (self.active, self.ready, self.joining):
            if row in rows:
                rows.remove(row)


class VirtualEpisodes:
    """The episodes of one incarnation `station` of a simulator. An episode's length depends on its ticket alone, so
    retries on any row have the same length. Evaluation episodes are never cut into segments."""

    def __init__(self, station: VirtualStation, group: SimulatorGroup) -> None:
        self._station, self._group, self._seed = station, group, station.driver.seed
        self._ticket_rng = random.Random()

    def begin(self, row: VirtualRow, ticket: Ticket) -> None:
        rng, group = self._ticket_rng, self._group
        rng.seed((self._seed * 1_000_003 + ticket.seed) * 1_000_003 + ticket.noise)
        row.seed, row.left = ticket.seed, group.steps.draw(rng)
        if group.episode_time is not None:
            row.pace = group.episode_time.draw(rng) / -(-row.left // group.chunk)

    def tokens(self, row: VirtualRow) -> int:
        """Tokens of the answer to the row's next request, a function of its ticket and step."""
        if self._group.tokens is None:
            return 1
        assert row.ticket is not None, "an idle row asks for nothing"
        rng, ticket = self._ticket_rng, row.ticket
        noise = "same" if self._group.same_tokens else ticket.noise
        rng.seed(f"{self._seed}/{ticket.seed}/{noise}/{row.chunk_steps}/tokens")
        return self._group.tokens.draw(rng)

    def advance(self, slot: VirtualSlot, version: int) -> None:
        """Finish the active rows' chunk step with actions of weights `version`; remove rows whose sample ended."""
        group, measures, rng = self._group, self._station.measures, self._station.rng
        chunk, segment, raises, broken = group.chunk, group.segment_steps, group.raises, group.broken
        measures.chunk_steps += len(slot.active)
        ended = False
        for row in slot.active:
            measures.transitions += row.advance(chunk, version)
            if (raises and rng.random() < raises) or (
                broken and row.ticket and mix(row.ticket.seed, 2) / 2**63 < broken
            ):
                self.fail(row, DropReason.ENVIRONMENT_RAISED)
            elif row.left <= 0:
                self._finish(row, SampleEnd.TERMINATED)
            elif segment and row.chunk_steps >= segment and row.ticket and not row.ticket.evaluation:
                self._finish(row, SampleEnd.SEGMENT)
            else:
                continue
            ended = True
        if ended:
            slot.active = [row for row in slot.active if row.ticket is not None]
            slot.on_tickets()

    def fail(self, row: VirtualRow, reason: DropReason) -> None:
        ticket, station = row.release(parked=False), self._station
        station.measures.failed += 1
        station.emit(SampleFailed(station.name, station.incarnation, ticket.number, ticket.attempt, reason))

    def _finish(self, row: VirtualRow, end: SampleEnd) -> None:
        ticket, station = row.release(parked=end is SampleEnd.SEGMENT), self._station
        payload_id = f"{station.name}@{station.incarnation}:{ticket.number}.{ticket.attempt}"
        while payload_id in station.driver.payloads:  # a scorer still reads the lost payload of this attempt
            payload_id += "+"
        # The outcome is fixed for solved and hopeless initial states, otherwise by the noise.
        place = mix(ticket.seed, 1) / 2**63
        success = place < self._group.solved or (place < 1.0 - self._group.hopeless and bool(ticket.noise & 1))
        sample = Payload(ticket.number, row.env_steps, row.chunk_steps, row.oldest, success, station.host)
        station.driver.payloads[payload_id] = sample
        station.measures.samples += 1
        success = success and not station.driver.scored
        identity = (station.name, station.incarnation, ticket.number, ticket.attempt)
        steps, versions = (row.chunk_steps, row.env_steps), (row.oldest, row.newest)
        station.emit(SampleFinished(*identity, payload_id, end, *steps, *versions, success, float(success)))
