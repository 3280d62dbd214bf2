"""Simulates the episodes in a virtual simulator's rows, and emits their finished and failed samples."""

from __future__ import annotations

import random

from polyrhythm.plugins.virtual.clustersim.driver import Payload
from polyrhythm.plugins.virtual.clustersim.settings import SimulatorGroup
from polyrhythm.plugins.virtual.clustersim.stations.slots import VirtualRow, VirtualSlot
from polyrhythm.plugins.virtual.clustersim.stations.station import VirtualStation
from polyrhythm.scheduler.records import DropReason, SampleEnd, SampleFailed, SampleFinished, Ticket
from polyrhythm.scheduler.samples.admission import mix


class VirtualEpisodes:
    """The episodes of one incarnation `station` of a simulator.

    An episode's length depends on its ticket alone, so retries on any row have the same length. Evaluation episodes are
    never cut into segments.
    """

    def __init__(self, station: VirtualStation, group: SimulatorGroup, seed: int) -> None:
        self._station = station
        self._group = group
        self._seed = seed
        self._ticket_rng = random.Random()

    def begin(self, row: VirtualRow, ticket: Ticket) -> None:
        rng, group = self._ticket_rng, self._group
        rng.seed((self._seed * 1_000_003 + ticket.seed) * 1_000_003 + ticket.noise)
        row.left = group.steps.draw(rng)
        if group.episode_time is not None:
            row.pace = group.episode_time.draw(rng) / -(-row.left // group.chunk)

    def reset_seconds(self, slot: VirtualSlot) -> float:
        return self._group.reset.draw(self._station.rng, len(slot.resetting))

    def tokens(self, row: VirtualRow) -> int:
        """Tokens of the answer to the row's next request, a function of its ticket and step."""
        if self._group.tokens is None:
            return 1
        assert row.ticket is not None, "an idle row asks for nothing"
        rng, ticket = self._ticket_rng, row.ticket
        noise = "same" if self._group.same_tokens else ticket.noise
        rng.seed(f"{self._seed}/{ticket.seed}/{noise}/{row.chunk_steps}/tokens")
        return self._group.tokens.draw(rng)

    def step_seconds(self, slot: VirtualSlot) -> float:
        if self._group.episode_time is not None:
            return max(row.pace for row in slot.active)
        return self._group.step.draw(self._station.rng, len(slot.active))

    def advance(self, slot: VirtualSlot, version: int) -> None:
        """Finish the active rows' chunk step with actions of weights `version`; remove rows whose sample ended."""
        group, measures, rng = self._group, self._station.measures, self._station.rng
        chunk, segment, raises, broken = group.chunk, group.segment_steps, group.raises, group.broken
        measures.chunk_steps += len(slot.active)
        ended = False
        for row in slot.active:
            measures.transitions += row.advance(chunk, version)
            if (raises and rng.random() < raises) or (broken and self._is_broken(row, broken)):
                self.fail(row, DropReason.ENVIRONMENT_RAISED)
            elif row.left <= 0:
                self._finish(row, SampleEnd.TERMINATED)
            elif segment and row.chunk_steps >= segment and row.trains:
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
        success = self._succeeds(ticket)
        sample = Payload(ticket.number, row.env_steps, row.chunk_steps, row.oldest, success, station.host)
        station.driver.payloads[payload_id] = sample
        station.measures.samples += 1
        success = success and not station.driver.scored
        station.emit(
            SampleFinished(
                station.name,
                station.incarnation,
                ticket.number,
                ticket.attempt,
                payload_id,
                end,
                row.chunk_steps,
                row.env_steps,
                row.oldest,
                row.newest,
                success,
                float(success),
            )
        )

    @staticmethod
    def _is_broken(row: VirtualRow, share: float) -> bool:
        return row.ticket is not None and mix(row.ticket.seed, 2) / 2**63 < share

    def _succeeds(self, ticket: Ticket) -> bool:
        """The outcome: fixed for solved and hopeless initial states, otherwise by the noise."""
        group = self._group
        place = mix(ticket.seed, 1) / 2**63
        if place < group.solved:
            return True
        return place < 1.0 - group.hopeless and bool(ticket.noise & 1)
