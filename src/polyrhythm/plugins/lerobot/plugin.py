"""Registers the plugin: demonstrations as folders in the LeRobotDataset layout: written, read, recorded."""

from polyrhythm.plugin import Plugin

PLUGIN = Plugin(
    "lerobot",
    adds={
        "demonstrations": {
            "lerobot": "polyrhythm.plugins.lerobot.reading",
        },
        "command": {
            "demos": "polyrhythm.plugins.lerobot.demos",
        },
    },
    purposes={
        "demos": "record demonstrations of the environment's expert",
    },
)
