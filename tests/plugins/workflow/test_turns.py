"""Who is on a shared device, decided without processes; the rules themselves are tested with the lease."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from polyrhythm.plugins.workflow.protocol import Get, Parcel, Put
from polyrhythm.plugins.workflow.turns import DeviceTurns
from polyrhythm.scheduler.records import DeviceCommand, DeviceTaken, DeviceYielded, TakeDevice, YieldDevice

HOLD_S, WAIT_S = 1.0, 60.0


class Device:
    """Workers that obey at once, or where they wait. on: the workers on a device, of which there may be one."""

    def __init__(self, *workers: str, hold_s: float = HOLD_S, switch_s: float = 0.0) -> None:
        self.turns, self.now = DeviceTurns(dict.fromkeys(workers, "sim:0"), hold_s), 0.0
        self.turns.wait_s, self.switch_s = WAIT_S, switch_s
        self.on: list[str] = []
        self.ordered: dict[str, DeviceCommand] = {}
        self.history: list[str] = []

    def call(self, *workers: str) -> None:
        for worker in workers:
            self.turns.on_call(worker, self.now)
        self.settle()

    def wait(self, worker: str, number: int, channel: str = "c") -> None:
        self.turns.on_request(worker, number, Get(channel))
        self.turns.on_wait(worker, number, self.now)
        self.leave(worker)

    def answer(self, worker: str, number: int) -> None:
        self.turns.on_answer(worker, number, self.now)
        self.settle()

    def end(self, worker: str) -> None:
        self.turns.on_return(worker, self.now)
        self.leave(worker)

    def put(self, worker: str, channel: str) -> None:
        self.turns.on_request(worker, 1000, Put(channel, Parcel(0)))
        self.turns.on_answer(worker, 1000, self.now)

    def leave(self, worker: str) -> None:
        """The worker is where it can leave."""
        self.settle()
        if isinstance(self.ordered.get(worker), YieldDevice):
            order = self.ordered.pop(worker)
            self.on.remove(worker)
            self.switched(DeviceYielded(worker, 0, order.device, 0, self.switch_s))

    def switched(self, event: DeviceTaken | DeviceYielded) -> None:
        assert self.turns.is_due(event)
        self.turns.on_switched(event, self.now)
        assert not self.turns.is_due(event)
        self.settle()

    def settle(self) -> None:
        for command in self.turns.switch(self.now):
            self.ordered[command.station] = command
        for worker, order in list(self.ordered.items()):
            if isinstance(order, TakeDevice):
                del self.ordered[worker]
                self.on.append(worker)
                self.history.append(worker)
                assert len(self.on) == 1
                self.switched(DeviceTaken(worker, 0, order.device, self.switch_s))


def test_a_worker_that_waits_gives_its_device_to_one_that_can_go_on() -> None:
    device = Device("a", "b")
    device.call("a", "b")
    device.wait("a", 1)
    assert device.on == ["b"]
    device.answer("a", 1)
    assert device.on == ["b"]
    device.end("b")
    assert device.on == ["a"]


def test_a_worker_whose_answer_is_on_its_way_does_not_wait() -> None:
    device = Device("a", "b")
    device.call("a", "b")
    device.turns.on_request("a", 1, Get("c"))
    device.answer("a", 1)
    device.turns.on_wait("a", 1, device.now)
    device.leave("a")
    assert device.on == ["a"]


def test_a_worker_with_work_leaves_after_the_minimum_time_if_another_wants_the_device() -> None:
    device = Device("a", "b")
    device.call("a")
    assert device.turns.deadline() == math.inf
    device.now = 0.5
    device.call("b")
    assert device.turns.deadline() == HOLD_S
    device.now = HOLD_S
    device.leave("a")
    assert device.on == ["b"]


def test_a_worker_keeps_its_device_longer_the_longer_a_switch_takes() -> None:
    device = Device("a", "b", switch_s=0.2)
    device.call("a", "b")
    device.now = 3.9
    device.leave("a")
    assert device.on == ["a"]
    device.now = 4.0
    device.leave("a")
    assert device.on == ["b"]
    device.wait("b", 1)
    assert device.on == ["a"]  # one that waits leaves at once


def test_a_free_device_goes_down_the_data_flow() -> None:
    device = Device("source", "middle", "sink", "holder")
    for number, (put, got, channel) in enumerate([("source", "middle", "one"), ("middle", "sink", "two")]):
        device.put(put, channel)
        device.turns.on_request(got, number, Get(channel))
        device.turns.on_answer(got, number, 0.0)
    device.call("holder")
    for worker in ("source", "middle", "sink"):
        device.now += 0.1
        device.call(worker)
    for worker in ("holder", "sink", "middle"):
        assert device.on == [worker]
        device.end(worker)
    assert device.on == ["source"]


def test_a_device_that_is_not_given_up_has_a_deadline_and_a_name() -> None:
    device = Device("a", "b")
    device.call("a", "b")
    assert device.turns.waits() == ["b waits for sim:0, on which a is"]
    device.now = HOLD_S
    device.settle()
    assert device.turns.deadline() == WAIT_S
    assert device.turns.overdue(WAIT_S - 0.1) is None
    worker, why = device.turns.overdue(WAIT_S) or ("", "")
    assert (worker, why[:40]) == ("a", "has not given sim:0 to b for 60 s; have ")


def test_only_workers_that_share_a_device_take_turns() -> None:
    turns = DeviceTurns({"a": "sim:0", "b": "sim:1", "c": "sim:1"}, HOLD_S)
    for worker in "abc":
        turns.on_call(worker, 0.0)
    assert [worker in turns for worker in "abc"] == [False, True, True]
    assert [command.station for command in turns.switch(0.0)] == ["b"]


def test_what_was_not_told_is_not_due() -> None:
    device = Device("a", "b")
    device.call("a")
    for event in (DeviceTaken("a", 0, 0, 0.0), DeviceTaken("b", 0, 0, 0.0), DeviceYielded("a", 0, 0, 0, 0.0)):
        assert not device.turns.is_due(event)
    assert not device.turns.is_due(DeviceTaken("x", 0, 0, 0.0))
    assert not device.turns.is_due(DeviceTaken("b", 0, 7, 0.0))


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["call", "wait", "answer", "end", "leave"]))))
def test_whatever_happens_one_worker_is_there_and_everybody_comes(steps: list[tuple[str, str]]) -> None:
    device = Device("a", "b", "c")
    calls, waits = dict.fromkeys("abc", 0), dict.fromkeys("abc", 0)
    for number, (worker, step) in enumerate(steps, 1):
        device.now += 0.4
        if step == "call":
            calls[worker] += 1
            device.call(worker)
        elif worker in device.on and step == "end" and calls[worker]:
            calls[worker] -= 1
            device.end(worker)
        elif worker in device.on and step == "wait" and calls[worker] and not waits[worker]:
            waits[worker] = number
            device.wait(worker, number)
        elif step == "answer" and waits[worker]:
            device.answer(worker, waits[worker])
            waits[worker] = 0
        elif worker in device.on and step == "leave":
            device.leave(worker)
    before = len(device.history)
    wanting = {worker for worker in "abc" if calls[worker] and not waits[worker]}
    for _ in range(12):
        device.now += HOLD_S
        for worker in list(device.on):
            device.leave(worker)
    assert wanting <= {*device.history[before:], *device.on}
