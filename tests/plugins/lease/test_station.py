"""A station that leases its devices: made when it first has them, silent while it is off them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from polyrhythm.plugins.lease.station import _MOST_AT_HAND, LeasedStation, SwitchReport
from polyrhythm.runtime.messages import OffloadStore, Reply, StationTraits
from polyrhythm.runtime.spans import TAKE, YIELD
from polyrhythm.runtime.transport.drops import UnfitMessage
from polyrhythm.scheduler.records import (
    ApplyWeights,
    DeviceTaken,
    DeviceYielded,
    Event,
    GeneratorJoined,
    TakeDevice,
    YieldDevice,
)


class Counting:
    """A station with `units` to do, that notes what happens to it."""

    name = "g"

    def __init__(self, log: list[str], units: int = 0) -> None:
        self.log, self.units = log, units
        log.append("made")

    @property
    def traits(self) -> StationTraits:
        return StationTraits(deliver=self.deliver)

    def handle(self, command: object) -> None:
        self.units += 1

    def deliver(self, reply: Reply) -> None:
        self.units += 1

    def work(self) -> bool:
        if not self.units:
            return False
        self.units -= 1
        self.log.append("worked")
        return True

    def spans(self, begin: float, end: float) -> tuple[()]:
        return ()

    def current_call(self) -> tuple[str, float]:
        return "pass", 1.0

    def pending_work(self) -> list[str]:
        return ["g has something to do"]

    def statistics(self) -> dict[str, float]:
        return {"passes": 2.0}

    def suspend(self, store: OffloadStore) -> int:
        self.log.append("left")
        return store.suspend(["weights"])

    def resume(self, store: OffloadStore) -> None:
        store.resume()
        self.log.append("came back")

    def close(self) -> None:
        self.log.append("closed")


class Kept:
    """A store that frees 100 bytes."""

    def suspend(self, tensors: Iterable[Any]) -> int:
        self.kept = list(tensors)
        return 100

    def resume(self) -> None:
        assert self.kept == ["weights"]

    def close(self) -> None:
        self.kept = []


class Stand:
    def __init__(self, devices: tuple[int, ...] = (0,), parts: int = 1) -> None:
        self.said, self.log = list[Event](), list[str]()
        report = SwitchReport(parts, self.said.append)
        joined = GeneratorJoined("g", 3)
        self.made = list[Counting]()
        self.parts = [LeasedStation(joined, self.make, devices, report, Kept()) for _ in range(parts)]  # type: ignore[arg-type]
        self.part = self.parts[0]

    def make(self) -> Counting:
        self.made.append(Counting(self.log))
        return self.made[-1]

    def tell(self, *commands: Any) -> None:
        for command in commands:
            for part in self.parts:
                part.handle(command)
        for part in self.parts:
            while part.work():
                pass


def switches(said: list[Event]) -> list[tuple[type, int]]:
    return [(type(event), event.device) for event in said if isinstance(event, DeviceTaken | DeviceYielded)]


def test_it_announces_itself_before_it_is_made_and_is_made_on_its_device() -> None:
    stand = Stand()
    assert stand.part.joined() == GeneratorJoined("g", 3)
    assert not stand.part.work()
    assert (stand.log, stand.part.statistics()["switches"]) == ([], 0.0)
    stand.tell(TakeDevice("g", 0))
    assert stand.log == ["made"]
    assert isinstance(stand.said[0], DeviceTaken)
    assert (stand.said[0].station, stand.said[0].incarnation, stand.said[0].device) == ("g", 3, 0)


def test_it_leaves_and_comes_back_and_does_nothing_between() -> None:
    stand = Stand()
    stand.tell(
        TakeDevice("g", 0),
    )
    stand.tell(ApplyWeights("g", 1))
    stand.tell(YieldDevice("g", 0))
    answer: Any = Reply("g.3.0", "s", 1, None)  # type: ignore[arg-type]
    stand.part.deliver(answer)
    assert not stand.part.work()
    stand.tell(TakeDevice("g", 0))
    assert stand.log == ["made", "worked", "left", "came back", "worked"]
    assert isinstance(stand.said[1], DeviceYielded)
    assert stand.said[1].freed_bytes == 100
    assert stand.part.statistics() == {
        "switches": 3.0,
        "switch_s": pytest.approx(0.0, abs=1.0),
        "offloaded_bytes": 100.0,
        "passes": 2.0,
    }


def test_what_is_at_hand_is_done_before_it_leaves_but_not_for_ever() -> None:
    stand = Stand()
    stand.tell(TakeDevice("g", 0))
    stand.part.handle(YieldDevice("g", 0))
    stand.made[0].units = _MOST_AT_HAND + 10
    while stand.part.work():
        pass
    assert stand.log == ["made", *["worked"] * _MOST_AT_HAND, "left"]


def test_of_several_devices_the_last_brings_it_there_and_the_first_takes_it_away() -> None:
    stand = Stand(devices=(0, 2))
    stand.tell(TakeDevice("g", 0))
    assert stand.log == []
    with pytest.raises(UnfitMessage, match="off its devices"):
        stand.part.handle(ApplyWeights("g", 1))
    stand.tell(TakeDevice("g", 2))
    assert stand.log == ["made"]
    stand.tell(YieldDevice("g", 0), YieldDevice("g", 2))
    assert stand.log == ["made", "left"]
    taken, left = DeviceTaken, DeviceYielded
    assert switches(stand.said) == [(taken, 0), (taken, 2), (left, 0), (left, 2)]
    assert [event.freed_bytes for event in stand.said if isinstance(event, DeviceYielded)] == [100, 0]


def test_a_switch_is_reported_when_all_parts_have_made_it() -> None:
    stand = Stand(parts=3)
    for part in stand.parts:
        part.handle(TakeDevice("g", 0))
    for part in stand.parts:
        assert stand.said == []
        part.work()
    assert switches(stand.said) == [(DeviceTaken, 0)]
    stand.tell(YieldDevice("g", 0))
    assert isinstance(stand.said[-1], DeviceYielded)
    assert stand.said[-1].freed_bytes == 300


@pytest.mark.parametrize(
    ("before", "command", "words"),
    [
        ([], YieldDevice("g", 0), "cannot execute"),
        ([], TakeDevice("g", 7), "cannot execute"),
        ([], TakeDevice("other", 0), "not for it"),
        ([], ApplyWeights("g", 0), "off its devices"),
        ([TakeDevice("g", 0)], TakeDevice("g", 0), "cannot execute"),
        ([TakeDevice("g", 0), YieldDevice("g", 0)], ApplyWeights("g", 0), "off its devices"),
    ],
)
def test_what_cannot_be_meant_for_it_is_refused(before: list[Any], command: Any, words: str) -> None:
    stand = Stand()
    for each in before:
        stand.tell(each)
    with pytest.raises(UnfitMessage, match=words):
        stand.part.handle(command)


def test_a_switch_that_is_heard_twice_is_refused() -> None:
    stand = Stand()
    stand.part.handle(TakeDevice("g", 0))
    with pytest.raises(UnfitMessage, match="cannot execute"):
        stand.part.handle(TakeDevice("g", 0))


def test_replies_are_refused_before_it_is_there() -> None:
    stand = Stand()
    with pytest.raises(UnfitMessage, match="expects no reply"):
        stand.part.deliver(Reply("g.3.0", "s", 1, None))  # type: ignore[arg-type]


def test_its_spans_and_its_call_are_those_of_the_switch() -> None:
    stand = Stand()
    stand.part.handle(TakeDevice("g", 0))
    assert stand.part.pending_work() == ["g has TakeDevice to do"]
    assert stand.part.work()
    (span,) = stand.part.spans(1.0, 2.0)
    assert (span.lane, span.kind, span.number) == ("g", TAKE, 0)
    assert stand.part.current_call() == ("pass", 1.0)
    stand.part.handle(YieldDevice("g", 0))
    assert stand.part.work()
    (span,) = stand.part.spans(2.0, 3.0)
    assert span.kind == YIELD
    stand.part.close()
    assert stand.log[-1] == "closed"
