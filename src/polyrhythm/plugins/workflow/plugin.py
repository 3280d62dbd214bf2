"""Registers the plugin: workflows of one's own: workers, channels and a driver."""

from polyrhythm.plugin import Plugin

PLUGIN = Plugin(
    "workflow",
    needs=("cluster",),
)
