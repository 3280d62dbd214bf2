"""Mutated messages of every type against whoever decodes, hears and obeys: dropped or meant, never an error."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.runtime.mutations import mutations
from tests.runtime.test_wire import DTYPE, MESSAGES, reply
from tests.stations.counting import Bench, ticket
from tests.stations.test_generator import Stand as GeneratorStand
from tests.stations.test_trainer import LEND
from tests.stations.test_trainer import Stand as TrainerStand

from polyrhythm.runtime.memory.arena import ArenaLayout
from polyrhythm.runtime.memory.in_flight import InFlight
from polyrhythm.runtime.messages import Reply, Report
from polyrhythm.runtime.processes.station_thread import PartQueue, StationThread
from polyrhythm.runtime.transport import wire
from polyrhythm.runtime.transport.drops import DropCounter, UnfitMessage
from polyrhythm.scheduler import records as r

CONTENTS = [*map(wire.encode, MESSAGES), wire.encode_reply(reply(3))]
COUNT = 20_000


def test_a_mutated_message_is_a_message_or_unfit() -> None:
    kinds = set()
    for content in mutations(CONTENTS, COUNT, 1, {}):
        found: object
        try:
            found = wire.decode(content, DTYPE)
        except UnfitMessage as unfit:
            found = unfit
            kinds.add(unfit.kind)
        assert isinstance(found, (UnfitMessage, Reply, *wire.TYPES))
    assert kinds == {"undecodable"}


def test_nesting_without_end_is_undecodable() -> None:
    content = wire.encode(wire.Ping())[:1] + b"\x81\xa1?" + b"\x91" * 200_000
    with pytest.raises(UnfitMessage, match="cannot be decoded"):
        wire.decode(content)


def test_a_message_that_is_too_large_is_not_looked_at() -> None:
    with pytest.raises(UnfitMessage, match="16777217 bytes; at most 16777216") as raised:
        wire.decode(bytes(wire.LARGEST + 1))
    assert raised.value.kind == "too_large"


# ---------------------------------------------------------------- who obeys


class Obeying:
    """A part of a station that hears what it is given, in this thread; and what it drops."""

    def __init__(self, station: Any, layout: ArenaLayout) -> None:
        self.drops, self.connected, self.refused = DropCounter("test"), 0, 0
        self.station = station
        self._part = StationThread("a", lambda: station, PartQueue(), self.drops, layout, self)
        self._part.adopt(station)

    def connect(self, message: wire.Connect | wire.HostAt) -> None:
        self.connected += 1

    def is_meant(self, message: wire.Dismissed) -> bool:
        return False

    def beat(self, *, pending_work: bool = False) -> None: ...

    begin_frame = flush = notify = beat

    def refuse(self, command: bytes, why: str) -> None:
        self.refused += 1

    def hear(self, content: bytes) -> bool:
        return self._part._obey(self.station, content)


def attack(obeying: Obeying, seed: int, names: dict[str, Any], between: Callable[[int], None]) -> None:
    """Every message type, mutated, as commands; the station works on meanwhile."""
    for number, content in enumerate(mutations(CONTENTS, COUNT // 4, seed, names)):
        more = obeying.hear(content)
        assert more or isinstance(wire.decode(content, DTYPE), wire.Stop)
        between(number)
    dropped = obeying.drops.counts()
    assert set(dropped) == {"undecodable", "misdirected", "impossible"}
    assert sum(dropped.values()) > COUNT // 8


def test_a_simulator_survives_hostile_messages() -> None:
    bench = Bench(4, blocks=8)
    names = {"simulator": ["s"], "slot": ["e/0"], "reply_to": ["s.0.0"], "ticket": [1, 2], "sequence": [0, 1, 2]}
    obeying = Obeying(bench.simulator, bench.arena.layout)
    bench.pool.on_event = lambda event: None  # type: ignore[method-assign]  # some messages are grants of nobody
    bench.start((0, ticket(0, 9)), (1, ticket(1, 9)))
    attack(obeying, 2, names, lambda number: bench.simulator.work())
    assert {type(event) for event in bench.events} >= {r.RequestArrived, r.SampleFailed}


def test_a_generator_survives_hostile_messages() -> None:
    stand = GeneratorStand()
    names = {"generator": ["g"], "slot": ["a", "b", "c"], "rows": [1, 2, 3], "version": [0], "pinned": [False]}
    obeying = Obeying(stand.generator, stand.arena.layout)
    attack(obeying, 3, names, lambda number: stand.generator.work())
    assert {type(said) for said in stand.said if not isinstance(said, tuple)} == {r.BatchDone, r.WeightsApplied}
    assert obeying.connected
    assert len(stand.serve(stand.request("a", 7, 30, 31))) == 1


def test_a_trainer_survives_hostile_messages() -> None:
    stand = TrainerStand()
    names = {"trainer": ["t"], "update": [0], "tickets": [[0, 1]], "payload_ids": [["0", "1"]]}
    obeying = Obeying(stand.trainer, stand.arena.layout)
    attack(obeying, 4, names, lambda number: stand.trainer.work())
    stand.said.clear()
    due = replace(LEND, update=stand.trainer.joined().updates)  # some messages are the update that was due
    assert obeying.hear(wire.encode(due))
    while stand.trainer.work():
        pass
    assert [type(said) for said in stand.said] == [Report, r.UpdateDone]


@pytest.mark.parametrize("wrong", [1, 3])
def test_an_answer_of_another_size_is_dropped_and_the_right_one_still_counts(wrong: int) -> None:
    bench = Bench(2)
    obeying = Obeying(bench.simulator, bench.arena.layout)
    bench.start((0, ticket(0, 2)), (1, ticket(1, 2)))
    (request,) = bench.run()
    dtype = bench.arena.layout.answer_dtype
    assert obeying.hear(wire.encode_reply(Reply("s.0.0", "e/0", request.sequence, np.zeros(wrong, dtype))))
    assert obeying.drops.counts() == {"impossible": 1}
    assert obeying.hear(wire.encode_reply(Reply("s.0.0", "e/0", request.sequence, np.zeros(2, dtype))))
    assert [type(event) for event in bench.run()] == [r.RequestArrived]


# ---------------------------------------------------------------- who hears

LAYOUT = ArenaLayout(blocks=9, steps=4, chunk=1, obs={}, answers={}, slots={"e/0": 4, "e/1": 2})
INFO = r.EnvBatchInfo("e", (r.SlotInfo("e/0", 0, 4), r.SlotInfo("e/1", 4, 2)))


def standing() -> InFlight:
    """A station of each kind, each with something to do: tickets 0 to 3, of which 3 is an evaluation's."""
    expected = InFlight(LAYOUT)
    expected.join(r.SimulatorJoined("s", 0, (INFO,)), ["s.0.0"])
    expected.join(r.GeneratorJoined("g", 0), ["g.0"])
    expected.join(r.TrainerJoined("t", 0, 4), ["t.0"])
    expected.join(r.ScorerJoined("c", 0, 2), ["c.0"])
    tickets = [ticket(number, 9, version=2, evaluation="x" if number == 3 else "") for number in range(4)]
    rows = r.StartRows("s", "e/0", tuple(r.Grant(row, ticket) for row, ticket in enumerate(tickets)))
    expected.on_command(expected.assign(rows))
    for command in (
        *(r.ApplyWeights("g", 2), r.ApplyWeights("g", 3, pinned=True), r.Serve("g", r.Batch(8, "g", ()))),
        *(r.StartUpdate("t", 4, 2, (7,), ("8",)), r.PublishWeights("t", 3)),
        *(r.StartStream("g", r.Stream(n, "g", r.Request("e/0", "s", 0, 1, 2, "", 0.0))) for n in (11, 12, 13)),
        *(r.AbortStream("g", 12), r.AbortStream("g", 13), r.AbortStream("g", 14)),
        *(r.ScoreSample("c", 21, 5, "4", 0, 9), r.ScoreSample("c", 22, 6, "5", 0, 9)),
    ):
        expected.on_command(command)
    return expected


