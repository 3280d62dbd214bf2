"""Devices that stations hold in turn."""

from polyrhythm.plugin import Plugin

PLUGIN = Plugin(
    "lease",
    adds={
        "placement": {"lease": "polyrhythm.plugins.lease.seats:share_seats"},
        "scheduler": {"lease": "polyrhythm.plugins.lease.conductor:LeasedConductor"},
    },
)
