"""One chunk step: holding, ending in the middle, the time limit."""

from __future__ import annotations

import numpy as np
from tests.stations.counting import Counting

from polyrhythm.specs import ActionSpec
from polyrhythm.stations.simulator.chunk import no_op, step_chunk


def begin(*lengths):
    env = Counting(len(lengths))
    env.reset(range(len(lengths)), [0] * len(lengths), lengths)
    return env


def test_each_action_is_held_and_its_rewards_are_summed():
    env = begin(50, 50)
    actions = np.array([[[1], [2]], [[3], [4]]], np.float32)
    result = step_chunk(env.step, np.arange(2), actions, hold=3, left=np.array([50, 50]))
    assert result.rewards.tolist() == [[3, 6], [9, 12]]
    assert result.valid.all()
    assert result.steps.tolist() == [6, 6]
    assert not (result.terminated | result.truncated | result.success).any()


def test_a_row_that_ended_is_left_alone_while_the_others_go_on():
    env = begin(50, 4, 2)
    result = step_chunk(env.step, np.arange(3), np.ones((3, 3, 1), np.float32), hold=2, left=np.full(3, 50))
    assert result.valid.tolist() == [[True, True, True], [True, True, False], [True, False, False]]
    assert result.steps.tolist() == env.stepped.tolist() == [6, 4, 2]
    assert result.terminated.tolist() == result.success.tolist() == [False, True, True]


def test_the_last_step_left_truncates_unless_the_task_ended():
    env = begin(50, 3)
    result = step_chunk(env.step, np.arange(2), np.ones((2, 5, 1), np.float32), hold=1, left=np.array([3, 3]))
    assert result.truncated.tolist() == [True, False]
    assert result.terminated.tolist() == [False, True]
    assert result.steps.tolist() == [3, 3]


def test_part_is_a_run_of_rows():
    env = begin(50, 1, 50)
    result = step_chunk(env.step, np.arange(3), np.ones((3, 1, 1), np.float32), hold=1, left=np.full(3, 50))
    assert result.part(1, 3).terminated.tolist() == [True, False]


def test_the_no_op_is_the_allowed_action_nearest_to_zero():
    spec = ActionSpec("continuous", 3, low=(-1.0, 0.5, -3.0), high=(1.0, 2.0, -1.0))
    assert no_op(spec).tolist() == [0.0, 0.5, -1.0]
    assert no_op(ActionSpec("discrete", 2, choices=4)).tolist() == [0, 0]
