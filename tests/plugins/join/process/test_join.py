"""Simulators that join a run over real sockets: they do what the run's own do, and may break off at any time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.long import long
from tests.plugins.join.process.joined import Joining, attempts, joined, lost, opened
from tests.process.breaking import PERSON
from tests.process.runs import ASYNCHRONOUS, LOCKSTEP, PATIENCE_S, ROOT, config, wait_until
from tests.runtime.links import link_to

from polyrhythm.cli.main import main
from polyrhythm.config.load import load_env, merge
from polyrhythm.errors import RunHalted, StartError
from polyrhythm.pipeline.build import Pipeline, build_pipeline
from polyrhythm.pipeline.context import RunContext
from polyrhythm.pipeline.evaluation.standalone import without_joining
from polyrhythm.pipeline.observers.base import Observer
from polyrhythm.pipeline.run_loop import Interrupted
from polyrhythm.plugins.join.messages import write_token
from polyrhythm.runtime.hosting import dropped_messages
from polyrhythm.runtime.transport.authentication import make_keys
from polyrhythm.scheduler import records

STATION = "simulator-joined-0"


class On(Observer):
    """Does something once, when a kind of event has come so many times."""

    def __init__(self, kind: type, count: int, then: Callable[[], None]) -> None:
        self.hears, self.count, self._then = (kind,), count, then  # type: ignore[misc]

    def on_decision(self, now: float, event: Any, commands: Any) -> None:
        self.count -= 1
        if self.count == 0:
            self._then()


def run_until(pipeline: Pipeline, done: Callable[[], bool]) -> None:
    """Go on until something is so."""
    until = time.monotonic() + PATIENCE_S
    pipeline.loop.stop = lambda: done() or time.monotonic() > until
    with pytest.raises(Interrupted):
        pipeline.loop.await_evaluation("one that never comes")
    pipeline.loop.stop = lambda: False
    assert done()


# ---------------------------------------------------------------- it is a simulator


def test_a_run_learns_the_same_bit_by_bit_from_a_simulator_that_joined(tmp_path: Path) -> None:
    """Observations, actions, samples and noise are those of a simulator in the run's own process."""
    base = merge(LOCKSTEP, {"launcher": "inline"})
    own = build_pipeline(RunContext(config(base)))
    own.loop.train_until(2)
    expected = own.weights.read()[1]
    own.close()
    alone = merge(base, {"rollout": {"simulators": 0}, "join": {"simulators": 1}})
    with joined(tmp_path / "joined", alone) as (pipeline, _):
        pipeline.loop.train_until(2)
        found = pipeline.weights.read()[1]
        assert dropped_messages(pipeline.launcher.hosting) == {}
        statistics = pipeline.launcher.hosting.statistics(fresh=True)[STATION]
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert statistics["join_events"] > 40


def test_segments_and_an_evaluation_run_in_a_simulator_that_joined(tmp_path: Path) -> None:
    with joined(tmp_path, rollout={"segment_steps": 5}) as (pipeline, _):
        pipeline.loop.train_until(2)
        assert len(pipeline.evaluate("after", [records.Episode(0, 0, seed, True) for seed in range(4)])) == 4
        ends = {d.event.end for d in pipeline.loop.trace if isinstance(d.event, records.SampleFinished)}
    assert records.SampleEnd.SEGMENT in ends


