"""Stations that die, hang or are stopped are found, named and replaced, and no sample is lost by it."""

from __future__ import annotations

import logging
import os
import re
import signal
import tempfile
import threading
import time
from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from tests.long import long
from tests.process.runs import ASYNCHRONOUS, PATIENCE_S, children, config, orphaned_folders

from polyrhythm.config.load import merge
from polyrhythm.errors import RunHalted, StartError
from polyrhythm.pipeline.build import build_pipeline
from polyrhythm.pipeline.context import RunContext
from polyrhythm.pipeline.evaluation.standalone import evaluate
from polyrhythm.pipeline.observers.base import Observer
from polyrhythm.pipeline.persistence.checkpoints import save_policy
from polyrhythm.pipeline.run_loop import Interrupted
from polyrhythm.pipeline.validation.check import validate_run
from polyrhythm.runtime.factories import Resources
from polyrhythm.runtime.hosting import dropped_messages, process_ids
from polyrhythm.runtime.launcher import build_local_launcher
from polyrhythm.runtime.memory.arena import ArenaLayout
from polyrhythm.scheduler import records
from polyrhythm.scheduler.records import DropReason
from polyrhythm.specs import WeightsLayout

ENV = {"type": "tests.process.settings:FaultySettings", "id": "CartPole-v1", "max_steps": 40}
EVERYBODY = ["simulator-0", "simulator-1", "generator-0", "generator-1", "trainer"]
SINGLE = merge(ASYNCHRONOUS, {"rollout": {"simulators": 1, "env_batches": 2, "generators": 1}})


def run(folder, versions=4, base=SINGLE, during=None, **changes):
    """A run in processes to its end; `during` is called in a thread with the pipeline. The pipeline, closed."""
    pipeline = build_pipeline(RunContext(config(base, **changes), folder=folder), record=True)
    try:
        if during is not None:
            threading.Thread(target=during, args=(pipeline,), daemon=True).start()
        pipeline.loop.train_until(versions)
        assert pipeline.launcher.payloads.in_flight.finished() == ()
        assert set(dropped_messages(pipeline.launcher.hosting)) <= {"earlier_incarnation"}
    finally:
        pipeline.close()
    assert not children()
    assert not orphaned_folders()
    return pipeline


def lost(pipeline):
    return [d.event for d in pipeline.loop.trace if isinstance(d.event, records.StationLost)]


def balanced(pipeline, trained):
    """Whether every sample is accounted for and none was dropped."""
    ledger = pipeline.loop.conductor.ledger
    assert (ledger.imbalance, ledger.dropped, ledger.trained) == (0, {}, trained)
    return True


def at_update(number, act):
    """Something to do once so many updates are done."""

    def wait(pipeline):
        until = time.monotonic() + PATIENCE_S
        while pipeline.loop.conductor.versions.updates < number and time.monotonic() < until:
            time.sleep(0.01)
        act(pipeline)

    return wait


@pytest.mark.parametrize(
    ("call", "limit"),
    [("step", {"step_s": 3.0}), pytest.param("reset", {"reset_s": 3.0}, marks=long(5, "a reset that hangs"))],
    ids=["step", "reset"],
)
def test_a_call_that_hangs_costs_its_simulator_and_no_sample(call, limit, tmp_path, caplog):
    env = {**ENV, "call": call, "fault": "hang", "at": 4, "marker": str(tmp_path / "hung")}
    with caplog.at_level(logging.ERROR):
        pipeline = run(tmp_path, env=env, supervision=limit)
    (event,) = lost(pipeline)
    assert event.station == "simulator-0"
    where = r", in \w+ \(.*settings\.py, line \d+\)"
    assert re.fullmatch(rf"has been in one {call} for \d+\.\d s{where} \(supervision\.{call}_s\)", event.reason)
    assert "starting it again (failure 1 of 100 that supervision.max_failures allows)" in caplog.text
    assert balanced(pipeline, 32)


