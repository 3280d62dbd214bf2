"""The warm start: demonstrations of an environment's expert or of a dataset, and supervised learning from them."""

from polyrhythm.plugin import Plugin

PLUGIN = Plugin(
    "demonstrations",
    adds={
        "pipeline": {
            "demonstrations": "polyrhythm.plugins.demonstrations.warm_start",
        },
        "command": {
            "sft": "polyrhythm.plugins.demonstrations.command",
        },
    },
    purposes={
        "sft": "run the supervised warm start alone",
    },
)
