"""A robot that joins a run, simulated: the parts that a real one needs, in one file.

    polyrhythm train robot.yaml                                          # where the trainer is, in this folder
    polyrhythm join tcp://… --token-file … --env robot.yaml --park 10    # at the robot; the run has printed the line

- It has a control loop of its own that runs at a rate, whatever the run does. Without a command it holds still.
- An emergency stop (the file `button`) acts in that loop and stays until a person releases it. The episode under way
  fails, so it is not trained on; the next reset waits.
- Every so many episodes a reset waits for a person who clears the table (the file `ready`, or a simulated person).

What would differ for a real one is in `Arm`: where it reads positions and sends velocities.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyrhythm.config.base import Count, NotNegative, Positive, Section, Whole
from polyrhythm.envs.base import StepResult
from polyrhythm.errors import ConfigError
from polyrhythm.specs import ActionSpec, ArraySpec, EnvSpec, Task

#: How close to the goal the hand has to come.
_NEAR = 0.1


class RobotSettings(Section):
    """What the recipe's `env` section may say."""

    type: str = "robot:RobotSettings"
    """Where this class is."""
    rate_hz: Positive = 20.0
    """Control steps per second."""
    speed: Positive = 2.0
    """Of the hand at a full action, in units per second."""
    max_steps: Count = 40
    """Control steps after which an episode is cut."""
    visit_every: Whole = 10
    """Episodes after which a person has to clear the table; 0 for never."""
    person_s: NotNegative = 5.0
    """Seconds until the simulated person comes; a real one makes the file `ready` instead."""
    button: str = "stop.pressed"
    """File of the emergency stop: pressed while it is there."""
    ready: str = ""
    """File by which a person says that the table is clear; empty: a simulated person."""

    def spec(self) -> EnvSpec:
        return EnvSpec(
            observation={"hand": ArraySpec((2,), "float32"), "goal": ArraySpec((2,), "float32")},
            action=ActionSpec("continuous", 2, low=(-1.0, -1.0), high=(1.0, 1.0)),
            tasks=(Task("reach", "bring the hand to the goal"),),
            max_steps=self.max_steps,
        )

    def build(self, rows: int) -> RobotEnv:
        if rows != 1:
            raise ConfigError(f"join.rows = {rows}: there is one robot; set it to 1")
        return RobotEnv(self)


class Arm:
    """The machine: a hand on a table, moved by a control loop. stopped: since the button was pressed, until `release`;
    moved: control steps in which the hand moved."""

    def __init__(self, rate_hz: float, button: Path) -> None:
        self.hand: NDArray[np.float32] = np.zeros(2, np.float32)
        self.stopped, self.moved, self.ticks = False, 0, 0
        self._period, self._button = 1.0 / rate_hz, button
        self._command: NDArray[np.float32] | None = None
        self._tick, self._over = threading.Condition(), threading.Event()
        self._loop = threading.Thread(target=self._control, name="control", daemon=True)
        self._loop.start()

    def _control(self) -> None:
        """Consumes: one command for each step, if there is one. Waits for: the next step's time. Unblocked by: it.
        Produces: motion. A pressed button comes before any command."""
        due = time.monotonic()
        while not self._over.wait(max(0.0, due - time.monotonic())):
            due = max(due + self._period, time.monotonic())
            with self._tick:
                command, self._command = self._command, None
                self.stopped |= self._button.exists()
                if command is not None and not self.stopped:
                    self.hand = np.clip(self.hand + self._period * command, -1.0, 1.0).astype(np.float32)
                    self.moved += 1
                self.ticks += 1
                self._tick.notify_all()

    def move(self, velocity: NDArray[np.float32]) -> None:
        """Move for one control step, and return after it. RuntimeError: the emergency stop is on."""
        with self._tick:
            self._command, tick = velocity, self.ticks
            self._tick.wait_for(lambda: self.ticks > tick or self._over.is_set())
            if self.stopped:
                raise RuntimeError("the emergency stop is on")

    def home(self, hand: NDArray[np.float32]) -> None:
        """Go to where an episode begins."""
        with self._tick:
            self.hand = hand

    def release(self) -> bool:
        """Work again, if the button is not pressed any more; a person does that."""
        with self._tick:
            self.stopped = self._button.exists()
            return not self.stopped

    def close(self) -> None:
        self._over.set()
        self._loop.join()


class RobotEnv:
    """One robot: a batch of one row."""

    def __init__(self, settings: RobotSettings) -> None:
        self.spec, self.rows = settings.spec(), 1
        self.arm = Arm(settings.rate_hz, Path(settings.button))
        self._settings, self._episodes, self._begun = settings, 0, False
        self._goal = np.zeros(2, np.float32)
        self._over = threading.Event()

    def reset(self, rows: Any, tasks: Sequence[int], seeds: Sequence[int]) -> None:
        """The same seed begins in the same state. Waits for a person where one is needed, however long that takes: the
        simulator parks meanwhile (`--park`). A parked reset is made again: the visit counts until an episode moves."""
        visit_every = self._settings.visit_every
        if self.arm.stopped or (visit_every and self._episodes >= visit_every):
            self._await_person()
            self._episodes = 0
        self._begun = False
        start = np.random.default_rng(seeds[0]).uniform(-0.5, 0.5, (2, 2)).astype(np.float32)
        self.arm.home(start[0])
        self._goal = start[1]

    def _await_person(self) -> None:
        """Until a person has cleared the table and released the stop."""
        ready = Path(self._settings.ready) if self._settings.ready else None
        if ready is None:
            self._over.wait(self._settings.person_s)
        while not self._over.is_set() and not ((ready is None or ready.exists()) and self.arm.release()):
            self._over.wait(0.1)
        if ready is not None:
            ready.unlink(missing_ok=True)

    def step(self, rows: Any, actions: Any) -> StepResult:
        """One control step. Raises while the emergency stop is on, so that the episode is not trained on."""
        self._episodes += not self._begun
        self._begun = True
        self.arm.move(self._settings.speed * actions[0])
        distance = float(np.linalg.norm(self.arm.hand - self._goal))
        there = np.array([distance < _NEAR])
        reward = np.array([1.0 if there[0] else -0.1 * distance], np.float32)
        return StepResult(reward, terminated=there, truncated=np.zeros(1, bool), success=there)

    def observe(self, rows: Any, out: dict[str, Any]) -> None:
        """Write what is seen now; `out` lies in memory that the run shares."""
        out["hand"][:] = self.arm.hand
        out["goal"][:] = self._goal

    def close(self) -> None:
        self._over.set()
        self.arm.close()
