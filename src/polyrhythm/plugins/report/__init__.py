"""The HTML report on a run, or the comparison of several."""

from polyrhythm.plugin import Plugin

PLUGIN = Plugin(
    "report",
    adds={
        "observer": {
            "report": "polyrhythm.plugins.report.command:HOOKS",
        },
        "command": {
            "report": "polyrhythm.plugins.report.command",
        },
    },
    purposes={
        "report": "write an HTML report of a run, or a comparison of several",
    },
)
