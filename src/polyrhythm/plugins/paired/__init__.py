"""The comparison of two policies on the same episodes."""

from polyrhythm.plugin import Plugin

PLUGIN = Plugin(
    "paired",
    adds={"command": {"eval compare": "polyrhythm.plugins.paired.command"}},
    purposes={"eval compare": "polyrhythm eval compare A B: the difference of two policies on the same episodes"},
)
