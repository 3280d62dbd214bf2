"""Videos of an evaluation: of the first episodes in one file, or of every episode in the run's gallery."""

from polyrhythm.plugin import Plugin

PLUGIN = Plugin(
    "video",
    adds={
        "pipeline": {
            "gallery": "polyrhythm.plugins.video.gallery",
            "video": "polyrhythm.plugins.video.film",
        },
    },
)
