"""Who holds a leased device, step by step, and which commands wait for it. The property tests over random placements
with faults are `tests/plugins/lease/test_simulated.py`."""

from __future__ import annotations

import json
import math

import pytest

from polyrhythm.conductors import build_conductor, restore_conductor
from polyrhythm.plugins.lease.conductor import LeasedConductor
from polyrhythm.plugins.lease.lease import DeviceLeases
from polyrhythm.scheduler import records as r
from polyrhythm.scheduler.conductor import AnyConductor
from polyrhythm.scheduler.settings import LeaseSettings, SchedulerSettings

TRAINER, GENERATOR, SIMULATOR = range(3)


class Table:
    """Leases whose stations do at once what they are told; `log` has the switches as `+station0`, `-station0`."""

    def __init__(self, devices: dict[str, tuple[int, ...]], **rules: object) -> None:
        self.leases = DeviceLeases(LeaseSettings(devices, **{"min_hold_s": 0.0, **rules}))  # type: ignore[arg-type]
        self.now, self.log = 0.0, list[str]()
        for name in devices:
            flow = "tgs".index(name[0])
            self.leases.join(name, flow, interruptible=flow == SIMULATOR)

    def want(self, *names: str) -> list[str]:
        for name in names:
            self.leases.set_wants(self.leases.present[name], True, self.now)
        return self.settle()

    def work(self, name: str, units: int = 1) -> None:
        """The station has got what it wanted the device for."""
        state = self.leases.present[name]
        assert state.open
        self.leases.set_wants(state, False, self.now)
        state.worked, state.under_way = True, units

    def finish(self, name: str) -> list[str]:
        self.leases.present[name].under_way = 0
        return self.settle()

    def settle(self) -> list[str]:
        """What changes hands from now on until nothing does."""
        before = len(self.log)
        self.leases.preempt(self.now)
        while commands := self.leases.switch():
            for command in commands:
                taken = isinstance(command, r.TakeDevice)
                self.log.append(f"{'+' if taken else '-'}{command.station}{command.device}")
                if taken:
                    self.leases.on_taken(r.DeviceTaken(command.station, 0, command.device, 0.0), self.now)
                else:
                    self.leases.on_yielded(r.DeviceYielded(command.station, 0, command.device, 0, 0.0), self.now)
        return self.log[before:]


def test_a_holder_with_nothing_to_do_leaves_for_who_waits_and_else_stays() -> None:
    table = Table({"t": (0,), "g": (0,)}, min_hold_s=10.0)
    assert table.want("g") == ["+g0"]
    table.work("g")
    assert table.finish("g") == []
    assert table.want("t") == ["-g0", "+t0"]


def test_a_holder_at_work_stays_until_its_unit_ends_and_its_time_is_over() -> None:
    table = Table({"t": (0,), "g": (0,)}, min_hold_s=1.0)
    table.want("g")
    table.work("g")
    assert table.want("t") == []
    table.now = 0.9
    assert table.settle() == []
    table.now = 1.0
    assert table.settle() == []
    assert not table.leases.present["g"].open, "it gets no new work"
    assert table.finish("g") == ["-g0", "+t0"]


def test_a_holder_that_was_to_go_stays_when_nobody_waits_any_more() -> None:
    table = Table({"t": (0,), "g": (0,)})
    table.want("t")
    table.work("t")
    table.want("g")
    assert table.leases.present["t"].leaving
    table.leases.set_wants(table.leases.present["g"], False, 0.0)
    assert [state.name for state in table.leases.keep()] == ["t"]
    assert table.leases.present["t"].open
    assert table.finish("t") == []


def test_a_simulator_leaves_with_units_under_way_when_its_time_is_over() -> None:
    table = Table({"g": (0,), "s": (0,)}, min_hold_s=1.0)
    table.want("s")
    table.work("s")
    table.want("g")
    assert table.leases.deadline() == 1.0
    table.now = 1.0
    assert table.settle() == ["-s0", "+g0"]
    assert table.leases.deadline() == math.inf


def test_data_flow_gives_the_device_to_consumers_first_and_arrival_to_whoever_waits_longest() -> None:
    for order, expected in (("data_flow", "t"), ("arrival", "s")):
        table = Table({"t": (0,), "g": (0,), "s": (0,)}, switch_order=order)
        table.want("g")
        table.work("g")
        for name in ("s", "t"):
            table.now += 1.0
            table.want(name)
        assert table.finish("g") == ["-g0", f"+{expected}0"], order


