"""Checks of the run's reward function before the start: that it exists, or that it scores an episode of the run's text
environment. The doctor imports this module where packages are missing, so it imports none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polyrhythm.checks import Check, CheckContext
from polyrhythm.conformance import raised, remedy
from polyrhythm.errors import ConfigError

if TYPE_CHECKING:
    from polyrhythm.plugins.trial.process import TriedEpisode


def _function(context: CheckContext) -> tuple[()]:
    """Check that the reward function exists, if no episode is played on which to try it."""
    scoring = context.config.scoring
    if scoring is not None and (context.depth in ("settings", "machine") or not context.simulates):
        from polyrhythm.plugins.scoring.reward_function import load_reward

        load_reward(scoring.function, scoring.options)
    return ()


def _on_episode(episode: TriedEpisode) -> tuple[()]:
    """Make the reward function, if the run has one, and score an episode of a text environment. ConfigError: the
    function is invalid. ContractViolation: the environment is."""
    if not episode.trial.function:
        return ()
    from polyrhythm.plugins.scoring.reward_function import WrongScore, as_score, load_reward, view_of
    from polyrhythm.plugins.trial.process import SEED, WAY_OUT

    episode.about_to("load")
    reward = load_reward(episode.trial.function, episode.trial.options)
    if not episode.trial.score or (played := episode.play()) is None:
        return ()
    view = view_of(episode.settings, episode.env.spec, played.sample, seed=SEED, evaluation=False)
    episode.about_to("score")
    try:
        as_score(reward(view))
        return ()
    except WrongScore as wrong:
        found, _, fix = str(wrong).rpartition("; ")
        problem = f"{found}{reward.place}"
    except (Exception, SystemExit) as error:  # noqa: BLE001 - of the user's code
        problem, fix = f"it {raised(error)}", remedy(error)
    what = f"on {played.said} (task {view.task}, seed {view.seed})"
    raise ConfigError(f"{reward.label}: {what}, {problem}; {fix}, {WAY_OUT}")


CHECKS = (
    Check("reward function", "recipe", "machine", _function, needs=("spec",), after="rows and batches"),
    Check("reward function", "environment", "trial", _on_episode, after="episode"),
)
