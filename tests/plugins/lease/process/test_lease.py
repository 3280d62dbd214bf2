"""Generator and trainer on the host in turn, each in a process of its own: the whole mechanism without a GPU."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.long import long
from tests.oracles.replay import first_difference
from tests.process.runs import ASYNCHRONOUS, LOCKSTEP, PATIENCE_S, closed, config

from polyrhythm.conductors import build_conductor
from polyrhythm.pipeline.build import Pipeline, build_pipeline
from polyrhythm.pipeline.context import RunContext
from polyrhythm.pipeline.evaluation.episodes import held_out
from polyrhythm.plugins.lease.seats import HOST
from polyrhythm.plugins.timeline.observer import TraceObserver
from polyrhythm.plugins.timeline.trace import TraceWriter
from polyrhythm.runtime.hosting import dropped_messages, process_ids
from polyrhythm.scheduler import records
from polyrhythm.scheduler.records import DeviceTaken, DeviceYielded, StationLost

LEASED: dict[str, Any] = {"placement": {"sharing": "lease", "lease": {"min_hold_s": 0.05}}}
#: A generator and the trainer on each of these simulated devices.
ON_ONE, ON_TWO = ({"simulated_devices": count, "preset": "colocated"} for count in (1, 2))


def run(
    folder: Path, base: dict[str, Any], during: Any = None, versions: int = 4, **changes: Any
) -> tuple[Pipeline, dict[str, Any]]:
    """A run of so many versions; the pipeline, closed, and its last weights."""
    folder.mkdir(exist_ok=True)
    with closed(build_pipeline(RunContext(config(base, **changes), folder=folder), record=True)) as pipeline:
        if during is not None:
            threading.Thread(target=during, args=(pipeline,), daemon=True).start()
        pipeline.loop.train_until(versions)
        assert set(dropped_messages(pipeline.launcher.hosting)) <= {"earlier_incarnation"}
        statistics = pipeline.launcher.hosting.statistics(fresh=True)
        _, weights = pipeline.weights.read(versions)
    return pipeline, {"weights": weights, "statistics": statistics}


def holders(pipeline: Pipeline, device: int = HOST) -> list[str]:
    """Who was on the device, one after another; fails if two ever were."""
    found, present = list[str](), ""
    for decision in pipeline.loop.trace:
        match decision.event:
            case DeviceTaken(station=name, device=number) if number == device:
                assert present == ""
                present = name
                found.append(name)
            case DeviceYielded(station=name, device=number) if number == device:
                assert present == name
                present = ""
            case StationLost(station=name) if name == present:
                present = ""
    return found


@pytest.mark.parametrize(
    ("launcher", "placement", "device"),
    [("inline", {}, HOST), ("local", {}, HOST), ("local", ON_ONE, 0)],
    ids=["inline", "local", "simulated-device"],
)
def test_in_lock_step_they_take_turns_and_the_weights_are_those_of_a_run_without_leases(
    launcher: str, placement: dict[str, Any], device: int, tmp_path: Path
) -> None:
    together, shared = run(tmp_path / "together", LOCKSTEP, launcher=launcher, placement=placement)
    leased_too: dict[str, Any] = {"placement": {**LEASED["placement"], **placement}}
    in_turn, leased = run(tmp_path / "in_turn", LOCKSTEP, launcher=launcher, **leased_too)
    assert holders(together, device) == []
    assert holders(in_turn, device) == ["trainer", "generator-0"] * 5
    assert shared["weights"].keys() == leased["weights"].keys()
    assert all(torch.equal(leased["weights"][name], x) for name, x in shared["weights"].items())
    assert leased["statistics"]["trainer"]["switches"] == 10
    assert in_turn.loop.conductor.ledger == together.loop.conductor.ledger
    assert first_difference(build_conductor(in_turn.loop.conductor.settings), in_turn.loop.trace) is None


@long(15, "ranks that leave a device")
@pytest.mark.parametrize("strategy", ["replicate", "shard"])
def test_the_ranks_of_a_trainer_leave_together(strategy: str, tmp_path: Path) -> None:
    placement = {"trainer": {"ranks": 2, "strategy": strategy}}
    _, shared = run(tmp_path / "together", LOCKSTEP, launcher="local", placement=placement)
    leased_too: dict[str, Any] = {"placement": {**LEASED["placement"], **placement}}
    in_turn, leased = run(tmp_path / "in_turn", LOCKSTEP, launcher="local", **leased_too)
    assert holders(in_turn) == ["trainer", "generator-0"] * 5
    assert all(torch.equal(leased["weights"][name], x) for name, x in shared["weights"].items())


@long(7, "a lost rank of a trainer with a lease")
def test_a_killed_rank_frees_the_devices_of_all(tmp_path: Path) -> None:
    placement: dict[str, Any] = {"placement": {**LEASED["placement"], "trainer": {"ranks": 2, "strategy": "shard"}}}
    kill = kill_at(2, "trainer-rank1", holding=False)
    pipeline, _ = run(tmp_path, ASYNCHRONOUS, kill, launcher="local", **placement)
    lost = [decision.event for decision in pipeline.loop.trace if isinstance(decision.event, StationLost)]
    assert [event.station for event in lost] == ["trainer"]
    assert (pipeline.loop.conductor.ledger.imbalance, pipeline.loop.conductor.ledger.dropped) == (0, {})


@pytest.mark.parametrize(("base", "launcher"), [(LOCKSTEP, "inline"), (ASYNCHRONOUS, "local")])
def test_simulators_that_can_leave_take_their_turns_too(base: dict[str, Any], launcher: str, tmp_path: Path) -> None:
    env = {"env": {"type": "tests.process.settings:LeavingSettings", "id": "CartPole-v1", "max_steps": 40}}
    in_turn, leased = run(tmp_path / "in_turn", base, versions=2, launcher=launcher, **LEASED, **env)
    assert {name for name in holders(in_turn) if name.startswith("simulator")} == {
        f"simulator-{index}" for index in range(base["rollout"].get("simulators", 1))
    }
    freed = leased["statistics"]["simulator-0"]["offloaded_bytes"]
    assert freed == 1000 * base["rollout"].get("env_batches", 1)
    assert in_turn.loop.conductor.ledger.dropped == {}
    if base is LOCKSTEP:
        _, shared = run(tmp_path / "together", base, versions=2, launcher=launcher, **env)
        assert all(torch.equal(leased["weights"][name], x) for name, x in shared["weights"].items())


def kill_at(update: int, name: str, *, holding: bool) -> Any:
    """Kills the station after so many updates, while it holds the host or while another one does."""

    def wait(pipeline: Pipeline) -> None:
        until = time.monotonic() + PATIENCE_S
        conductor = pipeline.loop.conductor
        while time.monotonic() < until:
            delivery = conductor.delivery
            holder = "" if delivery is None else delivery.leases.holders.get(HOST, "")
            if conductor.versions.updates >= update and holder and (holder == name) == holding:
                os.kill(process_ids(pipeline.launcher.hosting)[name], signal.SIGKILL)
                return
            time.sleep(0.001)

    return wait


LONG = long(4, "losses beside a lease")


@pytest.mark.parametrize(
    ("name", "holding"),
    [
        ("generator-0", True),
        pytest.param("generator-0", False, marks=LONG),
        pytest.param("trainer", True, marks=LONG),
        ("trainer", False),
    ],
    ids=["generator-0-holder", "generator-0-waiter", "trainer-holder", "trainer-waiter"],
)
def test_the_loss_of_a_holder_or_of_a_waiter_is_made_good(name: str, holding: bool, tmp_path: Path) -> None:
    pipeline, _ = run(tmp_path, ASYNCHRONOUS, kill_at(2, name, holding=holding), launcher="local", **LEASED)
    lost = [decision.event for decision in pipeline.loop.trace if isinstance(decision.event, StationLost)]
    assert [event.station for event in lost] == [name]
    assert set(holders(pipeline)) == {"generator-0", "generator-1", "trainer"}
    ledger = pipeline.loop.conductor.ledger
    assert (ledger.imbalance, ledger.dropped) == (0, {})
    assert ledger.trained + ledger.rolled_back >= 32


def test_an_evaluation_before_training_and_one_beside_it_take_their_turns(tmp_path: Path) -> None:
    evaluation = {"every": 2, "every_episodes": 4, "weights": "second_copy", "episodes": 0}
    pipeline = build_pipeline(
        RunContext(config(evaluation=evaluation, launcher="local", **LEASED), folder=tmp_path), record=True
    )
    with closing(pipeline):
        assert len(pipeline.evaluate("before", held_out(5, 1, 1, greedy=True))) == 5
        pipeline.loop.submit(records.Evaluate("beside", tuple(held_out(4, 1, 1, greedy=True)), background=True))
        pipeline.loop.train_until(4)
        done = [command for step in pipeline.loop.trace for command in step.commands]
        if not any(isinstance(command, records.EvaluationDone) and command.name == "beside" for command in done):
            pipeline.loop.await_evaluation("beside")
        assert pipeline.loop.conductor.ledger.imbalance == 0
        assert set(holders(pipeline)) == {"generator-0", "generator-1", "trainer"}


def test_a_run_that_winds_down_saves_a_trainer_that_is_off_the_host(tmp_path: Path) -> None:
    pipeline = build_pipeline(RunContext(config(launcher="local", **LEASED), folder=tmp_path), record=True)
    with closing(pipeline):
        pipeline.loop.train_until(2)
        conductor = pipeline.loop.conductor
        assert conductor.delivery is not None
        assert conductor.delivery.leases.holders[HOST] != "trainer"
        pipeline.loop.submit(records.TrainUntil(3))
        assert pipeline.loop.wind_down(PATIENCE_S)
        last = pipeline.loop.trace[-1].event
        assert isinstance(last, records.Checkpointed)
        assert last.updates == conductor.versions.updates


def test_the_timeline_shows_every_switch_in_the_lane_of_the_device(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    pipeline = build_pipeline(
        RunContext(config(LOCKSTEP, launcher="local", **LEASED), folder=tmp_path), record=True, start=False
    )
    with closing(pipeline), TraceWriter(path) as writer:
        observer = TraceObserver(writer, pipeline.launcher, pipeline.loop.clock())
        pipeline.loop.add_observers(observer)
        pipeline.loop.start()
        pipeline.loop.train_until(2)
        pipeline.launcher.hosting.statistics(fresh=True)
        observer.finish(pipeline.loop.clock())
    bars = [event["name"] for event in json.loads(path.read_text()) if event["ph"] == "X"]
    switches = [name for name in bars if "takes it" in name or "leaves it" in name]
    turns = ["trainer takes it", "trainer leaves it", "generator-0 takes it", "generator-0 leaves it"]
    assert sorted(switches) == sorted((turns * 3)[:-1])