def test_a_stop_names_the_station_that_it_waits_for_and_another_signal_ends_it_at_once(tmp_path, caplog):
    env = {**ENV, "fault": "hang", "at": 4, "marker": str(tmp_path / "hung")}
    pipeline = build_pipeline(RunContext(config(SINGLE, env=env), folder=tmp_path))
    station = pipeline.launcher.hosting.station("simulator-0")
    pipeline.loop.stop = lambda: re.match(r"in one step for ([2-9]|\d\d)", station.current_call())
    with pytest.raises(Interrupted):
        pipeline.loop.train_until(4)

    said = []

    class Another(logging.Handler):
        def emit(self, record):
            said.append(record.getMessage())
            raise KeyboardInterrupt

    log = logging.getLogger("polyrhythm.runtime.processes.supervisor")
    log.addHandler(another := Another())
    try:
        with caplog.at_level(logging.INFO), pytest.raises(KeyboardInterrupt):
            pipeline.close()
    finally:
        log.removeHandler(another)
    assert len(said) == 1
    assert said[0].startswith("waiting for simulator-0 (in one step for ")
    assert said[0].endswith(" to leave; killed after 4 s, or at once by another signal")
    assert not children()
    assert not orphaned_folders()


def test_a_process_that_ends_is_named_with_its_last_lines(tmp_path, caplog):
    env = {**ENV, "fault": "exit", "at": 5, "marker": str(tmp_path / "ended")}
    with caplog.at_level(logging.ERROR):
        pipeline = run(tmp_path, env=env)
    (event,) = lost(pipeline)
    assert event.reason == "ended with status 7"
    failure = "(failure 1 of 100 that supervision.max_failures allows)\nthe simulator says good-bye"
    assert f"simulator-0 ended with status 7; starting it again {failure}" in caplog.text
    assert balanced(pipeline, 32)


def test_a_killed_station_of_each_kind_is_replaced(tmp_path):
    names = ["simulator-0", "generator-0", "trainer"]

    def kill(pipeline):
        for number, name in enumerate(names):
            at_update(2 + 4 * number, lambda _: None)(pipeline)
            os.kill(process_ids(pipeline.launcher.hosting)[name], signal.SIGKILL)

    pipeline = run(tmp_path, versions=20, during=kill, training={"versions": 20})
    assert [(event.station, event.reason) for event in lost(pipeline)] == [(n, "was ended by SIGKILL") for n in names]
    assert balanced(pipeline, 160)
    joined = [d.event for d in pipeline.loop.trace if type(d.event).__name__.endswith("Joined")]
    assert [event.incarnation for event in joined[-3:]] == [1, 1, 1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [pytest.param(["simulator-0", "trainer"], marks=long(4, "two stations that die at once")), EVERYBODY],
    ids=["two", "all"],
)
def test_stations_that_die_at_once_are_all_replaced(names, tmp_path):
    def kill(pipeline):
        for name in names:
            os.kill(process_ids(pipeline.launcher.hosting)[name], signal.SIGKILL)

    pipeline = run(tmp_path, 12, ASYNCHRONOUS, at_update(2, kill), training={"versions": 12})
    assert sorted(event.station for event in lost(pipeline)) == sorted(names)
    assert balanced(pipeline, 96)


@long(4, "a generator killed between answer and report, twice")
def test_a_generator_killed_the_moment_it_has_answered_strands_no_slot(tmp_path):
    """Its answers are large, so some are still being written when its report has already been heard."""
    policy = {"type": "tests.process.policies:HeavySettings"}
    changes = {"policy": policy, "rollout": {"env_batches": 1, "rows": 4}, "training": {"versions": 6}}
    pipeline = build_pipeline(RunContext(config(SINGLE, **changes), folder=tmp_path), record=True)
    killed = []

    class Killer(Observer):
        hears = (records.BatchDone,)

        def on_decision(self, now, event, commands):
            if isinstance(event, records.BatchDone) and len(killed) < 2 and event.batch in (20, 60):
                killed.append(event.batch)
                os.kill(process_ids(pipeline.launcher.hosting)["generator-0"], signal.SIGKILL)

    pipeline.loop.add_observers(Killer())
    try:
        pipeline.loop.train_until(6)
    finally:
        pipeline.close()
    assert len(killed) == 2
    assert balanced(pipeline, 48)