def test_who_has_just_left_is_not_the_next_while_another_waits() -> None:
    table = Table({"g": (0,), "s": (0,)})
    table.want("g")
    table.work("g")
    table.want("s")
    table.leases.set_wants(table.leases.present["g"], True, 0.0)  # it has work again as it leaves
    assert table.finish("g") == ["-g0", "+s0"]


def test_whoever_is_passed_over_as_often_as_the_device_has_stations_goes_first() -> None:
    table = Table({"t": (0,), "g": (0,), "s": (0,)})
    table.want("s", "t")
    turns = []
    for turn in range(8):
        holder = table.leases.holders[0]
        if holder == "s":
            break
        turns.append(holder)
        table.work(holder)
        table.now = float(turn)
        table.want("g" if holder == "t" else "t")
        table.finish(holder)
    assert turns == ["t", "g", "t"]
    assert table.leases.holders[0] == "s"


def test_several_devices_are_taken_in_increasing_number_and_given_back_together() -> None:
    table = Table({"t": (2, 0, 1), "g1": (1,), "g2": (2,)})
    table.want("g1")
    table.work("g1")
    assert table.want("t") == ["+t0"]
    assert table.finish("g1") == ["-g11", "+t1", "+t2"]
    table.work("t")
    assert table.want("g2") == []
    assert table.finish("t") == ["-t0", "-t1", "-t2", "+g22"]


def test_two_that_need_the_same_two_devices_do_not_wait_for_each_other() -> None:
    table = Table({"t": (0, 1), "g": (1, 0)})
    assert table.want("g", "t") == ["+t0", "+t1"]
    table.work("t")
    assert table.finish("t") == ["-t0", "-t1", "+g0", "+g1"]


def test_who_no_longer_wants_the_rest_of_its_devices_gives_back_what_it_has() -> None:
    table = Table({"g": (0, 1), "t": (1,), "g2": (0,)})
    table.want("t")
    table.work("t")
    assert table.want("g") == ["+g0"]
    table.leases.set_wants(table.leases.present["g"], False, 0.0)
    assert table.settle() == []
    assert table.want("g2") == ["-g0", "+g20"]


def test_the_loss_of_a_holder_frees_its_devices_and_that_of_a_waiter_its_place() -> None:
    table = Table({"t": (0, 1), "g": (1,), "g2": (1,)})
    table.want("t")
    table.work("t")
    table.want("g", "g2")
    table.leases.leave("g")
    table.leases.leave("t")
    assert table.settle() == ["+g21"]
    assert table.leases.holders == {1: "g2"}
    table.leases.join("t", TRAINER)
    assert table.want("t") == ["+t0"]


# ---------------------------------------------------------------- in the conductor


def joined(**rules: object) -> AnyConductor:
    """A simulator of two slots on the host; generator and trainer on device 0; version 0 is offered."""
    lease = LeaseSettings({"g": (0,), "trainer": (0,)}, **{"min_hold_s": 5.0, **rules})  # type: ignore[arg-type]
    conductor = build_conductor(SchedulerSettings(batch_size=2, max_wait_s=1.0, lease=lease))
    slots = (r.SlotInfo("s0", 0, 1), r.SlotInfo("s1", 1, 1))
    conductor.handle(r.SimulatorJoined("sim", 0, (r.EnvBatchInfo("b", slots),)), 0.0)
    conductor.handle(r.TrainerJoined("trainer", 0), 0.0)
    conductor.handle(r.GeneratorJoined("g", 0), 0.0)
    conductor.handle(r.TrainUntil(9), 0.0)
    return conductor


def test_a_trainer_publishes_as_soon_as_it_has_its_device_and_the_generator_follows() -> None:
    conductor = joined()
    assert isinstance(conductor, LeasedConductor)
    assert conductor.delivery.leases.holders == {0: "trainer"}
    assert conductor.handle(r.DeviceTaken("trainer", 0, 0, 0.1), 1.0) == [r.PublishWeights("trainer", 0)]
    assert conductor.handle(r.Published("trainer", 0, 0), 2.0) == [r.YieldDevice("trainer", 0)]
    assert conductor.handle(r.DeviceYielded("trainer", 0, 0, 8, 0.1), 3.0) == [r.TakeDevice("g", 0)]
    assert conductor.handle(r.DeviceTaken("g", 0, 0, 0.1), 4.0) == [r.ApplyWeights("g", 0)]


