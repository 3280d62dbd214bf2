"""Mutated messages to a worker and to the controller: dropped or meant, never an error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.runtime.mutations import mutations

from polyrhythm.plugins.cluster.parcels import KeptParcels
from polyrhythm.plugins.workflow import protocol as p
from polyrhythm.plugins.workflow.running import Controller, SkippableClock, WorkerSeat
from polyrhythm.plugins.workflow.station import WorkerFactory, WorkerStation
from polyrhythm.plugins.workflow.values import Carrier, pack_whole
from polyrhythm.runtime.factories import StationContext
from polyrhythm.runtime.messages import Channels, FromWorker, Order, ToWorker
from polyrhythm.runtime.transport.drops import UnfitMessage

ARGUMENTS = pack_whole(((1,), {}), "x")
ITEM = pack_whole([1], "x")
#: A tag stands before each, as `mutations` wants it.
TO = [
    b"?" + p.encode(message)
    for message in (
        *(p.Call(0, "add", ARGUMENTS), p.Answered(1, p.Done()), p.Answered(0, p.Given(()))),
        p.OnDevice("sim:0", ("echo-1",), in_turn=True),
    )
]
FROM = [
    b"?" + p.encode(message)
    for message in (
        *(
            p.Asked(1, p.Put("c", ITEM, "k", 2.0, 9.0)),
            p.Asked(2, p.Get("c", None, 1, 2.0, 9.0)),
            p.Asked(3, p.Close("c")),
        ),
        *(p.Returned(1, ITEM, {"add": 0.5}), p.Raised(1, "why", "where"), p.Asked(4, p.Get("a-0>b-0", direct=True))),
        p.Waits(1),
    )
]
NAMES = {"method": ["add", "where", "_say", "__init__", "send"], "channel": ["c"], "number": [0, 1, 2]}
COUNT = 4000
ELSEWHERE = p.Parcel(1, b"x", device="sim:0")


def test_a_worker_survives_hostile_messages() -> None:
    said: list[Any] = []
    context = StationContext(None, None, Channels(said.append, None, None))  # type: ignore[arg-type]
    factory = WorkerFactory(
        "echo-0", "echo", 0, "tests.plugins.workflow.workers:Echo", pack_whole(((), {}), "x"), {"echo": 1}, 9.0
    )
    station = WorkerStation(factory, context, 0, KeptParcels())
    kinds = set()
    for content in mutations(TO, COUNT, 1, NAMES):
        try:
            station.handle(ToWorker("echo-0", content[1:]))
        except UnfitMessage as unfit:
            kinds.add(unfit.kind)
        while station.work():
            pass
    assert kinds == {"undecodable", "impossible"}
    found = [p.decode_from(message.content) for message in said]
    assert {type(message) for message in found} == {p.Returned, p.Raised}
    assert [message.number for message in said] == list(range(len(said)))


class Hosting:
    """Takes what is sent and says nothing."""

    def __init__(self) -> None:
        self.sent: list[Order] = []

    def send(self, station: str, command: Order, slot: str = "") -> None:
        self.sent.append(command)

    def receive(self, timeout: float) -> None: ...

    names, work_done = (), 0
    start = station = statistics = close = receive


def test_the_controller_survives_hostile_messages() -> None:
    outcomes: set[str] = set()
    for seed in range(8):
        hosting = Hosting()
        controller = Controller(hosting, {"echo-0": WorkerSeat("echo", 0, "cpu")}, SkippableClock())  # type: ignore[arg-type]
        controller.exchange.open("c", 4)
        future = controller.call("echo-0", "add", ARGUMENTS)
        for content in mutations(FROM, COUNT // 8, seed, NAMES):
            controller.on_event(FromWorker("echo-0", 0, 0, content[1:]))
            controller.step(0.0)
        outcomes |= answers(hosting.sent)
        assert all(size <= 4 for name, size in controller.exchange.sizes().items() if name == "c")
        outcomes.add("set" if future.done() else "waits")
    assert {"Done", "Given", "refused", "set"} <= outcomes


def answers(sent: Sequence[Any]) -> set[str]:
    found = [p.decode_to(order.content) for order in sent]
    given = [message.answer for message in found if isinstance(message, p.Answered)]
    return {answer.reason if isinstance(answer, p.Denied) else type(answer).__name__ for answer in given}


def test_a_carrier_takes_no_parcel_that_is_not_there() -> None:
    """What a hostile `Given` names."""
    carrier = Carrier(KeptParcels(), lambda name: name)
    for parcel in (p.Parcel(10, name="9"), p.Parcel(10, host="elsewhere", name="../x"), p.Parcel(0), ELSEWHERE):
        try:
            carrier.unpack(parcel)
        except LookupError:
            continue
        raise AssertionError(parcel)
