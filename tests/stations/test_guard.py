"""Errors of an environment: faults to be survived, and those that only the user can mend."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.stations.counting import Counting

from polyrhythm.envs.base import RowsFailed
from polyrhythm.envs.mujoco import RenderingUnavailable
from polyrhythm.errors import RunHalted
from polyrhythm.stations.simulator.guard import MOST_BYTES, EnvFault, GuardedEnv


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


class Misshapen(Counting):
    """Its step gives what `change` makes of the right result."""

    def __init__(self, change):
        super().__init__(2)
        self.change = change

    def step(self, rows, actions):
        return self.change(super().step(rows, actions))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (tuple, "the environment.s step returned a tuple; return StepResult"),
        (lambda r: r._replace(reward=r.reward[:, None]), r"reward as ndarray of shape \[2, 1\] and float32"),
        (lambda r: r._replace(reward=r.reward.tolist()), r"reward as list of shape \[2\]"),
        (lambda r: r._replace(terminated=r.terminated.astype(int)), r"terminated as .* int64; return .* and bool"),
        (lambda r: r._replace(success=r.success[:1]), r"success as .* shape \[1\]"),
        (lambda r: r._replace(success=r.success[:1].astype(np.int8)), r"success as .* shape \[1\]"),
        (lambda r: r._replace(success=np.full(2, 2, np.int8)), "success as .* int8; return .* and bool"),
        (lambda r: r._replace(success=[True, False]), r"success as list of shape \[2\]"),
    ],
)
def test_a_step_of_another_shape_ends_the_run(change, told):
    env = GuardedEnv(Misshapen(change))
    env.reset([0, 1], [0, 0], [5, 5])
    with pytest.raises(RunHalted, match=told):
        env.step([0, 1], np.zeros((2, 1), np.float32))


def test_success_is_unknown_where_the_environment_has_none():
    for reports, expected in ((False, [-1, -1]), (None, [-1, 0]), (True, [-1, 0])):
        env = Misshapen(lambda r: r._replace(success=np.array([-1, 0], np.int8)))
        env.spec = replace(env.spec, reports_success=reports)
        env = GuardedEnv(env)
        env.reset([0, 1], [0, 0], [5, 5])
        assert env.step([0, 1], np.zeros((2, 1), np.float32)).success.tolist() == expected


def test_rewards_of_any_number_are_taken():
    env = GuardedEnv(Misshapen(lambda r: r._replace(reward=r.reward.astype(np.float64))))
    env.reset([0, 1], [0, 0], [5, 5])
    assert env.step([0, 1], np.zeros((2, 1), np.float32)).reward.dtype == np.float64


def test_rows_that_fail_alone_are_kept_with_their_faults():
    env = Raising(2)
    env.error = RowsFailed({1: ZeroDivisionError("x")})
    isolated = GuardedEnv(env)
    isolated.reset([0, 1], [0, 0], [0, 0])
    assert {row: str(fault) for row, fault in isolated.failed.items()} == {1: "reset: ZeroDivisionError: x"}
    env.error = RowsFailed({0: ModuleNotFoundError("no mujoco")})
    with pytest.raises(ModuleNotFoundError, match="no mujoco"):
        isolated.reset([0], [0], [0])


def test_the_first_error_of_each_kind_is_logged_with_its_traceback(caplog):
    def raised(error):
        try:
            raise error
        except type(error) as found:
            return found

    env = Raising(2)
    isolated = GuardedEnv(env)
    for error in (ValueError("x"), ValueError("y"), KeyError("z")):
        env.error = RowsFailed({1: raised(error)})
        isolated.reset([0, 1], [0, 0], [0, 0])
    assert caplog.text.count("Traceback (most recent call last)") == 2
    assert "row 1: reset: ValueError: x; like errors come without a traceback" in caplog.messages


@pytest.mark.parametrize("errors", [{}, {7: ValueError("x")}])
def test_rows_that_are_not_of_the_call_cannot_have_failed(errors):
    env = Raising(2)
    env.error = RowsFailed(errors)
    with pytest.raises(RunHalted, match="the environment's reset raised RowsFailed for the rows"):
        GuardedEnv(env).reset([0, 1], [0, 0], [0, 0])


class Unseen(Counting):
    """Row 0 fails in its reset, and row 1 in its observation."""

    def reset(self, rows, tasks, seeds):
        raise RowsFailed({0: RuntimeError("no state")})

    def observe(self, rows, out):
        raise RowsFailed({1: RuntimeError("no picture")})


def test_a_row_that_fails_as_it_is_observed_is_a_fault_whether_or_not_another_has_failed():
    env = GuardedEnv(Unseen(2))
    for _ in range(2):
        with pytest.raises(EnvFault, match="observe: RuntimeError: no picture"):
            env.observe([0, 1], {})
        env.reset([0, 1], [0, 0], [0, 0])


class Speaking(Counting):
    """What was said in its rows."""

    def __init__(self, *texts):
        super().__init__(1)
        self.said = texts

    def texts(self, row):
        return [self.said[0], *self.said[1:]]


def test_texts_are_cut_where_no_message_could_carry_them():
    long = "b" * (MOST_BYTES - 11)
    first, second = GuardedEnv(Speaking("aaa", long + "bbb", "ccccc")).texts(0)
    assert first == "aaa"
    assert second == f"{long}… (8 more characters)"
    assert GuardedEnv(Speaking("aaa", long)).texts(0) == ("aaa", long)
    (wide,) = GuardedEnv(Speaking("€" * MOST_BYTES)).texts(0)
    assert wide == "€" * (MOST_BYTES // 3) + f"… ({MOST_BYTES - MOST_BYTES // 3:,} more characters)"
    assert len(GuardedEnv(Speaking(*[""] * MOST_BYTES)).texts(0)) <= MOST_BYTES // 8 + 2, "many empty ones"
    (text,) = GuardedEnv(Speaking("a\ud800é")).texts(0)
    assert text == "a?é"


def test_an_environment_that_cannot_say_its_texts_costs_no_episode(caplog):
    assert GuardedEnv(Counting(1)).texts(0) == ()
    assert GuardedEnv(Speaking()).texts(0) == ()
    assert "row 0: texts: IndexError" in caplog.text
    assert GuardedEnv(Speaking(None)).texts(0) == ()