def serving() -> AnyConductor:
    """The generator is on the device, with version 0; both slots run."""
    conductor = joined()
    for event in (
        r.DeviceTaken("trainer", 0, 0, 0.1),
        r.Published("trainer", 0, 0),
        r.DeviceYielded("trainer", 0, 0, 8, 0.1),
        r.DeviceTaken("g", 0, 0, 0.1),
        r.WeightsApplied("g", 0, 0),
    ):
        conductor.handle(event, 0.0)
    return conductor


def ask(conductor: AnyConductor, slot: str, now: float, sequence: int = 1) -> list[r.Command]:
    return conductor.handle(r.RequestArrived("sim", 0, slot, sequence, 1, 0, "h"), now)


def finish(conductor: AnyConductor, ticket: int, now: float) -> list[r.Command]:
    ended = r.SampleEnd.TERMINATED
    return conductor.handle(r.SampleFinished("sim", 0, ticket, 1, f"p{ticket}", ended, 1, 1, 0, 0, True, 1.0), now)


def training() -> AnyConductor:
    """Both slots have finished a sample; the trainer is on the device with the update, and both slots run again."""
    conductor = serving()
    ask(conductor, "s0", 0.0)
    ask(conductor, "s1", 0.0)
    conductor.handle(r.BatchDone("g", 0, 1, 0), 1.0)
    finish(conductor, 0, 2.0)
    *_, last = finish(conductor, 1, 2.0)
    assert last == r.YieldDevice("g", 0)
    assert conductor.handle(r.DeviceYielded("g", 0, 0, 8, 0.1), 3.0) == [r.TakeDevice("trainer", 0)]
    (start,) = conductor.handle(r.DeviceTaken("trainer", 0, 0, 0.1), 4.0)
    assert isinstance(start, r.StartUpdate)
    return conductor


def test_requests_wait_in_common_while_the_generator_is_off_its_device() -> None:
    conductor = training()
    assert isinstance(conductor, LeasedConductor)
    assert ask(conductor, "s0", 5.0, sequence=2) == []
    assert conductor.deadline() == 6.0, "the batch clock runs"
    assert conductor.handle(r.Wake(), 6.0) == []
    assert conductor.delivery.due == ["g"]
    assert conductor.deadline() == math.inf, "what is due already sets no timer"
    ask(conductor, "s1", 6.5, sequence=2)
    done = conductor.handle(r.UpdateDone("trainer", 0, 0), 7.0)
    assert r.PublishWeights("trainer", 1) in done
    assert conductor.handle(r.Published("trainer", 0, 1), 8.0) == [r.YieldDevice("trainer", 0)]
    conductor.handle(r.DeviceYielded("trainer", 0, 0, 8, 0.1), 9.0)
    assert conductor.handle(r.DeviceTaken("g", 0, 0, 0.1), 10.0) == [r.ApplyWeights("g", 1)]
    (serve,) = conductor.handle(r.WeightsApplied("g", 0, 1), 11.0)
    assert isinstance(serve, r.Serve)
    assert [request.slot for request in serve.batch.requests] == ["s0", "s1"]


def test_a_trainer_that_must_go_delivers_first() -> None:
    conductor = training()
    ask(conductor, "s0", 5.0, sequence=2)
    ask(conductor, "s1", 5.0, sequence=2)  # a batch is due, so the generator waits for the device
    done = conductor.handle(r.UpdateDone("trainer", 0, 0), 20.0)  # min_hold_s is over
    assert isinstance(conductor, LeasedConductor)
    assert conductor.delivery.leases.present["trainer"].leaving
    assert [type(command) for command in done] == [r.ReleasePayloads, r.PublishWeights]
    assert conductor.handle(r.Published("trainer", 0, 1), 21.0) == [r.YieldDevice("trainer", 0)]


def test_a_saved_conductor_knows_who_holds_what_and_what_waits() -> None:
    conductor = serving()
    ask(conductor, "s0", 0.0)
    ask(conductor, "s1", 0.0)
    saved = json.loads(json.dumps(conductor.save()))
    restored = restore_conductor(conductor.settings, saved)
    assert restored.delivery == conductor.delivery
    restored.detach()
    assert isinstance(restored, LeasedConductor)
    assert restored.delivery.leases.holders == {}


def test_a_conductor_without_leases_saves_nothing_of_them() -> None:
    conductor = build_conductor(SchedulerSettings(batch_size=2))
    assert "delivery" not in conductor.save()


def test_a_negative_holding_time_is_refused() -> None:
    with pytest.raises(ValueError, match=r"min_hold_s is -1\.0; it must be finite and not negative"):
        LeaseSettings({}, min_hold_s=-1.0)
