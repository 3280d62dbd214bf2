"""What every adapter promises: shapes, determinism by (task, seed), independent rows, no autoreset, the time limit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from polyrhythm.envs.base import REQUIRED, EnvBatch
from polyrhythm.envs.gymnasium_env import GymnasiumSettings
from polyrhythm.envs.latency import LatencyBatch, LatencySettings
from polyrhythm.plugins.simulators.maniskill.env import ManiSkillSettings
from polyrhythm.plugins.simulators.metaworld.env import MetaWorldSettings
from polyrhythm.specs import EnvSpec

ROWS = 3
LIMIT = 6


@dataclass(frozen=True)
class Case:
    build: Callable[[int], EnvBatch]
    spec: EnvSpec


def gymnasium_case() -> Case:
    settings = GymnasiumSettings(id="CartPole-v1", max_steps=LIMIT)
    return Case(settings.build, settings.spec())


def continuous_case() -> Case:
    settings = GymnasiumSettings(id="Pendulum-v1", max_steps=LIMIT)
    return Case(settings.build, settings.spec())


def several_tasks_case() -> Case:
    light = {"id": "Pendulum-v1", "name": "light", "kwargs": {"g": 2.0}}
    settings = GymnasiumSettings(
        tasks=({"id": "Pendulum-v1"}, light), rename={"state": "swing"}, metrics=["effort"], max_steps=LIMIT
    )
    return Case(settings.build, settings.spec())


def latency_case() -> Case:
    settings = LatencySettings(episode_steps=LIMIT, step_time="lognormal:10ms:0.8")
    return Case(lambda rows: LatencyBatch(settings, rows, lambda seconds: None), settings.spec())


def metaworld_case() -> Case:
    settings = MetaWorldSettings(
        tasks=("door-close-v3", "reach-v3"), image_size=32, max_steps=LIMIT, time_limit="truncates"
    )
    return Case(settings.build, settings.spec())


def metaworld_state_case() -> Case:
    settings = MetaWorldSettings(
        tasks=("reach-v3",), observation="state", max_steps=LIMIT, time_limit="truncates", reward="dense"
    )
    return Case(settings.build, settings.spec())


def maniskill_state_case() -> Case:
    settings = ManiSkillSettings(
        tasks=("PushCube-v1", "PullCube-v1"), max_steps=LIMIT, time_limit="truncates", reward="normalized_dense"
    )
    return Case(settings.build, settings.spec())


def maniskill_pixels_case() -> Case:
    settings = ManiSkillSettings(
        tasks=("PickCube-v1",),
        observation="rgbd",
        image_size=32,
        control_mode="pd_ee_delta_pose",
        metrics={"is_grasped": "max"},
        max_steps=LIMIT,
        time_limit="truncates",
    )
    return Case(settings.build, settings.spec())


def maniskill_remade_case() -> Case:
    """A task that makes its objects anew at each reset."""
    settings = ManiSkillSettings(tasks=("PegInsertionSide-v1",), max_steps=LIMIT, time_limit="truncates")
    return Case(settings.build, settings.spec())


CASES = [
    pytest.param(gymnasium_case, id="gymnasium-discrete"),
    pytest.param(continuous_case, id="gymnasium-box"),
    pytest.param(several_tasks_case, id="gymnasium-tasks"),
    pytest.param(latency_case, id="latency"),
    pytest.param(metaworld_case, id="metaworld", marks=pytest.mark.sim),
    pytest.param(metaworld_state_case, id="metaworld-state", marks=pytest.mark.sim),
    pytest.param(maniskill_state_case, id="maniskill-state", marks=pytest.mark.sim),
    pytest.param(maniskill_pixels_case, id="maniskill-pixels", marks=pytest.mark.sim),
    pytest.param(maniskill_remade_case, id="maniskill-remade", marks=pytest.mark.sim),
]


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    if request.param in (metaworld_case, metaworld_state_case):
        request.getfixturevalue("simulator")
    if request.param in (maniskill_state_case, maniskill_pixels_case, maniskill_remade_case):
        request.getfixturevalue("maniskill")
    made: Case = request.param()
    return made


@pytest.fixture
def batch(case: Case) -> Iterator[EnvBatch]:
    made = case.build(ROWS)
    yield made
    made.close()


def observe(batch: EnvBatch, rows: list[int]) -> dict[str, np.ndarray]:
    out = {key: np.zeros((len(rows), *spec.shape), spec.dtype) for key, spec in batch.spec.observation.items()}
    batch.observe(rows, out)
    return out


def actions(batch: EnvBatch, rows: int, seed: int = 0) -> np.ndarray:
    rng, action = np.random.default_rng(seed), batch.spec.action
    if action.kind == "discrete":
        return rng.integers(action.choices, size=(rows, action.dim))
    return rng.uniform(action.low, action.high, size=(rows, action.dim)).astype(np.float32)


def same(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> bool:
    return all(np.array_equal(left[key], right[key]) for key in left)


def test_it_is_an_env_batch_with_the_spec_of_its_settings(case, batch):
    assert all(hasattr(batch, name) for name in REQUIRED)
    assert batch.rows == ROWS
    assert batch.spec == case.spec
    assert batch.spec.max_steps == LIMIT


def test_shapes_and_dtypes(batch):
    rows = list(range(ROWS))
    batch.reset(rows, [0] * ROWS, [1, 2, 3])
    seen = observe(batch, rows)
    result = batch.step(rows, actions(batch, ROWS))
    assert all(np.isfinite(part).all() for part in seen.values())
    *parts, metrics, _ = result
    assert all(part.shape == (ROWS,) for part in parts)
    assert [part.dtype for part in parts[:3]] == [np.float32, np.bool_, np.bool_]
    assert parts[3].dtype in (np.bool_, np.int8)
    assert metrics.keys() == batch.spec.metrics.keys()
    assert all(part.shape == (ROWS,) and part.dtype.kind == "f" for part in metrics.values())


def test_equal_task_and_seed_give_an_equal_episode_in_any_row_and_after_any_history(case, batch):
    last_task, rows = len(case.spec.tasks) - 1, list(range(ROWS))
    tasks = [last_task] * ROWS
    batch.reset(rows, tasks, [11, 2**63 - 1, 13])
    first = observe(batch, [0])
    for step in range(3):
        result = batch.step(rows, np.repeat(actions(batch, 1, step), ROWS, axis=0))
    after, reward = observe(batch, [0]), result.reward[0]

    batch.reset(rows, [0] * ROWS, [5, 6, 7])
    batch.step(rows, actions(batch, ROWS))
    batch.reset([2, 0, 1], tasks, [11, 12, 14])
    assert same(first, observe(batch, [2]))
    assert not same(first, observe(batch, [0]))
    for step in range(3):
        result = batch.step(rows, np.repeat(actions(batch, 1, step), ROWS, axis=0))
    assert same(after, observe(batch, [2]))
    assert result.reward[2] == reward


def test_observing_changes_nothing_and_keeps_the_order_asked(batch):
    rows = list(range(ROWS))
    batch.reset(rows, [0] * ROWS, [1, 2, 3])
    forward, backward = observe(batch, rows), observe(batch, rows[::-1])
    assert same(forward, {key: part[::-1] for key, part in backward.items()})


def test_rows_are_on_their_own(batch):
    rows = list(range(ROWS))
    batch.reset(rows, [0] * ROWS, [1, 2, 3])
    before = observe(batch, rows)
    if batch.spec.step_rows:
        batch.step([1], actions(batch, 1))
        moved = observe(batch, rows)
        assert same({k: v[[0, 2]] for k, v in before.items()}, {k: v[[0, 2]] for k, v in moved.items()})
        assert not same({k: v[[1]] for k, v in before.items()}, {k: v[[1]] for k, v in moved.items()})
    if batch.spec.reset_rows:
        batch.reset([1], [0], [2])
        assert same(before, observe(batch, rows))


def test_the_time_limit_truncates_and_nothing_resets_by_itself(batch):
    rows = list(range(ROWS))
    batch.reset(rows, [0] * ROWS, [1, 2, 3])
    for step in range(LIMIT):
        result = batch.step(rows, actions(batch, ROWS, step))
        assert result.truncated.tolist() == [step == LIMIT - 1] * ROWS
        assert not result.terminated.any()
    final = observe(batch, rows)
    assert same(final, observe(batch, rows))
    batch.reset([0], [0], [1])
    assert same({k: v[1:] for k, v in final.items()}, {k: v[1:] for k, v in observe(batch, rows).items()})
