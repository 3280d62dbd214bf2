"""Use of the main machine's processor cores and GPUs: metrics of each update, the report's curves, the live display."""

from polyrhythm.plugin import Plugin

PLUGIN = Plugin(
    "hardware",
    needs=("report",),
    adds={
        "observer": {"hardware": f"{__name__}.sampler:HOOKS"},
        "report": {"hardware": f"{__name__}.section:SECTION"},
    },
)
