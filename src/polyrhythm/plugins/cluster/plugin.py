"""Registers the plugin: A run on several hosts: agents, sealed connections, Ray."""

from polyrhythm.plugin import Plugin

PLUGIN = Plugin(
    "cluster",
)
