"""The live block of a running command in the terminal."""

from polyrhythm.plugin import Plugin

PLUGIN = Plugin(
    "terminal",
    adds={
        "pipeline": {
            "terminal": "polyrhythm.plugins.terminal.display:live_terminal",
        },
    },
)