def test_in_processes_a_run_of_its_own_simulator_takes_another_one_in(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    base = merge(ASYNCHRONOUS, {"rollout": {"simulators": 1, "env_batches": 1}})
    with joined(tmp_path, base, join={"simulators": 1, "min_simulators": 2}) as (pipeline, _):
        pipeline.loop.train_until(4)
        finished = [d.event for d in pipeline.loop.trace if isinstance(d.event, records.SampleFinished)]
        assert {event.simulator for event in finished} == {"simulator-0", STATION}
        assert f"a simulator has joined as {STATION}" in caplog.messages
        ledger = pipeline.loop.conductor.ledger
        assert (ledger.imbalance, ledger.running, dropped_messages(pipeline.launcher.hosting)) == (0, 0, {})


@long(20, "with a Ray of its own")
def test_a_simulator_joins_a_run_on_a_ray_cluster(tmp_path: Path) -> None:
    """Its place is on the driver's machine, at the address that the run has named."""
    pytest.importorskip("ray", reason="the ray extra is not installed")
    base = merge(ASYNCHRONOUS, {"launcher": "ray", "rollout": {"simulators": 1, "env_batches": 1}})
    with joined(tmp_path, base, join={"simulators": 1, "min_simulators": 2}) as (pipeline, _):
        pipeline.loop.train_until(4)
        assert pipeline.launcher.hosting.statistics(fresh=True)[STATION]["join_events"] > 0
        assert dropped_messages(pipeline.launcher.hosting) == {}


def test_without_a_setting_no_port_is_opened(tmp_path: Path) -> None:
    write_token(tmp_path / "join.token", make_keys())  # as a resumed run finds it after its machine went down
    pipeline = build_pipeline(RunContext(config(ASYNCHRONOUS, launcher="inline"), folder=tmp_path))
    pipeline.close()
    assert not [*tmp_path.glob("join*")]


#: A process with the token of a run, until it is killed.
OPENS = """
import sys, time
from pathlib import Path
from polyrhythm.plugins.join.places import open_token
token = Path(sys.argv[1], "join.token")
with open_token(token):
    print(oct(token.stat().st_mode), flush=True)
    time.sleep(3600)
"""


def test_the_token_goes_with_a_run_that_is_killed(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    words = [sys.executable, "-c", OPENS, str(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment) as run:
        assert run.stdout is not None
        assert run.stdout.readline().strip() == "0o100600"
        assert (tmp_path / "join.token").exists()
        run.kill()
    wait_until(lambda: not [*tmp_path.iterdir()])


def test_an_evaluation_afterwards_waits_for_nobody() -> None:
    run = config(ASYNCHRONOUS, launcher="inline", rollout={"simulators": 0}, join={"simulators": 2, "rows": 3})
    alone = without_joining(run)
    assert (alone.rollout.simulators, alone.join.simulators) == (1, 0)


# ---------------------------------------------------------------- who is not let in


@pytest.mark.parametrize(
    ("wrong", "says", "counted"),
    [
        ("token", "does not accept this token; copy the token file of the run that is there now", "stranger"),
        ("version", "the run does not let this simulator in: polyrhythm 0.0.9 wants to join, the run has", "refused"),
        ("spec", "its environment is another: max_steps is 41, the run has 40; name the run's with --env", "refused"),
    ],
)
def test_who_does_not_fit_is_told_why_and_counted(wrong: str, says: str, counted: str, tmp_path: Path) -> None:
    own = tmp_path / "other.token"
    write_token(own, make_keys())
    different: dict[str, Any] = {
        "token": {"token": own},
        "version": {"version": "0.0.9"},
        "spec": {"env": load_env("gymnasium:CartPole-v1", ["max_steps=41"])},
    }[wrong]
    with opened(tmp_path / "run", rollout={"simulators": 1}) as (pipeline, port):
        pipeline.loop.start()
        stranger = Joining(tmp_path / "run", port, **different)
        run_until(pipeline, lambda: stranger.ended is not None)
        assert isinstance(stranger.ended, StartError)
        assert says in str(stranger.ended)
        assert dropped_messages(pipeline.launcher.hosting)[counted] >= 1
        assert not lost(pipeline)


@pytest.mark.parametrize(
    "address", ["", "tcp://", "tcp://host", "host:77", "http://host:77", "tcp://h:0", "tcp://h:99999"]
)
def test_what_is_no_address_is_refused(address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_token(tmp_path / "token", make_keys())
    words = ["--token-file", str(tmp_path / "token"), "--env", "gymnasium:CartPole-v1"]
    assert main(["join", address, *words]) == 2
    told = capsys.readouterr().err
    assert f"{address}: not an address of a run; write tcp://HOST:PORT, as the run has printed it" in told


def test_where_nobody_answers_it_gives_up(tmp_path: Path) -> None:
    """As for a run that is over."""
    write_token(tmp_path / "join.token", make_keys())
    late = Joining(tmp_path, 9, patience_s=0.5)
    assert "no run answers at tcp://127.0.0.1:9 for 0.5 s; it is over, or has not begun" in str(late.wait())


def test_who_finds_all_places_taken_says_once_that_it_waits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(tmp_path) as (pipeline, port):
        first = Joining(tmp_path, port)
        pipeline.loop.start()
        caplog.set_level("INFO", "polyrhythm.plugins.join.joiner")
        second = Joining(tmp_path, port, patience_s=60.0)
        taken = f"tcp://127.0.0.1:{port}: the only place of the run is taken"
        waits = "gymnasium CartPole-v1 waits for one to be free, 60 s at most (--patience)"
        run_until(pipeline, lambda: f"{taken}; {waits}" in caplog.messages)
        first.client.leave()
        run_until(pipeline, lambda: f"joined tcp://127.0.0.1:{port} as {STATION}" in caplog.text)
        assert sum("taken" in message for message in caplog.messages) == 1
        second.client.leave()
        run_until(pipeline, lambda: second.ended is not None)


@long(6, "three simulators for two places")
def test_a_second_simulator_finds_the_other_place_and_a_third_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path, join={"simulators": 2, "min_simulators": 2}) as (pipeline, first):
        two = [Joining(tmp_path, first) for _ in range(2)]
        pipeline.loop.start()
        third = Joining(tmp_path, first, patience_s=3.0)
        run_until(pipeline, lambda: third.ended is not None)
        assert "the run has no room for this simulator: a simulator has joined here already" in str(third.ended)
        assert [message for message in caplog.messages if ": all 2 places of the run are taken; gymnasium" in message]
        assert {STATION, "simulator-joined-1"} <= pipeline.loop.conductor.stations.incarnations.keys()
    assert [one.wait() for one in two] == ["the run is over"] * 2


# ---------------------------------------------------------------- links that break


def test_a_broken_link_comes_back_and_no_ticket_is_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(tmp_path) as (pipeline, port), link_to(port) as link:
        joining = Joining(tmp_path, link.port)
        pipeline.loop.start()
        for count in (5, 25, 60):
            pipeline.loop.add_observers(On(records.RequestArrived, count, link.cut))
        pipeline.loop.train_until(4)
        assert link.connections == 4
        assert pipeline.launcher.hosting.statistics(fresh=True)[STATION]["join_reconnects"] == 3
        assert not lost(pipeline)
        assert set(attempts(pipeline)) == {1}
        assert pipeline.loop.conductor.ledger.as_dict()["trained"] == 32
        pipeline.close()  # before the link
        assert joining.wait() == "the run is over"
    words = "is broken; trying again for 30 s (--patience); the session goes on if it is back within the run's"
    assert f"{words} join.reconnect_s = 20" in caplog.text


@long(4, "a link that stays broken")
def test_a_link_that_stays_broken_loses_the_simulator_and_it_joins_again(tmp_path: Path) -> None:
    with opened(tmp_path, join={"reconnect_s": 1.0}) as (pipeline, port), link_to(port) as link:
        joining = Joining(tmp_path, link.port)
        pipeline.loop.start()
        pipeline.loop.add_observers(
            On(records.RequestArrived, 20, lambda: link.cut(stays=True)),
            On(records.StationLost, 1, lambda: setattr(link, "broken", False)),
        )
        pipeline.loop.train_until(4)
        assert [(one.station, one.incarnation, one.blame) for one in lost(pipeline)] == [(STATION, 0, True)]
        assert "was not heard for 1 s (join.reconnect_s)" in lost(pipeline)[0].reason
        assert {1, 2} == set(attempts(pipeline)), "what it held ran again"
        ledger = pipeline.loop.conductor.ledger
        assert (ledger.as_dict()["trained"], ledger.imbalance) == (32, 0)
        assert pipeline.launcher.payloads.in_flight.finished() == ()
        pipeline.close()  # before the link
        assert joining.wait() == "the run is over"


# ---------------------------------------------------------------- simulators that go


def test_a_simulator_that_leaves_takes_no_attempt_with_it_and_another_may_come(tmp_path: Path) -> None:
    with opened(tmp_path) as (pipeline, port):
        first = Joining(tmp_path, port)
        pipeline.loop.start()
        next_ones: list[Joining] = []

        def go() -> None:
            first.client.leave()
            next_ones.append(Joining(tmp_path, port))

        pipeline.loop.add_observers(On(records.RequestArrived, 20, go))
        pipeline.loop.train_until(4)
        assert first.wait() == "left the run, which goes on"
        assert [(one.reason, one.blame) for one in lost(pipeline)] == [("left: interrupted", False)]
        assert set(attempts(pipeline)) == {1}
    assert next_ones[0].wait() == "the run is over"


@long(4, "a simulator that leaves while its link is down")
def test_who_leaves_while_the_link_is_down_is_not_blamed(tmp_path: Path) -> None:
    """It knows that the link is down, and the run has heard nothing of it when the link comes back: it hears that it
    leaves."""
    with opened(tmp_path) as (pipeline, port), link_to(port) as link:
        first = Joining(tmp_path, link.port)
        pipeline.loop.start()
        next_ones: list[Joining] = []

        def go() -> None:
            link.cut(stays=True)
            until = time.monotonic() + PATIENCE_S
            while first.client.joiner.attached and time.monotonic() < until:  # what it sent before would be lost
                time.sleep(0.005)
            first.client.leave()
            threading.Timer(1.0, come_back).start()

        def come_back() -> None:
            assert first.ended is None, "it waits for the link"
            link.broken = False
            next_ones.append(Joining(tmp_path, link.port))

        pipeline.loop.add_observers(On(records.RequestArrived, 20, go))
        pipeline.loop.train_until(4)
        assert first.wait() == "left the run, which goes on"
        assert [(one.reason, one.blame) for one in lost(pipeline)] == [("left: interrupted", False)]
        assert set(attempts(pipeline)) == {1}
        pipeline.close()  # before the link
        assert next_ones[0].wait() == "the run is over"


@long(3, "a simulator that leaves while its link stays down")
def test_who_leaves_while_the_link_stays_down_gives_up_quietly(tmp_path: Path) -> None:
    with opened(tmp_path, join={"reconnect_s": 1.0}) as (pipeline, port), link_to(port) as link:
        first = Joining(tmp_path, link.port)
        pipeline.loop.start()

        def go() -> None:
            link.cut(stays=True)
            first.client.leave()

        pipeline.loop.add_observers(
            On(records.RequestArrived, 20, go), On(records.StationLost, 1, lambda: Joining(tmp_path, port))
        )
        pipeline.loop.train_until(2)
        assert first.wait() == "left the run, which goes on"
        assert [one.blame for one in lost(pipeline)] == [True]


@long(6, "a reset that waits for a person; test_robot.py parks too")
def test_a_reset_that_waits_for_a_person_parks_the_simulator_until_it_is_done(tmp_path: Path) -> None:
    """It leaves and takes no attempt with it; the run waits for it, without being stuck; the environment stays."""
    PERSON.clear()
    with opened(tmp_path, join={"min_simulators": 1}) as (pipeline, port):
        env = load_env("tests.process.breaking:WaitsSettings")
        robot = Joining(tmp_path, port, env=env, park_s=0.3, patience_s=3.0)
        pipeline.loop.start()
        pipeline.loop.stall_s = 1.0
        pipeline.loop.submit(records.TrainUntil(4))
        run_until(pipeline, lambda: bool(lost(pipeline)))
        assert [(one.reason, one.blame) for one in lost(pipeline)] == [
            ("left: parked, its reset takes longer than 0.3 s", False)
        ]
        threading.Timer(4.0, PERSON.set).start()
        pipeline.loop.train_until(4)
        assert set(attempts(pipeline)) == {1}
        assert len(lost(pipeline)) == 1
    assert robot.wait() == "the run is over"


@pytest.mark.slow
def test_a_simulator_that_is_killed_is_lost_and_the_run_goes_on_with_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`polyrhythm join` in a process of its own; it is killed in the middle, and comes back."""
    base = merge(ASYNCHRONOUS, {"rollout": {"simulators": 1, "env_batches": 1}, "training": {"versions": 400}})
    with opened(tmp_path, base, join={"simulators": 1, "min_simulators": 2, "reconnect_s": 5.0}) as (pipeline, port):
        processes = [joining_process(tmp_path, port)]
        try:
            pipeline.loop.start()
            pipeline.loop.add_observers(
                On(records.RequestArrived, 60, processes[0].kill),
                On(records.StationLost, 1, lambda: processes.append(joining_process(tmp_path, port))),
            )
            joins = On(records.SimulatorJoined, 1, lambda: None)
            pipeline.loop.add_observers(joins)
            pipeline.loop.submit(records.TrainUntil(400))
            run_until(pipeline, lambda: joins.count <= 0)
            assert [(one.station, one.blame) for one in lost(pipeline)] == [(STATION, True)]
            assert caplog.text.count(f"{STATION}: its connection is silent; the run waits") == 1
            processes[1].send_signal(signal.SIGINT)
            run_until(pipeline, lambda: len(lost(pipeline)) == 2)
            assert lost(pipeline)[1].reason == "left: interrupted"
            assert processes[1].wait(PATIENCE_S) == 130
        finally:
            for process in processes:
                process.kill()
                process.wait()


def joining_process(folder: Path, port: int) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-m", "polyrhythm", "join", f"tcp://127.0.0.1:{port}", "--token-file"]
    words += [str(folder / "join.token"), "--env", "gymnasium:CartPole-v1", "max_steps=40"]
    with (folder / "joiner").open("ab") as log:
        return subprocess.Popen(words, env=os.environ, stdout=log, stderr=log)


def test_an_environment_that_cannot_go_on_ends_its_simulator_and_not_the_run(tmp_path: Path) -> None:
    with opened(tmp_path, rollout={"simulators": 1}) as (pipeline, port):
        pipeline.loop.start()
        env = load_env("tests.process.breaking:BreaksSettings")
        broken = Joining(tmp_path, port, env=env)
        pipeline.loop.submit(records.TrainUntil(1000))
        run_until(pipeline, lambda: broken.ended is not None)
        assert isinstance(broken.ended, RunHalted)
        assert "the environment cannot go on: EnvLost: its cable is out" in str(broken.ended)
        run_until(pipeline, lambda: bool(lost(pipeline)))
        assert lost(pipeline)[0].blame
