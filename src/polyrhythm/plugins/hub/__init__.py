"""Folders of the Hugging Face hub, by `hf://owner/name@revision`: checkpoints and datasets, read and uploaded."""

from polyrhythm.plugin import Plugin

PLUGIN = Plugin(
    "hub",
    needs=("report",),
    adds={
        "source": {"hf": "polyrhythm.plugins.hub.files"},
        "check": {"downloads": "polyrhythm.plugins.hub.checks:CHECKS"},
    },
)
