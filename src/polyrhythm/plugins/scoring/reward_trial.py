"""Calls the run's reward function before the start, on an episode of the run's text environment.

It is made and called where the environment is tried: in a process that ends afterwards, or inline in a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from polyrhythm.conformance import raised, remedy
from polyrhythm.envs.checked_env import CheckedEnv
from polyrhythm.envs.trial_episode import SEED, is_text, play_episode
from polyrhythm.errors import ConfigError
from polyrhythm.plugins.scoring.reward_function import WrongScore, as_score, load_reward, view_of

#: How a valid function is let through that this episode is not for.
WAY_OUT = "or set scoring.try_first=false"


class EpisodeTrial(NamedTuple):
    """What is tried after the reset. play: whether an episode is played, of a text environment; expert: whether its
    expert is asked; function, options: those of `scoring`, "" for none; score: whether it is called on the episode."""

    play: bool = True
    expert: bool = False
    function: str = ""
    options: Mapping[str, Any] = {}
    score: bool = False


def try_episode(trial: EpisodeTrial, settings: object, env: CheckedEnv, about_to: Callable[[str], None]) -> None:
    """Make the reward function, and play and score an episode. Raises ConfigError for the function, ContractViolation
    for the environment. settings: the environment's; about_to: called before each call into user code."""
    reward = None
    if trial.function:
        about_to("load")
        reward = load_reward(trial.function, trial.options)
    if not trial.play or not is_text(env.spec):
        return
    sample, said = play_episode(env, expert=trial.expert)
    if reward is None or not trial.score:
        return
    view = view_of(settings, env.spec, sample, seed=SEED, evaluation=False)
    about_to("score")
    try:
        as_score(reward(view))
        return
    except WrongScore as wrong:
        found, _, fix = str(wrong).rpartition("; ")
        problem = f"{found}{reward.place}"
    except (Exception, SystemExit) as error:  # noqa: BLE001 - of the user's code
        problem, fix = f"it {raised(error)}", remedy(error)
    raise ConfigError(f"{reward.label}: on {said} (task {view.task}, seed {view.seed}), {problem}; {fix}, {WAY_OUT}")
