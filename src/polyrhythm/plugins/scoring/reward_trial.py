"""Tries the run's reward function before the start, on an episode of the run's text environment."""

from __future__ import annotations

from polyrhythm.conformance import raised, remedy
from polyrhythm.envs.checked_env import SEED
from polyrhythm.errors import ConfigError
from polyrhythm.pipeline.validation.env_trial_process import WAY_OUT, TriedEpisode
from polyrhythm.plugins.scoring.reward_function import WrongScore, as_score, load_reward, view_of


def try_reward(episode: TriedEpisode) -> None:
    """Make the reward function and score an episode. ConfigError: the function is invalid.
    ContractViolation: the environment is."""
    episode.about_to("load")
    reward = load_reward(episode.trial.function, episode.trial.options)
    if not episode.trial.score or (played := episode.play()) is None:
        return
    view = view_of(episode.settings, episode.env.spec, played.sample, seed=SEED, evaluation=False)
    episode.about_to("score")
    try:
        as_score(reward(view))
        return
    except WrongScore as wrong:
        found, _, fix = str(wrong).rpartition("; ")
        problem = f"{found}{reward.place}"
    except (Exception, SystemExit) as error:  # noqa: BLE001 - of the user's code
        problem, fix = f"it {raised(error)}", remedy(error)
    what = f"on {played.said} (task {view.task}, seed {view.seed})"
    raise ConfigError(f"{reward.label}: {what}, {problem}; {fix}, {WAY_OUT}")
