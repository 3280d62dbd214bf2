"""CartPole as a machine may be: its cable comes out after a few steps, or a reset of it waits for a person."""

from __future__ import annotations

import threading
from typing import Any, Literal

from polyrhythm.envs.base import EnvBatch
from polyrhythm.envs.gymnasium_env import GymnasiumSettings
from polyrhythm.errors import EnvLost

STEPS = 5


class BreaksSettings(GymnasiumSettings):
    """CartPole-v1 of 40 steps."""

    type: Literal["tests.process.breaking:BreaksSettings"]  # type: ignore[assignment]
    """The class."""
    id: str = "CartPole-v1"
    """The task."""
    max_steps: int = 40
    """Steps of an episode."""

    def build(self, rows: int) -> EnvBatch:
        env: Any = super().build(rows)
        steps, step = iter(range(STEPS)), env.step

        def breaking(*arguments: Any) -> Any:
            if next(steps, None) is None:
                raise EnvLost("its cable is out")
            return step(*arguments)

        env.step = breaking
        return env


class WaitsSettings(GymnasiumSettings):
    """CartPole-v1 of 40 steps, whose third reset waits for a person."""

    type: Literal["tests.process.breaking:WaitsSettings"]  # type: ignore[assignment]
    """The class."""
    id: str = "CartPole-v1"
    """The task."""
    max_steps: int = 40
    """Steps of an episode."""

    def build(self, rows: int) -> EnvBatch:
        env: Any = super().build(rows)
        resets, reset = iter(range(1, 1_000_000)), env.reset

        def waiting(*arguments: Any) -> Any:
            if next(resets) == WAITS:
                PERSON.wait()
            return reset(*arguments)

        env.reset = waiting
        return env


#: The reset that waits, and the person who comes.
WAITS, PERSON = 3, threading.Event()
