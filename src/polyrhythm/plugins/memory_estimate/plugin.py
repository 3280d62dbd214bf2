"""Registers the plugin: how much memory a run takes on each device, before it is started."""

from polyrhythm.plugin import Plugin

PLUGIN = Plugin(
    "memory_estimate",
)