TRUE = [
    *(r.RequestArrived("s", 0, "e/0", number, 4, 2, "s.0.0") for number in range(2)),
    r.RequestArrived("s", 0, "e/1", 0, 1, 2, "s.0.0"),
    *(
        r.SampleFinished("s", 0, 0, 1, "0", r.SampleEnd.SEGMENT, 4, 9, 2, 3, True, 0.5),
        r.SampleFailed("s", 0, 1, 1, r.DropReason.REFUSED),
    ),
    *(
        r.SampleFailed("s", 0, 2, 1, r.DropReason.REFUSED),
        r.SampleFinished("s", 0, 3, 1, "", r.SampleEnd.TRUNCATED, 90, 90, 2, 2, True, 1.0),
    ),
    *(r.BatchDone("g", 0, 8, 2), r.WeightsApplied("g", 0, 3), r.WeightsApplied("g", 0, 3, pinned=True)),
    *(r.StreamDone("g", 0, 11, 2, 5), r.StreamDone("g", 0, 12, -1, aborted=True), r.StreamDone("g", 0, 13, 2, 5)),
    *(r.Checkpointed("t", 0, 4), r.UpdateDone("t", 0, 4), r.Checkpointed("t", 0, 5), r.Published("t", 0, 3)),
    *(r.SampleScored("c", 0, 21, 5, 0.5), r.ScoringFailed("c", 0, 22, 6, "no")),
]


