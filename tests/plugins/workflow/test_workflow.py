"""What a workflow does by every launcher alike."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from tests.plugins.workflow.conftest import Make, OnHosts, every, every_way
from tests.plugins.workflow.workers import Consumer, Deadlocked, Echo, Producer
from tests.process.runs import wait_until

from polyrhythm.plugins.workflow import ChannelClosed, WaitTimeout, Worker, WorkerFailed, Workflow, WorkflowError, seats
from polyrhythm.plugins.workflow import protocol as p
from polyrhythm.plugins.workflow.hosting import open_inline
from polyrhythm.plugins.workflow.station import WorkerFactory
from polyrhythm.plugins.workflow.values import pack_whole
from polyrhythm.runtime.factories import Resources
from polyrhythm.runtime.messages import FromWorker, ToWorker


@every
def test_a_group_is_called_on_all_ranks_or_some_and_measured(make: Make) -> None:
    with make() as work:
        echo, other = work.group("echo", Echo, 2, 10), work.group("other", Echo)
        assert echo.where().wait() == [("echo", 0, 2, "cpu"), ("echo", 1, 2, "cpu")]
        assert other.where().wait() == [("other", 0, 1, "cpu")]
        adding = [echo.add(torch.arange(3.0), more=number) for number in range(3)]
        for number, handle in enumerate(adding):
            for rank, found in enumerate(handle.wait()):
                assert torch.equal(found, torch.arange(3.0) + 10 + rank + number)
            assert handle.done
            assert 0 < handle.seconds("adding", "min") <= handle.seconds("adding", "max") <= handle.seconds(None, "max")
        assert echo.on(1).add(1).wait() == [12]
        slept = echo.spend(0.05)
        assert slept.seconds("slept", "min") < slept.seconds("slept", "max") >= 0.05
        reduced = [slept.seconds("slept", how) for how in ("min", "max", "mean")]  # type: ignore[arg-type]
        assert reduced[2] == pytest.approx((reduced[0] + reduced[1]) / 2)
        with pytest.raises(ValueError, match="timer = 'x': no rank of spend has it; there are slept, spend"):
            slept.seconds("x")


@every_way
@pytest.mark.parametrize("size", [4, 20_000], ids=["small", "large"])
def test_a_pipeline_gives_every_item_to_one_consumer(make: Make, size: int) -> None:
    count = 6
    with make() as work:
        producers, consumers = work.group("producer", Producer, 2), work.group("consumer", Consumer, 2)
        items = work.channel("items", 3, producers=2)
        producing, consuming = producers.produce(items, count, size), consumers.consume(items)
        put = producing.wait()
        got = consuming.wait()
        assert sum(total for total, _ in got) == pytest.approx(sum(put))
        seen = [item for _, own in got for item in own]
        assert sorted(seen) == [(rank, number) for rank in range(2) for number in range(count)]
        for _, own in got:  # of each producer in its order
            assert all(own.index((r, n)) < own.index((r, m)) for r, n in own for q, m in own if r == q and n < m)
        ways = set(ways_of(work)) - {"message"}
        expected = {Workflow: {"kept"} if work._launcher == "inline" else {"host"}, OnHosts: {"tcp"}}
        assert ways == (expected[type(work)] if size > 4 else set())


def ways_of(work: Workflow) -> Counter[str]:
    ways = Counter[str]()
    for counters in work.statistics().values():
        for name, count in counters.items():
            if name.startswith("parcels/"):
                ways[name.removeprefix("parcels/")] += int(count)
    return ways


@every_way
def test_workers_send_and_broadcast_to_each_other(make: Make) -> None:
    with make() as work:
        echo = work.group("echo", Echo, 3)
        for size in (3, 20_000):
            assert echo.ring(size).wait() == [True] * 3
            assert echo.spread(size).wait() == [(3.0 * size, size), (6.0 * size, 2.0 * size), (3.0 * size, 3.0 * size)]


@every
@pytest.mark.parametrize("size", [3, 20_000], ids=["small", "large"])
def test_workers_send_and_receive_without_waiting(make: Make, size: int) -> None:
    with make() as work:
        echo = work.group("echo", Echo, 3)
        assert echo.ring_async(size, 2).wait() == [[20.0, 21.0], [0.0, 1.0], [10.0, 11.0]]


@every
def test_gets_and_puts_under_way(make: Make) -> None:
    with make() as work:
        echo, one, other = work.group("echo", Echo), work.channel("one", 1), work.channel("other", 2)
        taking = echo.take_both(one, other)
        other.put("b")
        one.put("a")
        assert taking.wait() == [("a", "b")]
        echo.begin(one).wait()
        one.put("in a later call")
        assert echo.finish().wait() == ["in a later call"]
        giving = echo.give_async(other, 4)
        coming = [other.get_async() for _ in range(4)]
        assert [pending.wait() for pending in coming] == [0, 1, 2, 3]
        assert giving.wait() == [4]
        puts = [one.put_async(number) for number in range(2)]  # there is room for one
        puts[0].wait()
        assert one.get() == 0
        puts[1].wait()
        assert (puts[1].done, one.get()) == (True, 1)


@every
def test_a_put_that_failed_reaches_the_driver_at_the_end(make: Make) -> None:
    with make() as work:
        full = work.channel("full", 1)
        work.group("echo", Echo)
        late = full.get_async(timeout_s=0.05)
        for _ in range(2):
            with pytest.raises(WaitTimeout, match=r"0\.05 s were over while it waited for 1 item"):
                late.wait()
        full.put("first")
        full.put_async("second", timeout_s=0.05)
        with pytest.raises(WaitTimeout, match="for room in channel 'full'"):
            work.__exit__(None, None, None)


@every
def test_a_put_that_raises_an_earlier_error_is_waited_for_too(make: Make) -> None:
    with make() as work:
        full, closed, other = work.channel("full", 1), work.channel("closed", 1), work.channel("other", 1)
        work.group("echo", Echo)
        closed.close()
        full.put("first")
        refused = closed.put_async("never")
        other.put("answered later")
        assert refused.done
        with pytest.raises(ChannelClosed):
            full.put_async("second", timeout_s=0.05)
        with pytest.raises(WaitTimeout, match="for room in channel 'full'"):
            work.puts.finish()


@every
def test_a_put_that_failed_reaches_the_caller_of_its_method(make: Make) -> None:
    with make() as work:
        echo, full, closed = work.group("echo", Echo), work.channel("full", 1), work.channel("closed", 1)
        closed.close()
        with pytest.raises(ChannelClosed):
            closed.get_async().wait()
        with pytest.raises(WorkerFailed, match=r"give_async raised WaitTimeout: 0\.1 s were over"):
            echo.give_async(full, 2, 0.1).wait()


@every
def test_the_driver_uses_channels_too(make: Make) -> None:
    with make() as work:
        echo = work.group("echo", Echo)
        items = work.channel("items", 8, order=lambda entry: -entry.weight)
        for number in range(6):
            items.put(number, key="even" if number % 2 == 0 else "odd", weight=float(number))
        assert items.get(key="even") == 4
        assert echo.take(items).wait() == [5]
        assert items.get_batch(weight=4.0) == [3, 2]
        large = np.arange(50_000.0)
        items.put({"large": large}, weight=9.0)
        assert np.array_equal(echo.take(items).wait()[0]["large"], large)
        later = work.channel("later", 1)
        taking = echo.take(later)
        later.put("late")
        assert taking.wait() == ["late"]
        items.close()
        assert list(items) == [1, 0]
        with pytest.raises(ChannelClosed, match="'items' is closed"):
            items.put(7)


@every
def test_what_raises_ends_the_workflow_and_is_told_to_all_who_wait(make: Make) -> None:
    """The driver waits for the worker that waits for nothing, not for the one that fails."""
    with make() as work:
        echo, items = work.group("echo", Echo, 3), work.channel("items", 1)
        waiting = echo.on(0, 2).take(items)
        echo.on(1).fail()
        with pytest.raises(WorkerFailed) as raised:
            waiting.wait()
        failed = raised.value
        assert (failed.group, failed.rank) == ("echo", 1)
        assert failed.cause == "fail raised RuntimeError: the gripper is stuck"
        assert "in fail\n    raise RuntimeError" in failed.trace
        assert str(failed).startswith("worker echo rank 1: fail raised RuntimeError: the gripper is stuck\n")
        for later in (lambda: echo.where().wait(), lambda: items.put(0)):
            with pytest.raises(WorkflowError, match="the gripper is stuck"):
                later()


@every
def test_a_worker_that_cannot_be_made_is_named(make: Make) -> None:
    work = make()
    work.group("good", Echo)
    work.group("bad", Echo, 1, raises=True)
    with work, pytest.raises(WorkerFailed, match=r"worker bad rank 0: .*Echo cannot be made: ValueError: told to"):
        work.start()
    with pytest.raises(WorkflowError, match="the workflow is closed"):
        work.start()


@every
def test_waits_end_at_their_deadlines(make: Make) -> None:
    with make() as work:
        echo, full = work.group("echo", Echo, 2), work.channel("full", 2)
        with pytest.raises(WaitTimeout, match=r"0\.05 s were over while it waited for 1 item of channel 'full'"):
            full.get(timeout_s=0.05)
        filling = echo.on(0).give(full, 3)

        def waits_for_room() -> bool:
            with pytest.raises(WaitTimeout, match=r"not done within 0\.5 s: ") as over:
                filling.wait(timeout_s=0.5)
            return "echo-0 waits for room in channel 'full'" in str(over.value)

        wait_until(waits_for_room)
        assert full.get() == 0
        assert filling.wait() == [3], "it went on"
        with pytest.raises(WorkerFailed, match=r"echo rank 1: give raised WaitTimeout: 0\.1 s were over"):
            echo.on(1).give(full, 3, 0.1).wait()


@every
def test_a_closed_workflow_ends_what_waits(make: Make) -> None:
    with make() as work:
        echo, items = work.group("echo", Echo, 2), work.channel("items", 1)
        handle = echo.take(items)
        work.close()
        work.close()
        with pytest.raises(WorkflowError, match="the workflow was closed"):
            handle.wait()
        with pytest.raises(WorkflowError, match="the workflow was closed"):
            echo.where().wait()


@every
def test_what_a_method_cannot_do_is_said_with_its_place(make: Make) -> None:
    with make() as work:
        echo = work.group("echo", Echo)
        with pytest.raises(TypeError, match=r"add: arguments\[0\]\[0\]: a builtins.object cannot be sent"):
            echo.add(object())
        with pytest.raises(WorkerFailed, match=r"raised TypeError: what unsendable returns: a builtins\.object"):
            echo.unsendable().wait()


# ---------------------------------------------------------------- one process


def test_inline_a_deadlock_is_found_at_once_and_said() -> None:
    with Workflow("inline") as work:
        workers = work.group("worker", Deadlocked, 2)
        left, right = work.channel("left", 1), work.channel("right", 1)
        workers.on(0).wait(left, right)
        other = workers.on(1).wait(right, left)
        with pytest.raises(WorkerFailed, match=r"600 s were .* 'left' .*meanwhile worker-1 waits for .* 'right'"):
            other.wait(timeout_s=900.0)


def test_inline_runs_are_equal() -> None:
    def order() -> list[Any]:
        with Workflow("inline") as work:
            producers, consumers = work.group("producer", Producer, 3), work.group("consumer", Consumer, 2)
            items = work.channel("items", 2, producers=3)
            producers.produce(items, 5, 4)
            return consumers.consume(items).wait()

    assert order() == order()


# ---------------------------------------------------------------- what is declared


class NoWorker:
    pass


def test_what_is_declared_wrongly_is_refused() -> None:
    class Local(Worker):
        pass

    work = Workflow("inline")
    with pytest.raises(ValueError, match="launcher = 'rey': write inline, local or ray"):
        Workflow("rey")  # type: ignore[arg-type]
    with pytest.raises(WorkflowError, match="no workers; declare a group first"):
        work.start()
    work = Workflow("inline")
    for name in ("Echo", "a-b", "", "1"):
        with pytest.raises(ValueError, match="give it a name of its own"):
            work.group(name, Echo)
    with pytest.raises(ValueError, match="seats = 0; it needs one at least"):
        work.group("echo", Echo, 0)
    with pytest.raises(ValueError, match="NoWorker'> is not a class derived from"):
        work.group("echo", NoWorker)  # type: ignore[type-var,arg-type]
    with pytest.raises(ValueError, match="import its class by name; define it at the top of a file"):
        work.group("echo", Local)
    with pytest.raises(TypeError, match=r"group 'echo': arguments.* cannot be sent"):
        work.group("echo", Echo, 1, object())
    for words in ({"capacity": 0}, {"capacity": 1, "producers": 0}):
        with pytest.raises(ValueError, match="each is 1 or more"):
            work.channel("c", **words)
    work.channel("c", 1)
    with pytest.raises(ValueError, match="channel 'c' is there already"):
        work.channel("c", 1)
    with work:
        echo = work.group("echo", Echo, 2)
        with pytest.raises(ValueError, match="give it a name of its own"):
            work.group("echo", Echo)
        with pytest.raises(AttributeError, match=r"Echo has no public method 'walk'; it has .*where, add"):
            echo.walk()
        with pytest.raises(AttributeError, match="no public method 'send'"):
            echo.send(1, 2)
        with pytest.raises(ValueError, match=r"ranks = \[2\]: group 'echo' has ranks 0 to 1"):
            echo.on(2)
        work.start()
        with pytest.raises(WorkflowError, match="declare all groups before the first call"):
            work.group("more", Echo)
        with pytest.raises(ValueError, match="channel 'c' is there already"):
            work.channel("c", 1)
        with pytest.raises(WorkerFailed, match="rank = 7: group 'echo' has ranks 0 to 1"):
            echo.ask_elsewhere(7).wait()


def test_seats_are_dealt_round() -> None:
    assert [seat.device for seat in seats(3, devices="0,2", threads=2)] == ["cuda:0", "cuda:2", "cuda:0"]
    assert [(seat.device, seat.threads) for seat in seats(2, threads=2)] == [("cpu", 2), ("cpu", 2)]
    assert len(seats(devices="0-3")) == 4
    assert [seat.device for seat in seats(devices="sim:0-1")] == ["sim:0", "sim:1"]
    for devices in ("all", "sim:", "sim:cpu", "sim:all", "sim:x", "0,0", "cuda:0", ""):
        with pytest.raises(ValueError, match=f"devices = {devices!r}: write cpu, ids such as"):
            seats(devices=devices)


def test_every_worker_has_a_turn_however_little_time_there_is() -> None:
    """Inline, what one does not do in its turn is not awaited: a deadline would pass."""
    nothing, echo = pack_whole(((), {}), "x"), "tests.plugins.workflow.workers:Echo"
    made = [WorkerFactory(f"echo-{rank}", "echo", rank, echo, nothing, {"echo": 3}, 9.0) for rank in range(3)]
    with closing(open_inline([(factory, Resources()) for factory in made]).hosting) as hosting:
        hosting.start()
        for name in ("echo-2", "echo-1", "echo-0"):
            hosting.send(name, ToWorker(name, p.encode(p.Call(1, "where", nothing))))
            event = hosting.receive(0.0)
            assert isinstance(event, FromWorker)
            assert event.station == name
