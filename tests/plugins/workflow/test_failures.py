"""Workers that die, hang or are given up, and a driver that is interrupted: who is told what, and what is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tests.long import long
from tests.plugins.workflow.conftest import Make, every, isolated
from tests.plugins.workflow.workers import Consumer, Echo, Producer
from tests.process.runs import PATIENCE_S, ROOT, children, orphaned_folders

from polyrhythm.plugins.cluster.parcels import KeptParcels
from polyrhythm.plugins.workflow import WorkerFailed, Workflow, WorkflowError


@isolated
def test_a_killed_worker_is_named_to_whoever_waits_for_another(make: Make) -> None:
    with make() as work:
        echo, items = work.group("echo", Echo, 3), work.channel("items", 1)
        waiting = echo.on(0, 2).take(items)
        echo.on(1).die()
        with pytest.raises(WorkerFailed, match=r"^worker echo rank 1: was ended by SIGKILL$") as raised:
            waiting.wait()
        assert (raised.value.group, raised.value.rank) == ("echo", 1)
        with pytest.raises(WorkflowError, match="echo rank 1"):
            items.get()


@isolated
def test_a_lost_worker_is_named_to_whoever_waits_for_something_under_way(make: Make) -> None:
    with make() as work:
        echo, items = work.group("echo", Echo, 2), work.channel("items", 1)
        getting = items.get_async()
        items_full = work.channel("full", 1)
        items_full.put(0)
        putting = items_full.put_async(1)
        taking = echo.on(0).take_both(items, items)
        echo.on(1).die()
        for waits in (getting, putting, taking):
            with pytest.raises(WorkerFailed, match="worker echo rank 1: was ended by SIGKILL"):
                waits.wait()


@isolated
def test_a_worker_that_is_killed_from_outside_is_noticed_while_the_driver_waits_for_a_channel(make: Make) -> None:
    with make() as work:
        work.group("echo", Echo, 2)
        items = work.channel("items", 1)
        work.start()
        threading.Timer(1.0, lambda: os.kill(work.processes()["echo-1"], signal.SIGKILL)).start()
        with pytest.raises(WorkerFailed, match="worker echo rank 1: was ended by SIGKILL"):
            items.get()


@isolated
def test_a_worker_that_dies_while_it_is_made_is_named(make: Make) -> None:
    work = make()
    work.group("good", Echo)
    work.group("bad", Echo, 2, dies=True)
    with work, pytest.raises(WorkerFailed, match=r"^worker bad rank [01]: was ended by SIGKILL$"):
        work.start()


def test_an_order_that_uses_its_own_workflow_is_refused() -> None:
    with Workflow("local") as work:
        work.group("echo", Echo)
        inner = work.channel("inner", 1)
        items = work.channel("items", 1, order=lambda entry: inner.get())
        with pytest.raises(WorkflowError, match="the order of channel 'items' raised WorkflowError: the order of a"):
            items.put(1)


def test_an_interrupt_while_workers_are_made_leaves_nothing() -> None:
    with Workflow("local") as work:
        work.group("slow", Echo, 2, sleeps=3600.0)
        threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            work.start()
    assert not children()
    assert not orphaned_folders()


@isolated
def test_items_of_a_killed_workflow_leave_nothing_in_shared_memory(make: Make) -> None:
    """The fixture looks; here a producer has large items under way when the consumer is killed."""
    with make() as work:
        producer, echo = work.group("producer", Producer, 1), work.group("echo", Echo)
        items = work.channel("items", 2)
        producing = producer.produce(items, 10, 100_000)
        while not items.get(timeout_s=PATIENCE_S):
            pass
        echo.die()
        with pytest.raises(WorkerFailed, match="worker echo rank 0"):
            producing.wait()


@long(7, "a stopped worker; tests/process has a stopped station")
@pytest.mark.parametrize("launcher", ["local"])
def test_a_stopped_worker_is_found_by_its_silence(launcher: Any) -> None:
    with Workflow(launcher, heartbeat_s=5.0) as work:
        echo, items = work.group("echo", Echo, 2), work.channel("items", 1)
        waiting = echo.on(0).take(items)
        echo.on(1).stop()
        with pytest.raises(WorkerFailed, match=r"worker echo rank 1: sent no heartbeat for 5 s \(heartbeat_s\)"):
            waiting.wait()
    assert not children()
    assert not orphaned_folders()


@every
def test_a_consumer_that_is_gone_ends_its_producer_at_the_deadline(make: Make) -> None:
    with make() as work:
        echo, items = work.group("echo", Echo, 2), work.channel("items", 2)
        giving = echo.on(0).give(items, 5, 0.5)
        assert echo.on(1).take(items).wait() == [0]
        why = "give raised WaitTimeout: 0.5 s were over while it waited for room in channel 'items' .it is full: 2"
        with pytest.raises(WorkerFailed, match=f"worker echo rank 0: {why}"):
            giving.wait()


@every
def test_a_large_item_that_nobody_took_in_time_is_dropped(make: Make) -> None:
    with make() as work:
        work.group("echo", Echo)
        items = work.channel("items", 1)
        items.put(b"x" * 100_000)
        with pytest.raises(TimeoutError):
            items.put(b"y" * 100_000, timeout_s=0.1)
        assert items.get() == b"x" * 100_000
        parcels: Any = work.carrier._parcels
        assert not (parcels._kept if isinstance(parcels, KeptParcels) else list(parcels._folder.iterdir()))


def test_an_interrupt_of_the_driver_leaves_nothing() -> None:
    with Workflow("local") as work:
        waiting = work.group("echo", Echo, 2).take(work.channel("items", 1))
        threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            waiting.wait()
    assert not children()
    assert not orphaned_folders()


def test_nothing_is_left_of_a_driver_that_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its workers die with it; its folder in shared memory is removed by the next start. In a memory of its own, as
    other sessions would take the folder for theirs."""
    shared = tmp_path / "memory"
    shared.mkdir()
    monkeypatch.setenv("POLYRHYTHM_SHARED_MEMORY", str(shared))
    script = tmp_path / "driver.py"
    script.write_text(
        textwrap.dedent("""
        from tests.plugins.workflow.workers import Echo
        from polyrhythm.plugins.workflow import Workflow

        if __name__ == "__main__":
            work = Workflow("local", logs="logs")
            echo, items = work.group("echo", Echo, 2), work.channel("items", 1)
            handle = echo.take(items)
            print(*work.processes().values(), flush=True)
            handle.wait()
        """)
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment, cwd=tmp_path
    ) as driver:
        assert driver.stdout is not None
        workers = [int(pid) for pid in driver.stdout.readline().split()]
        driver.kill()
    assert len(workers) == 2
    until = time.monotonic() + PATIENCE_S
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < until
        time.sleep(0.05)
    (left,) = shared.iterdir()
    with Workflow("local") as work:
        assert work.group("echo", Echo).where().wait() == [("echo", 0, 1, "cpu")]
        assert not left.exists()
    assert not list(shared.iterdir())


def test_what_workers_print_is_in_the_logs_that_were_asked_for(tmp_path: Path) -> None:
    with Workflow("local", logs=tmp_path / "logs") as work:
        consumer, items = work.group("consumer", Consumer), work.channel("items", 1)
        items.close()
        assert consumer.consume(items).wait() == [(0.0, [])]
    assert [file.name for file in (tmp_path / "logs").iterdir()] == ["consumer-0.0.log"]
