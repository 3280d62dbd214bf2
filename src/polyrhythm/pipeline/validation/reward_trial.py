"""Calls the run's reward function before the start, on a sample of the run's environment.

It is made and called where the environment is tried: in a process that ends afterwards, or inline in a thread. A class
that loads a model is tried too, since its object is made for the check anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from polyrhythm.conformance import raised
from polyrhythm.envs.trial_episode import SEED
from polyrhythm.errors import ConfigError
from polyrhythm.specs import EnvSpec, Trajectory
from polyrhythm.stations.reward_function import WrongScore, as_score, load_reward, view_of


class RewardTrial(NamedTuple):
    """function, options, attempts: those of `scoring` (attempts: `max_attempts`)."""

    function: str
    options: Mapping[str, Any]
    attempts: int


def try_reward(
    trial: RewardTrial, env: object, spec: EnvSpec, sample: Trajectory, about_to: Callable[[str], None]
) -> None:
    """Raise ConfigError unless the function gives the sample a score, in one of as many attempts as a sample has.

    env: its environment's settings; about_to: called before each call into user code.
    """
    about_to("load")
    reward = load_reward(trial.function, trial.options)
    view = view_of(env, spec, sample, seed=SEED, evaluation=False)
    where, problem, fix = f"{reward.label}: on a first episode of task {view.task} (seed {view.seed})", "", ""
    for _attempt in range(trial.attempts):
        about_to("score")
        try:
            as_score(reward(view))
        except WrongScore as wrong:
            said, _, fix = str(wrong).rpartition("; ")
            problem = f"{said}{reward.place}"
        except (Exception, SystemExit) as error:  # noqa: BLE001 - of the user's code
            problem, fix = f"it {raised(error)}", "fix it there"
        else:
            return
    raise ConfigError(f"{where} {problem}; {fix}")
