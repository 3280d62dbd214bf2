"""Registers the plugin: devices that stations hold in turn."""

from polyrhythm.plugin import Plugin

PLUGIN = Plugin(
    "lease",
    adds={"scheduler": {"lease": "polyrhythm.plugins.lease.conductor:LeasedConductor"}},
)
