"""Serving by streams: who gets which request, when; what is aborted; weights between two decode steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from polyrhythm.conductors import build_conductor
from polyrhythm.scheduler.records import (
    AbortStream,
    ApplyWeights,
    CancelRow,
    DropReason,
    EnvBatchInfo,
    GeneratorJoined,
    Published,
    RefuseRequest,
    RequestArrived,
    SampleEnd,
    SampleFailed,
    SampleFinished,
    SimulatorJoined,
    SlotInfo,
    StartRows,
    StartStream,
    StationLost,
    StreamDone,
    TrainerJoined,
    TrainUntil,
    WeightsApplied,
    WeightsOffered,
)
from polyrhythm.scheduler.settings import SchedulerSettings

SETTINGS = SchedulerSettings(batch_size=8, max_lag=2.0, batching="streams", max_rows=2)


class Stand:
    """A conductor with one simulator of slots of these rows, and generators that hold version 0."""

    def __init__(self, *rows: int, generators: int = 1, settings: SchedulerSettings = SETTINGS) -> None:
        self.conductor, self.now = build_conductor(settings), 0.0
        slots = tuple(EnvBatchInfo(f"b{i}", (SlotInfo(f"s{i}", 0, count),)) for i, count in enumerate(rows))
        self.tell(TrainerJoined("t", 0), WeightsOffered(0))
        for i in range(generators):
            self.tell(GeneratorJoined(f"g{i}", 0), WeightsApplied(f"g{i}", 0, 0))
        started = self.tell(SimulatorJoined("sim", 0, slots), TrainUntil(5))
        self.tickets = {command.slot: command.grants for command in started if isinstance(command, StartRows)}
        self.sequences = dict.fromkeys(self.tickets, -1)

    def tell(self, *events):
        commands = []
        for event in events:
            self.now += 1.0
            commands += self.conductor.handle(event, self.now)
        return commands

    def ask(self, number):
        slot = f"s{number}"
        self.sequences[slot] += 1
        sequence, rows = self.sequences[slot], len(self.tickets[slot])
        return self.tell(RequestArrived("sim", 0, slot, sequence, rows, 0, f"{slot}#{sequence}"))

    def done(self, generator, stream, *, aborted=False):
        return self.tell(StreamDone(generator, 0, stream, 0, 5, aborted=aborted))

    def cancel(self, number):
        """The sample of the slot's only row fails."""
        ticket = self.tickets[f"s{number}"][0].ticket
        return self.tell(SampleFailed("sim", 0, ticket.number, ticket.attempt, DropReason.ENVIRONMENT_RAISED))


def started(commands):
    return [(c.generator, c.stream.number, c.stream.request.slot) for c in commands if isinstance(c, StartStream)]


def test_a_request_begins_as_soon_as_there_is_a_place_and_goes_to_the_least_loaded() -> None:
    stand = Stand(1, 1, 1, 1, 1, generators=2)
    assert [started(stand.ask(number)) for number in range(5)] == [
        [("g0", 1, "s0")],
        [("g1", 2, "s1")],
        [("g0", 3, "s2")],
        [("g1", 4, "s3")],
        [],
    ]
    assert stand.conductor.deadline() == float("inf"), "time alone starts nothing"
    assert started(stand.done("g1", 4)) == [("g1", 5, "s4")]


def test_a_request_is_not_split_and_one_larger_than_all_places_goes_alone() -> None:
    stand = Stand(1, 2, 3)
    assert started(stand.ask(0)) == [("g0", 1, "s0")]
    assert not started(stand.ask(1))
    assert not started(stand.ask(2))
    assert started(stand.done("g0", 1)) == [("g0", 2, "s1")]
    assert started(stand.done("g0", 2)) == [("g0", 3, "s2")]


def test_the_stream_of_a_slot_that_stopped_is_aborted_and_keeps_its_place_until_it_is_gone() -> None:
    stand = Stand(1, 1, 1)
    for number in range(3):
        stand.ask(number)
    said = stand.cancel(1)
    assert AbortStream("g0", 2) in said
    assert RefuseRequest("sim", "s1", 0, "its rows were cancelled") in said
    assert not started(said)
    assert started(stand.done("g0", 2, aborted=True)) == [("g0", 3, "s2")]


def test_a_stream_that_has_answered_before_it_could_be_aborted_is_over_too() -> None:
    stand = Stand(1, 1, 1)
    for number in range(3):
        stand.ask(number)
    stand.cancel(1)
    assert started(stand.done("g0", 2)) == [("g0", 3, "s2")]


def test_streams_for_a_lost_simulator_are_aborted() -> None:
    stand = Stand(1, 1)
    stand.ask(0)
    stand.ask(1)
    said = stand.tell(StationLost("sim", 0, "killed"))
    assert [command for command in said if isinstance(command, AbortStream)] == [
        AbortStream("g0", 1),
        AbortStream("g0", 2),
    ]


def test_what_a_lost_generator_answered_goes_out_again_in_the_old_order() -> None:
    stand = Stand(1, 1, 1, generators=2)
    for number in range(3):
        stand.ask(number)  # s0 and s2 on g0, s1 on g1
    assert started(stand.tell(StationLost("g0", 0, "killed"))) == [("g1", 4, "s0")]
    assert started(stand.done("g1", 2)) == [("g1", 5, "s2")]


@pytest.mark.parametrize("on_update", ["continue", "abort"])
def test_weights_are_taken_while_streams_run_and_nothing_begins_meanwhile(on_update: str) -> None:
    stand = Stand(1, 1, settings=replace(SETTINGS, on_update=on_update))
    stand.ask(0)
    assert ApplyWeights("g0", 1) in stand.tell(Published("t", 0, 1))
    assert not started(stand.ask(1))
    assert started(stand.tell(WeightsApplied("g0", 0, 1))) == [("g0", 2, "s1")]


def test_drain_takes_them_when_no_episode_runs() -> None:
    stand = Stand(1, settings=replace(SETTINGS, on_update="drain"))
    stand.ask(0)
    assert ApplyWeights("g0", 1) not in stand.tell(Published("t", 0, 1))
    stand.done("g0", 1)
    (grant,) = stand.tickets["s0"]
    ended = SampleFinished("sim", 0, grant.ticket.number, 1, "p", SampleEnd.TERMINATED, 1, 1, 0, 0, True, 1.0)
    assert ApplyWeights("g0", 1) in stand.tell(ended)


def test_members_that_a_group_no_longer_needs_are_aborted() -> None:
    stand = Stand(1, 1, settings=replace(SETTINGS, group_size=1, batch_size=1, extra_members=1, max_lag=0.0))
    stand.ask(0)
    stand.ask(1)
    first, second = (stand.tickets[slot][0].ticket for slot in ("s0", "s1"))
    assert first.group == second.group
    stand.done("g0", 1)
    ended = SampleFinished("sim", 0, first.number, 1, "p", SampleEnd.TERMINATED, 1, 1, 0, 0, True, 1.0)
    assert CancelRow("sim", "s1", second.number, 1) in stand.tell(ended)
    said = stand.tell(SampleFailed("sim", 0, second.number, 1, DropReason.CANCELLED))
    assert AbortStream("g0", 2) in said


def test_a_pass_cannot_be_cut_and_decode_steps_have_no_priority() -> None:
    with pytest.raises(ValueError, match="a pass cannot be cut in the middle"):
        SchedulerSettings(batch_size=1, on_update="abort")
    with pytest.raises(ValueError, match="take turns; make it turns"):
        replace(SETTINGS, evaluator="g0", evaluation_priority="first")
