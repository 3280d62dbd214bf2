"""The scheduler on a simulated cluster in virtual time."""

from polyrhythm.plugin import Plugin

PLUGIN = Plugin(
    "virtual",
    needs=("timeline",),
    adds={"command": {"simulate": f"{__name__}.commands:Simulate"}},
    purposes={"simulate": "run the scheduler on a simulated cluster, in virtual time"},
)
