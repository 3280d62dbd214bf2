"""The HTML report on a run, live too, and the comparison of several."""

from polyrhythm.plugin import Plugin

PLUGIN = Plugin(
    "report",
    adds={
        "observer": {"report": f"{__name__}.command:HOOKS"},
        "command": {
            "compare": f"{__name__}.compare",
            "report": f"{__name__}.command",
            "watch": f"{__name__}.watch",
        },
    },
    purposes={
        "compare": "compare runs, over their seeds: a table and an HTML page",
        "report": "write an HTML report of a run",
        "watch": "serve the report of a run on this machine while it trains",
    },
)
