"""Workers that share a device: one at a time with what it keeps there, and tensors that stay in its memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.plugins.workflow.tenants import Tenant
from tests.plugins.workflow.workers import Echo
from tests.process.runs import children, orphaned_folders

from polyrhythm.plugins.workflow import WaitTimeout, WorkerFailed, Workflow, seats

launchers = pytest.mark.parametrize("launcher", ["inline", "local"])
#: Bytes of `Tenant`: weights, both moments and the gradients of its layer, and its own numbers.
SIZE, HELD = 50_000, 4 * 50_000 * 5


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    assert not children()
    assert not orphaned_folders()


def make(launcher: Any = "local", **settings: Any) -> Workflow:
    return Workflow(launcher, sharing="lease", **settings)


@launchers
@pytest.mark.parametrize("devices", ["cpu", "sim:0"])
def test_two_workers_take_turns_with_all_that_they_have(launcher: Any, devices: str) -> None:
    with make(launcher) as work:
        one, other = (work.group(name, Tenant, seats(1, devices=devices)) for name in ("one", "other"))
        here, there = work.channel("here", 1), work.channel("there", 1)
        first = one.alternate(here, there, 3)
        second = other.alternate(there, here, 3)
        assert (first.wait(), second.wait()) == ([True], [True])
        counters = work.statistics()
        for name in ("one-0", "other-0"):
            assert counters[name]["switches"] >= 4
            assert counters[name]["switch_s"] > 0
        assert any(HELD * 0.9 < own["offloaded_bytes"] <= HELD * 1.1 for own in counters.values())
        moves = one.moves().wait()[0]
        assert moves[0] == moves[1] >= 2


def test_workers_of_two_devices_share_each_with_those_of_it() -> None:
    with make("inline") as work:
        ones = work.group("one", Tenant, seats(devices="sim:0-1"))
        others = work.group("other", Tenant, seats(devices="sim:0-1"))
        alone = work.group("alone", Tenant, seats(devices="sim:2-3"))
        for _ in range(2):
            stepping = [group.step() for group in (ones, others, alone)]
            assert all(handle.wait() for handle in stepping)
        assert all(moved[0] >= 1 for moved in ones.moves().wait() + others.moves().wait())
        assert alone.moves().wait() == [[0, 0], [0, 0]]


@launchers
@pytest.mark.parametrize("fails", ["offload", "onload"])
def test_an_offload_or_onload_that_raises_ends_the_workflow(launcher: Any, fails: str) -> None:
    with make(launcher) as work:
        bad, good = work.group("bad", Echo, fails=fails), work.group("good", Echo)
        work.channel("items", 1)

        def use_both() -> None:
            for _ in range(3):
                good.where().wait()
                bad.where().wait()

        with pytest.raises(
            WorkerFailed, match=f"worker bad rank 0: {fails} raised RuntimeError: the arm is in the way"
        ):
            use_both()


@launchers
def test_a_constructor_that_raises_on_its_device_is_named(launcher: Any) -> None:
    with make(launcher) as work:
        work.group("good", Echo)
        work.group("bad", Echo, raises=True)
        with pytest.raises(WorkerFailed, match=r"worker bad rank 0: .*:Echo cannot be made: ValueError: told to raise"):
            work.start()


def test_a_worker_that_dies_on_the_device_is_named_to_who_waits_for_it() -> None:
    with make() as work:
        one, other = work.group("one", Echo), work.group("other", Echo)
        work.start()
        one.die()
        with pytest.raises(WorkerFailed, match=r"^worker one rank 0: was ended by SIGKILL$"):
            other.take(work.channel("items", 1)).wait()


def test_a_worker_that_never_leaves_is_named_at_the_deadline() -> None:
    with make(wait_s=1.0) as work:
        one, other = work.group("one", Echo, 2), work.group("other", Echo)
        work.start()
        one.on(1).spend(60.0)
        with pytest.raises(WorkerFailed, match="worker one rank 1: has not given cpu to other-0 for 1 s; have it wait"):
            other.where().wait(30.0)


@launchers
def test_a_lock_across_a_wait_for_the_same_device_ends_at_its_deadline(launcher: Any) -> None:
    with make(launcher) as work:
        one, other = work.group("one", Echo), work.group("other", Echo)
        items = work.channel("items", 1)
        taking = one.lock_and_take(items, 1.0)
        giving = other.give(items, 1)
        why = "lock_and_take raised WaitTimeout: 1 s were over .* .meanwhile other-0 waits for cpu, on which one-0 is"
        with pytest.raises(WorkerFailed, match=f"worker one rank 0: {why}"):
            taking.wait()
        del giving


def test_a_lock_keeps_the_device_while_something_from_elsewhere_is_awaited() -> None:
    with make() as work:
        one, other = work.group("one", Echo), work.group("other", Echo)
        items = work.channel("items", 1)
        work.start()
        taking, using = one.lock_and_take(items), other.where()
        with pytest.raises(WaitTimeout, match="other-0 waits for cpu, on which one-0 is"):
            using.wait(1.5)
        items.put("x")
        assert taking.wait() == ["x"]
        assert using.wait()


@launchers
def test_a_worker_that_polls_leaves_its_device(launcher: Any) -> None:
    with make(launcher) as work:
        one, other = work.group("one", Echo), work.group("other", Echo)
        items = work.channel("items", 1)
        polling = one.poll(items)
        other.give(items, 1)
        assert polling.wait() == [0]


@pytest.mark.parametrize("sharing", ["share", "lease"])
@pytest.mark.parametrize("size", [10, 100_000], ids=["small", "large"])
def test_tensors_of_an_on_device_channel_stay_in_its_memory(sharing: Any, size: int) -> None:
    """With the lease the items come while the receiver is off the device."""
    with Workflow("local", sharing=sharing) as work:
        one, other = (work.group(name, Tenant, seats(devices="sim:0")) for name in ("one", "other"))
        items = work.channel("items", 2, on_device=True)
        giving, taking = one.give(items, 5, size), other.take(items, 5)
        assert giving.wait() == taking.wait() == [15.0 * size]
        counters = work.statistics()["other-0"]
        assert counters.get("parcels/device", 0) == (5 if size > 10 else 0)


@pytest.mark.parametrize("devices", ["sim:0", "sim:0-1"])
def test_sent_tensors_stay_on_the_device_if_the_receiver_is_there(devices: str) -> None:
    with Workflow("local") as work:
        tenants = work.group("tenant", Tenant, seats(2, devices=devices))
        tenants.on(0).send_on(100_000, 1)
        assert tenants.on(1).receive(0).wait() == [100_000.0]
        assert tenants.spread(100_000).wait() == [100_000.0] * 2
        counters = work.statistics()["tenant-1"]
        ways = [counters.get(f"parcels/{way}", 0) for way in ("device", "host")]
        assert ways == ([2, 0] if devices == "sim:0" else [0, 2])


def test_an_item_in_the_memory_of_another_device_is_refused() -> None:
    with Workflow("local") as work:
        one, beside, far = (work.group(name, Tenant, seats(devices=device)) for name, device in PLACES)
        items = work.channel("items", 2, on_device=True)
        one.give(items, 1, 100_000).wait()
        why = "an item of channel 'items' cannot be had: its tensors are in the memory of sim:0, .* without on_device"
        with pytest.raises(WorkerFailed, match=f"worker far rank 0: take raised WorkflowError: {why}"):
            far.take(items, 1).wait()
        del beside


PLACES = [("one", "sim:0"), ("beside", "sim:0"), ("far", "sim:1")]
