"""Sweeps: runs of a recipe over a grid, over random draws, or as an optimizer proposes."""

from polyrhythm.plugin import Plugin

PLUGIN = Plugin(
    "sweep",
    adds={"command": {"sweep": "polyrhythm.plugins.sweep.command"}},
    purposes={"sweep": "train a recipe with many settings, several runs at once"},
)
