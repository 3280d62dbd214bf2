"""The scheduler on a simulated cluster in virtual time, and planning from measured stage times."""

from polyrhythm.plugin import Plugin

PLUGIN = Plugin(
    "virtual",
    needs=("memory_estimate", "timeline"),
    adds={"command": {"simulate": f"{__name__}.commands:Simulate", "plan": f"{__name__}.commands:Plan"}},
    purposes={
        "simulate": "run the scheduler on a simulated cluster, in virtual time",
        "plan": "predict what asynchronous training would gain, or what memory a run would take",
    },
)
