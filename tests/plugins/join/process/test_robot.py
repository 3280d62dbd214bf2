"""examples/robot: a simulated robot joins; resets wait for a person, the emergency stop works, the rate is kept."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.plugins.join.process.joined import Joining, lost
from tests.plugins.join.process.test_join import On
from tests.process.runs import wait_until
from tests.runtime.links import free_port

from polyrhythm.config.load import load_config, load_env
from polyrhythm.errors import ConfigError
from polyrhythm.pipeline.build import build_pipeline
from polyrhythm.pipeline.context import RunContext
from polyrhythm.scheduler import records

EXAMPLE = Path(__file__).parents[4] / "examples" / "robot"


@pytest.fixture(autouse=True)
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    yield
    sys.modules.pop("robot", None)


def test_the_recipe_runs_with_a_robot_that_parks_and_is_stopped(tmp_path: Path) -> None:
    """Two versions. For every eighth reset a person is needed, for whom the robot parks; once the button is pressed."""
    button, port = tmp_path / "stop.pressed", free_port()
    settings = ["rate_hz=500", "speed=20", "visit_every=8", "person_s=0.5", f"button={button}"]
    env = load_env(str(EXAMPLE / "robot.yaml"), settings)
    config = load_config(
        EXAMPLE / "robot.yaml",
        ["launcher=inline", f"join.port={port}", "training.versions=2", *[f"env.{words}" for words in settings]],
    )
    pipeline = build_pipeline(RunContext(config, folder=tmp_path / "run"), start=False, record=True)
    try:
        robot = Joining(tmp_path / "run", port, env=env, park_s=0.2)
        pipeline.loop.start()

        def press() -> None:
            button.touch()
            threading.Timer(1.0, button.unlink).start()

        pipeline.loop.add_observers(On(records.RequestArrived, 10, press))
        pipeline.loop.train_until(2)
        failed = [d.event for d in pipeline.loop.trace if isinstance(d.event, records.SampleFailed)]
        assert [event.error for event in failed] == ["step: RuntimeError: the emergency stop is on"]
        assert len(lost(pipeline)) >= 2
        assert {(one.reason, one.blame) for one in lost(pipeline)} == {
            ("left: parked, its reset takes longer than 0.2 s", False)
        }
        ledger = pipeline.loop.conductor.ledger
        assert (ledger.as_dict()["trained"], ledger.imbalance) == (16, 0)
    finally:
        pipeline.close()
    assert robot.wait() == "the run is over"


def test_the_emergency_stop_works_without_a_run_and_stays(tmp_path: Path) -> None:
    """It is the control loop's: no command moves the hand, and only a person releases it."""
    env: Any = load_env("robot:RobotSettings", ["rate_hz=500", f"button={tmp_path / 'stop'}"]).build(1)  # type: ignore[attr-defined]
    action = np.ones((1, 2), np.float32)
    try:
        env.reset([0], [0], [0])
        env.step([0], action)
        (tmp_path / "stop").touch()
        wait_until(lambda: env.arm.stopped)
        where, moved = env.arm.hand.copy(), env.arm.moved
        (tmp_path / "stop").unlink()
        for _ in range(5):
            with pytest.raises(RuntimeError, match="the emergency stop is on"):
                env.step([0], action)
        assert (env.arm.hand == where).all()
        assert env.arm.moved == moved
        assert env.arm.release()
        env.step([0], action)
        assert env.arm.moved == moved + 1
    finally:
        env.close()


def test_steps_come_at_the_rate_and_without_commands_it_holds_still() -> None:
    env: Any = load_env("robot:RobotSettings", ["rate_hz=100"]).build(1)  # type: ignore[attr-defined]
    try:
        env.reset([0], [0], [0])
        begin = time.monotonic()
        for _ in range(10):
            env.step([0], np.ones((1, 2), np.float32))
        assert time.monotonic() - begin >= 0.08
        assert env.arm.moved == 10
        ticks = env.arm.ticks
        wait_until(lambda: env.arm.ticks > ticks + 5)
        assert env.arm.moved == 10
    finally:
        env.close()


def test_one_robot_has_one_row() -> None:
    with pytest.raises(ConfigError, match=r"join\.rows = 2: there is one robot; set it to 1"):
        load_env("robot:RobotSettings").build(2)  # type: ignore[attr-defined]
