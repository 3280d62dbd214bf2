"""Workers that share a device: one at a time with what it keeps there, and tensors that stay in its memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.long import long
from tests.plugins.workflow.conftest import OnHosts
from tests.plugins.workflow.tenants import CLOSED, Tenant
from tests.plugins.workflow.workers import Echo
from tests.process.runs import children, orphaned_folders

from polyrhythm.errors import StartError
from polyrhythm.plugins.workflow import WaitTimeout, WorkerFailed, WorkerGroup, Workflow, seats

launchers = pytest.mark.parametrize("launcher", ["inline", "local"])
#: Bytes of `Tenant`: weights, both moments and the gradients of its layer, and its own numbers.
HELD = 4 * 50_000 * 5
#: Numbers of a tensor that is too large for a message.
LARGE = 100_000


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    assert not children()
    assert not orphaned_folders()


def make(launcher: Any = "local", **settings: Any) -> Workflow:
    return Workflow(launcher, sharing="lease", **settings)


def alternate(work: Workflow, one: WorkerGroup, other: WorkerGroup) -> None:
    """Both leave the device and come back several times, with the same bits."""
    here, there = work.channel("here", 1), work.channel("there", 1)
    first, second = one.alternate(here, there, 3), other.alternate(there, here, 3)
    assert (first.wait(), second.wait()) == ([True], [True])
    counters = work.statistics()
    for name in ("one-0", "other-0"):
        assert counters[name]["switches"] >= 4
        assert counters[name]["switch_s"] > 0
    assert any(HELD * 0.9 < own["offloaded_bytes"] <= HELD * 1.1 for own in counters.values())
    ((left, came),) = one.moves().wait()
    assert left == came >= 2


@pytest.mark.parametrize("devices", ["cpu", "sim:0"])
def test_two_workers_take_turns_with_all_that_they_have(devices: str) -> None:
    with make("inline") as work:
        alternate(work, *(work.group(name, Tenant, seats(1, devices=devices)) for name in ("one", "other")))


def test_tensors_stay_on_the_device_while_workers_take_turns_on_it() -> None:
    check_turns_and_shipments("sim:0")


def check_turns_and_shipments(device: str) -> None:
    """All in one workflow, as a process needs seconds to import torch."""
    with make() as work:
        one, other = (work.group(name, Tenant, seats(devices=device)) for name in ("one", "other"))
        items = work.channel("items", 2, on_device=True)
        alternate(work, one, other)
        for size, shipped in ((10, 0), (LARGE, 5)):
            giving, taking = one.give(items, 5, size), other.take(items, 5)
            assert giving.wait() == taking.wait() == [15.0 * size]
            assert ways_of(work, "other-0").get("device", 0) == shipped
        one.send_on(LARGE, 0, "other")
        assert other.receive(0, "one").wait() == [LARGE]
        assert ways_of(work, "other-0")["device"] == 6


def test_a_worker_that_is_closed_off_its_device_has_its_tensors() -> None:
    CLOSED.clear()
    with make("inline") as work:
        one, other = work.group("one", Tenant), work.group("other", Tenant)
        states = {"one": one.step().wait()[0], "other": other.step().wait()[0]}
    assert dict(CLOSED) == states


def test_the_driver_and_the_worker_can_move_it_without_leases() -> None:
    with Workflow("inline") as work:
        tenant = work.group("tenant", Tenant)
        ((first, second, before, after),) = tenant.step_away().wait()
        assert (second, after) == (0, before)
        assert tenant.offload().wait() == [first]
        assert HELD * 0.9 < first <= HELD
        assert tenant.onload().wait() == [None]
        tenant.offload()
        assert tenant.state().wait() == [before]


def ways_of(work: Workflow, worker: str) -> dict[str, float]:
    return {name.partition("/")[2]: count for name, count in work.statistics()[worker].items() if "/" in name}


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


@long(3, "a device on each of two hosts")
def test_equal_names_of_devices_on_two_hosts_are_two_devices(tmp_path: Path) -> None:
    with OnHosts(tmp_path, sharing="lease") as work:
        echo, items = work.group("echo", Echo, seats(2, devices="sim:0")), work.channel("items", 1)
        with pytest.raises(WaitTimeout):
            echo.on(0).lock_and_take(items).wait(0.2)
        assert echo.on(1).where().wait() == [("echo", 1, 2, "cpu")]
        echo.on(1).send_large(0)
        assert echo.on(1).add(1).wait() == [2]
        items.put(1)
        assert echo.on(0).recv_large(1).wait() == [100_000]


@launchers
def test_a_device_that_is_not_there_is_named_before_anything_starts(launcher: Any) -> None:
    with Workflow(launcher) as work:
        work.group("echo", Echo, seats(devices="0,99"))
        with pytest.raises(StartError, match=r"a seat is on cuda:99, and this machine has \d+ CUDA devices; .*sim:99"):
            work.start()


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
        one.on(1).spend(3.0)
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


@long(10, "three processes that import torch")
def test_tensors_for_another_device_go_through_host_memory_or_are_refused() -> None:
    with Workflow("local") as work:
        beside = work.group("beside", Tenant, seats(2, devices="sim:0"))
        far = work.group("far", Tenant, seats(devices="sim:1"))
        items = work.channel("items", 2, on_device=True)
        beside.on(0).send_on(LARGE, 0, "far")
        assert far.receive(0, "beside").wait() == [LARGE]
        assert beside.spread(LARGE).wait() == [LARGE, LARGE]
        assert ways_of(work, "far-0").keys() == {"message", "host"}
        assert ways_of(work, "beside-1").keys() == {"message", "device"}
        beside.on(0).give(items, 1, LARGE).wait()
        why = "an item of channel 'items' cannot be had: its tensors are in the memory of sim:0, .* without on_device"
        with pytest.raises(WorkerFailed, match=f"worker far rank 0: take raised WorkflowError: {why}"):
            far.take(items, 1).wait()