def test_what_was_asked_for_is_accepted_once() -> None:
    expected = standing()
    expected.check_report(Report("t", 0, "update", 4, {}))
    for event in TRUE:
        expected.accept(event)
        expected.on_event(event)  # type: ignore[arg-type]
        if not isinstance(event, r.Checkpointed):
            with pytest.raises(UnfitMessage, match="nothing leads to"):
                expected.accept(event)


FALSE = [
    *(r.RequestArrived("s", 0, "e/0", 0, rows, 2, "s.0.0") for rows in (-1, 0, 5)),
    *(r.RequestArrived("s", 0, slot, 0, 1, 2, "s.0.0") for slot in ("", "e/2")),
    *(r.RequestArrived("s", 0, "e/0", 0, 1, 3, "s.0.0"), r.RequestArrived("s", 0, "e/0", 0, 1, 2, "s.1.0")),
    *(r.RequestArrived("s", 1, "e/0", 0, 1, 2, "s.0.0"), r.RequestArrived("g", 0, "e/0", 0, 1, 2, "g.0")),
    *(
        r.SampleFinished("s", 0, 0, 1, payload_id, r.SampleEnd.SEGMENT, 4, 9, 2, 3, True, 0.5)
        for payload_id in ("", "1", "99")
    ),
    *(r.SampleFinished("s", 0, 0, 1, "0", r.SampleEnd.SEGMENT, steps, 9, 2, 3, True, 0.5) for steps in (0, 5)),
    r.SampleFinished("s", 0, 0, 1, "0", r.SampleEnd.SEGMENT, 4, 9, 2, 3, True, 0.5, texts=("not asked for",)),
    *(
        r.SampleFinished("s", 0, 0, 1, "0", r.SampleEnd.SEGMENT, 1, 9, *span, True, 0.5)
        for span in ((1, 3), (3, 2), (2, 4))
    ),
    *(
        r.SampleFinished("s", 0, 0, 1, "0", r.SampleEnd.SEGMENT, 4, 3, 2, 3, True, 0.5),
        r.SampleFailed("s", 0, 0, 2, r.DropReason.REFUSED),
    ),
    *(r.BatchDone("g", 0, 7, 2), r.BatchDone("t", 0, 8, 2), r.BatchDone("?", 0, 8, 2), r.WeightsApplied("g", 0, 1)),
    *(r.StreamDone("g", 0, 11, -1, 5), r.StreamDone("g", 0, 11, 2, 0), r.StreamDone("g", 0, 11, 9, 5)),
    *(r.StreamDone("g", 0, 11, 2, 5, aborted=True), r.StreamDone("g", 0, 14, 2, 5), r.StreamDone("g", 0, 12, -2, 0)),
    *(r.WeightsApplied("g", 0, 4), r.WeightsApplied("g", 0, 2, pinned=True), r.UpdateDone("t", 0, 5)),
    *(r.SampleScored("c", 0, 21, 6, 0.5), r.SampleScored("c", 0, 23, 5, 0.5), r.SampleScored("c", 1, 21, 5, 0.5)),
    *(r.SampleScored("c", 0, 21, 5, math.nan), r.ScoringFailed("g", 0, 21, 5, "no"), r.ScorerJoined("c", 0, 2)),
    *(r.UpdateDone("g", 0, -1), r.Checkpointed("t", 0, 3), r.Checkpointed("t", 0, 6), r.Checkpointed("s", 0, 0)),
    *(
        r.Published("t", 0, 2),
        r.Published("t", 1, 3),
        r.StationLost("t", 0, ""),
        r.TrainerJoined("t", 0, 4),
        wire.Stop(),
    ),
]