def test_a_stopped_station_is_found_and_replaced_and_what_it_would_say_is_refused(tmp_path):
    stop = at_update(2, lambda pipeline: os.kill(process_ids(pipeline.launcher.hosting)["simulator-0"], signal.SIGSTOP))
    pipeline = run(tmp_path, versions=10, during=stop, supervision={"heartbeat_s": 5.0}, training={"versions": 10})
    reasons = {event.station: event.reason for event in lost(pipeline)}  # others may be late on a busy machine
    assert "sent no heartbeat for 5 s" in reasons["simulator-0"]
    assert balanced(pipeline, 80)


@long(4, "a generator that is stopped for a second")
def test_a_station_that_is_slow_for_a_while_is_not_replaced(tmp_path):
    def pause(pipeline):
        pid = process_ids(pipeline.launcher.hosting)["generator-0"]
        os.kill(pid, signal.SIGSTOP)
        time.sleep(1.0)
        os.kill(pid, signal.SIGCONT)

    pipeline = run(
        tmp_path, versions=20, during=at_update(2, pause), supervision={"heartbeat_s": 60.0}, training={"versions": 20}
    )
    assert not lost(pipeline)
    assert balanced(pipeline, 160)


def test_a_trainer_that_goes_back_to_an_older_state_rolls_back_what_it_had_trained_since(tmp_path):
    kill = at_update(5, lambda pipeline: os.kill(process_ids(pipeline.launcher.hosting)["trainer"], signal.SIGKILL))
    pipeline = run(
        tmp_path,
        versions=12,
        during=kill,
        checkpoint={"every_versions": 4},
        freshness={"max_lag": 4},
        training={"versions": 12},
    )
    ledger = pipeline.loop.conductor.ledger
    assert ledger.imbalance == 0
    assert ledger.rolled_back > 0
    lent, given_back, last = Counter(), set(), ()
    for decision in pipeline.loop.trace:
        if isinstance(decision.event, records.StationLost):
            given_back.update(last)
        for command in decision.commands:
            if isinstance(command, records.StartUpdate):
                last = command.tickets
                lent.update(last)
    twice = {ticket for ticket, times in lent.items() if times > 1}
    assert twice <= given_back, "what was trained is not trained again"


def test_a_station_that_cannot_start_ends_the_run_with_what_it_said(tmp_path):
    with pytest.raises(RunHalted, match=r"simulator-0 failed 3 times in a row before it was ready.*status 7"):
        run(tmp_path, env={**ENV, "call": "build", "fault": "exit"})
    assert not children()
    assert not orphaned_folders()


