"""Scorers: reward functions and models that score finished samples before their group counts them."""

from polyrhythm.plugin import Plugin

PLUGIN = Plugin(
    "scoring",
    needs=("trial",),
    adds={
        "check": {"reward function": "polyrhythm.plugins.scoring.checks:CHECKS"},
        "scheduler": {"scoring": "polyrhythm.plugins.scoring.queue:ScoringQueue"},
        "station": {"scoring": "polyrhythm.plugins.scoring.scorer:add_scorers"},
    },
)
