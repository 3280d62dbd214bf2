"""Registers the plugin: simulators that join a run from another machine or Python environment."""

from polyrhythm.plugin import Plugin

PLUGIN = Plugin(
    "join",
    needs=("cluster",),
    adds={
        "station": {
            "join": "polyrhythm.plugins.join.places:add_places",
        },
        "command": {
            "join": "polyrhythm.plugins.join.command",
        },
    },
    purposes={
        "join": "join a run with an environment of this machine, as a simulator",
    },
)