@long(6, "evaluations by themselves, one of which fails")
def test_an_evaluation_that_fails_leaves_the_log_that_it_names_and_one_that_works_leaves_none(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for fault in ("", "exit"):
        # The two rows on which it is tried work.
        env = {**ENV, "call": "build", "fault": fault, "spares": 2}
        failing = config(SINGLE, env=env, rollout={"rows": 3})
        policy = validate_run(failing, trainer=False).policy
        save_policy(policy.state_dict(), failing, tmp_path / "policy.pt", 0)
        if not fault:
            assert evaluate(tmp_path / "policy.pt", 2)["episodes"] == 2
            assert [path.name for path in tmp_path.iterdir()] == ["policy.pt"]
            continue
        with pytest.raises(RunHalted, match=r"its log: .*log") as ended:
            evaluate(tmp_path / "policy.pt", 2)
        assert "the simulator says good-bye" in Path(str(ended.value).rpartition("its log: ")[2]).read_text()
    assert not children()
    assert not orphaned_folders()


@long(5, "a simulator killed five times")
def test_a_station_that_is_killed_again_and_again_while_it_starts_does_not_end_the_run(tmp_path):
    killed = []

    def kill(pipeline):
        at_update(2, lambda _: None)(pipeline)
        while len(killed) < 5:
            rank = pipeline.launcher.hosting._supervisor.processes["simulator-0"].rank
            if rank.pid not in killed and (not killed or not rank.present):
                killed.append(rank.pid)
                os.kill(rank.pid, signal.SIGKILL)
            time.sleep(0.002)

    changes = {"training": {"versions": 8}, "supervision": {"max_start_failures": 0}}
    pipeline = run(tmp_path, versions=8, during=kill, **changes)
    assert len(killed) == 5
    assert [(event.station, event.reason) for event in lost(pipeline)] == [("simulator-0", "was ended by SIGKILL")]
    assert balanced(pipeline, 64)


@dataclass(frozen=True)
class Lacking:
    """A factory whose package is missing where the station is made."""

    name: str

    def parts(self, context, incarnation):
        raise ImportError("No module named 'robot_hands'")


def test_a_package_that_a_station_lacks_ends_the_run_at_the_first_start(tmp_path):
    layout = ArenaLayout(blocks=1, steps=1, chunk=1, obs={}, answers={}, slots={})
    launcher = build_local_launcher(
        [(Lacking("hands"), Resources())], layout, WeightsLayout.of({}), config().supervision, tmp_path
    )
    with closing(launcher), pytest.raises(RunHalted, match=r"hands: ImportError: No module named 'robot_hands'"):
        launcher.start()
    assert [path.name for path in tmp_path.iterdir()] == ["hands.0.log"]
    assert not children()
    assert not orphaned_folders()


def test_an_error_that_another_attempt_would_not_mend_ends_the_run_at_once(tmp_path):
    policy = {"type": "tests.process.policies:SlipperySettings", "field": "value", "extra": True}
    with pytest.raises(RunHalted, match=r"generator-0: policy.type = .*SlipperySettings: act returned value \[\d+,"):
        run(tmp_path, policy=policy)
    assert not children()


def test_a_gradient_that_is_not_finite_halts_a_run_whose_stations_all_live(tmp_path, caplog):
    with pytest.raises(
        RunHalted, match=r"training.on_nonfinite_gradient = halt: .* update \d+ .*policy.evaluate gives"
    ):
        run(tmp_path, training={"optimizer": {"lr": 1e30, "grad_clip": None}}, versions=4)
    assert "the run ends" not in caplog.text
    assert not children()


def test_episodes_that_diverge_fail_by_their_reason_in_processes_too(tmp_path, caplog):
    env = {**ENV, "type": "tests.process.settings:DivergingSettings", "reward_of": 3, "shown_of": 2**62}
    pipeline = run(tmp_path, env=env, rollout={"max_attempts": 2})
    ledger, reason = pipeline.loop.conductor.ledger, "environment: reward is not finite"
    assert (ledger.imbalance, ledger.trained, set(ledger.dropped)) == (0, 32, {"environment not finite"})
    assert pipeline.failures.counts[reason] >= 2 * ledger.dropped[DropReason.ENVIRONMENT_NOT_FINITE]
    assert "a sample failed: env.type = tests.process.settings:DivergingSettings: reward is not finite" in caplog.text
    assert not lost(pipeline)


def test_too_many_failures_end_the_run_with_the_reason(tmp_path):
    with pytest.raises(RunHalted, match=r"3 failures, 2 are allowed \(supervision.max_failures\).*status 7"):
        run(tmp_path, env={**ENV, "fault": "exit", "at": 5}, supervision={"max_failures": 2})
    assert not orphaned_folders()


def test_a_start_that_takes_too_long_is_an_error_in_time(tmp_path):
    with pytest.raises(RunHalted, match="was not ready within 1 s"):
        run(tmp_path, env={**ENV, "call": "build", "fault": "hang"}, supervision={"start_s": 1.0})


def test_a_simulators_process_holds_no_torch(tmp_path):
    file = tmp_path / "modules"
    run(tmp_path, versions=1, env={**ENV, "modules": str(file)})
    modules = {name.partition(".")[0] for name in file.read_text().split()}
    assert "gymnasium" in modules
    assert not {"torch", "transformers", "tensorboard"} & modules


@long(3, "threads of a run's stations; tests of launchers look at one's")
def test_threads_are_set_for_each_station(tmp_path):
    seen = {}

    def look(pipeline):
        for name, pid in process_ids(pipeline.launcher.hosting).items():
            seen[name] = psutil.Process(pid).environ()["OMP_NUM_THREADS"]

    placement = {"trainer": {"threads": 2}}
    run(tmp_path, versions=2, during=at_update(1, look), placement=placement)
    assert seen == {"simulator-0": "1", "generator-0": "1", "trainer": "2"}


def test_too_little_shared_memory_is_said_before_anything_starts(tmp_path):
    with pytest.raises(StartError, match=r"shared memory: .* MB wanted \(arena .*free in .*; lower rollout.rows"):
        run(tmp_path, training={"mini_batch_samples": 10**8})
    assert not children()
    assert not orphaned_folders()
