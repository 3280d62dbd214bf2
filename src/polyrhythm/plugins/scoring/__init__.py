"""Scorers: reward functions and models that score finished samples before their group counts them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polyrhythm.checks import Check, CheckContext
from polyrhythm.plugin import Plugin

if TYPE_CHECKING:
    from polyrhythm.plugins.trial.process import TriedEpisode


def _function(context: CheckContext) -> tuple[()]:
    """Check that the reward function exists, if no episode is played on which to try it."""
    scoring = context.config.scoring
    if scoring is not None and not (context.depth == "trial" and context.simulates):
        from polyrhythm.plugins.scoring.reward_function import load_reward

        load_reward(scoring.function, scoring.options)
    return ()


def _on_episode(episode: TriedEpisode) -> tuple[()]:
    """Try the reward function on an episode of a text environment."""
    if episode.trial.function:
        from polyrhythm.plugins.scoring.reward_trial import try_reward

        try_reward(episode)
    return ()


CHECKS = (
    Check("reward function", "recipe", "machine", _function, needs=("spec",), after="rows and batches"),
    Check("reward function", "environment", "trial", _on_episode, after="episode"),
)
PLUGIN = Plugin(
    "scoring",
    needs=("trial",),
    adds={
        "check": {
            "reward function": "polyrhythm.plugins.scoring:CHECKS",
        },
        "scheduler": {"scoring": "polyrhythm.plugins.scoring.queue:ScoringQueue"},
        "station": {"scoring": "polyrhythm.plugins.scoring.scorer_factory:add_scorers"},
    },
)
