"""Registers the plugin: scorers: reward functions and models between a finished sample and its group."""

from polyrhythm.plugin import Plugin

PLUGIN = Plugin(
    "scoring",
    adds={
        "scheduler": {"scoring": "polyrhythm.plugins.scoring.queue:ScoringQueue"},
        "station": {"scoring": "polyrhythm.plugins.scoring.scorer_factory:add_scorers"},
    },
)
