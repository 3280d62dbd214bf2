"""Errors of an environment: faults to be survived, and those that only the user can mend."""

from __future__ import annotations

import pytest
from tests.stations.counting import Counting

from polyrhythm.envs.mujoco_rendering import RenderingUnavailable
from polyrhythm.stations.guard import EnvFault, GuardedEnv


class Raising(Counting):
    """Its reset raises `error`."""

    error: Exception

    def reset(self, rows, tasks, seeds):
        raise self.error


def guarded(error):
    env = Raising(1)
    env.error = error
    return GuardedEnv(env)


@pytest.mark.parametrize(
    "error", [RenderingUnavailable("run: apt-get install -y libosmesa6"), ModuleNotFoundError("no mujoco")]
)
def test_what_another_attempt_cannot_mend_passes_unchanged(error):
    with pytest.raises(type(error)) as raised:
        guarded(error).reset([0], [0], [0])
    assert raised.value is error


def test_anything_else_is_a_fault_that_says_where():
    with pytest.raises(EnvFault, match="reset: ZeroDivisionError: x"):
        guarded(ZeroDivisionError("x")).reset([0], [0], [0])
