"""Registers the plugin: A run on several hosts: agents, sealed connections, Ray."""

from polyrhythm.plugin import Plugin

PLUGIN = Plugin(
    "cluster",
    adds={
        "launcher": {
            "ray": "polyrhythm.plugins.cluster.launching:launch_on_ray",
        },
    },
)
