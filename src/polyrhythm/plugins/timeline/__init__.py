"""The timeline of a run, trace.json, for Perfetto and the report."""

from polyrhythm.plugin import Plugin

PLUGIN = Plugin(
    "timeline",
    adds={
        "observer": {
            "timeline": "polyrhythm.plugins.timeline.observer:HOOKS",
        },
    },
)
