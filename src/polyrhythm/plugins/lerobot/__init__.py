"""Demonstrations as folders in the LeRobotDataset v3.0 layout: writing, reading, recording and statistics."""

from polyrhythm.plugin import Plugin

PLUGIN = Plugin(
    "lerobot",
    needs=("demonstrations",),
    adds={
        "demonstrations": {"lerobot": "polyrhythm.plugins.lerobot.reading"},
        "command": {"demos": "polyrhythm.plugins.lerobot.demos"},
    },
    purposes={"demos": "record demonstrations of the environment's expert"},
)
