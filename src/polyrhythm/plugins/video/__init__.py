"""Videos of the first episodes of an evaluation."""

from polyrhythm.plugin import Plugin

PLUGIN = Plugin(
    "video",
    adds={
        "pipeline": {
            "video": "polyrhythm.plugins.video.film",
        },
    },
)