@pytest.mark.parametrize("event", FALSE, ids=str)
def test_what_nothing_leads_to_is_refused(event: object) -> None:
    expected = standing()
    with pytest.raises(UnfitMessage):
        expected.accept(event)


@pytest.mark.parametrize(
    "report", [("t", "update", 3), ("t", "update", 5), ("t", "x", 4), ("g", "update", -1)], ids=str
)
def test_a_report_of_no_update_under_way_is_refused(report: tuple[str, str, int]) -> None:
    station, topic, step = report
    with pytest.raises(UnfitMessage, match=r"a report of .*; (update 4 is under way|it has no update to do)"):
        standing().check_report(Report(station, 0, topic, step, {}))


@pytest.mark.parametrize(
    ("joined", "inboxes", "words"),
    [
        (r.SimulatorJoined("s", 1, ()), 1, "0 slots; before it had 2"),
        (r.SimulatorJoined("s", 1, (INFO,)), 2, "it has 2 addresses for 1 parts"),
        (r.SimulatorJoined("u", 0, (r.EnvBatchInfo("e", (r.SlotInfo("e/0", 0, 5),)),)), 1, "5 rows; the run's has 4"),
        (r.SimulatorJoined("u", 0, (r.EnvBatchInfo("e", (r.SlotInfo("e/7", 0, 4),)),)), 1, "4 rows; the run's has 0"),
        (r.SimulatorJoined("u", 0, (r.EnvBatchInfo("e", (r.SlotInfo("e/1", 0, 2),)),)), 1, "slot e/1 is s's"),
        (r.TrainerJoined("t", 1, 6), 1, "6 updates; at most 5"),
        (r.TrainerJoined("t", 1, -1), 1, "-1 updates"),
        (r.GeneratorJoined("t", 1), 1, "it was a TrainerJoined before"),
        (r.GeneratorJoined("g", 1, 4), 1, "version 4; the newest is 3"),
        (r.GeneratorJoined("g", 1, 2, depth=0), 1, "0 batches at once; 1 or 2"),
        (r.GeneratorJoined("g", 1, 2, depth=3), 1, "3 batches at once; 1 or 2"),
    ],
    ids=str,
)
def test_an_announcement_that_cannot_be_is_refused(joined: Any, inboxes: int, words: str) -> None:
    with pytest.raises(UnfitMessage, match=words):
        standing().join(joined, [str(number) for number in range(inboxes)])


def test_batches_end_in_the_order_in_which_they_were_given() -> None:
    expected = standing()
    expected.on_command(r.Serve("g", r.Batch(9, "g", ())))
    assert expected.is_due(r.Serve("g", r.Batch(9, "g", ())))
    with pytest.raises(UnfitMessage, match="nothing leads to"):
        expected.accept(r.BatchDone("g", 0, 9, 2))
    expected.accept(r.BatchDone("g", 0, 8, 2))
    expected.accept(r.BatchDone("g", 0, 9, 2))
    with pytest.raises(UnfitMessage, match="nothing leads to"):
        expected.accept(r.BatchDone("g", 0, 9, 2))


def test_mutated_events_never_harm_who_believes_what_is_expected() -> None:
    """What is accepted is accepted once, and the owner of the blocks agrees."""
    names = {"simulator": ["s"], "generator": ["g"], "trainer": ["t"], "incarnation": [0], "slot": ["e/0", "e/1"]}
    names |= {"ticket": [0, 1, 2, 3], "attempt": [1], "batch": [8], "update": [4], "version": [2, 3]}  # type: ignore[dict-item]
    contents = [*CONTENTS, *map(wire.encode, TRUE)]  # type: ignore[arg-type]
    expected, accepted = standing(), 0
    for number, content in enumerate(mutations(contents, COUNT, 5, names)):
        if number % 100 == 0:
            expected = standing()
        try:
            event = wire.decode(content)
            expected.accept(event)
        except UnfitMessage:
            continue
        expected.on_event(event)  # type: ignore[arg-type]
        accepted += 1
    assert accepted > 100
