"""Simulators as their own libraries make and step them, to compare our adapters with.

A bare simulator has `reset(seed)`, `step(action)` with one row's action [A] (a vector environment: [rows,A]), `close`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class Bare(NamedTuple):
    """The simulator's own calls."""

    reset: Callable[[int], object]
    step: Callable[[NDArray[Any]], object]
    close: Callable[[], object]


def gymnasium(env_id: str) -> Bare:
    """One environment, without Gymnasium's checks and time limit, as the adapter has it."""
    import gymnasium as library

    env = library.make(env_id, disable_env_checker=True).unwrapped
    return Bare(lambda seed: env.reset(seed=seed), lambda action: env.step(_choice(action)), env.close)


def gymnasium_vector(env_id: str, rows: int) -> Bare:
    """A vector environment that steps its rows in a loop."""
    import gymnasium as library

    env = library.make_vec(env_id, num_envs=rows, vectorization_mode="sync")
    return Bare(lambda seed: env.reset(seed=seed), lambda actions: env.step(actions[:, 0]), env.close)


def metaworld(task: str) -> Bare:
    """A task as Meta-World's MT1 makes it. Its resets take one of its 50 placements."""
    import metaworld as library

    benchmark = library.MT1(task)
    env = benchmark.train_classes[task]()

    def reset(seed: int) -> None:
        env.set_task(benchmark.train_tasks[seed % len(benchmark.train_tasks)])
        env.reset()

    return Bare(reset, env.step, env.close)


def maniskill(task: str) -> Bare:
    """A state task with one row on the CPU, without ManiSkill's time limit and Gymnasium's checks, as the adapter has
    it."""
    import gymnasium as library
    import mani_skill.envs  # noqa: F401 - registers the tasks

    env = library.make(
        task, num_envs=1, obs_mode="state", reward_mode="sparse", render_backend="cpu", disable_env_checker=True
    ).unwrapped
    return Bare(lambda seed: env.reset(seed=seed), lambda action: env.step(action[None]), env.close)


def robosuite(task: str) -> Bare:
    """A state task with its own resets, each of which makes the model anew; they take no seed."""
    import robosuite as library
    from robosuite.controllers import load_composite_controller_config

    env = library.make(
        task,
        robots="Panda",
        controller_configs=load_composite_controller_config(controller=None, robot="Panda"),
        has_renderer=False,
        has_offscreen_renderer=False,
        use_camera_obs=False,
        ignore_done=True,
        renderer="mujoco",
    )
    return Bare(lambda _: env.reset(), env.step, env.close)


def libero(task: str) -> Bare:
    """A task with images of agentview, 128 pixels wide, drawn by its own step; each reset makes the model anew."""
    from polyrhythm.plugins.simulators.libero import library

    library.import_package(library.find_assets(""))
    from libero.libero.envs.env_wrapper import ControlEnv

    env = ControlEnv(
        bddl_file_name=str(library.task_file(task)),
        camera_names=["agentview"],
        ignore_done=True,
    )
    states = library.initial_states(task)

    def reset(seed: int) -> None:
        env.reset()
        env.set_init_state(states[seed % len(states)])

    return Bare(reset, env.step, env.close)


def _choice(action: NDArray[Any]) -> Any:
    return int(action[0]) if action.dtype == np.int64 else action
