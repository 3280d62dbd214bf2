"""Checks whether a machine can run the quickstart, or an environment."""

from polyrhythm.plugin import Plugin

PLUGIN = Plugin(
    "doctor",
    needs=("memory_estimate",),
    adds={"command": {"doctor": "polyrhythm.plugins.doctor.command"}},
    purposes={"doctor": "check whether this machine can run the quickstart"},
)
