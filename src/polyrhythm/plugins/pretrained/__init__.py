"""Released folders of pretrained policies: opening, loading, adapting, saving, merging and inspecting."""

from polyrhythm.plugin import Plugin

PLUGIN = Plugin(
    "pretrained",
    adds={
        "command": {
            "policies inspect": "polyrhythm.plugins.pretrained.command:inspect",
            "policies merge": "polyrhythm.plugins.pretrained.command:merge",
        },
    },
    purposes={
        "policies inspect": "polyrhythm policies inspect FOLDER [--json]",
        "policies merge": "polyrhythm policies merge ADAPTERS --base FOLDER --out FOLDER",
    },
)
