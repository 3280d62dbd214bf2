"""Registers the plugin: `batching: auto`: batch limits chosen by forecast."""

from polyrhythm.plugin import Plugin

PLUGIN = Plugin(
    "autobatch",
    adds={"scheduler": {"tuner": "polyrhythm.plugins.autobatch.tuning:BatchTuner"}},
)
