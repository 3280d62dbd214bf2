"""Training alarms: warnings about a run that learns nothing, or becomes worse."""

from polyrhythm.plugin import Plugin

PLUGIN = Plugin(
    "alarms",
    adds={
        "observer": {
            "alarms": "polyrhythm.plugins.alarms.setbacks:HOOKS",
        },
    },
)
