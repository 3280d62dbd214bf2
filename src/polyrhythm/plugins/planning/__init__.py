"""Finds a placement: a profile of each station's work, and a search over what the simulated cluster predicts from it.

profile     the file of measured times and memory: begin reading here
measure     makes it: the stations `alone`, then `together` in a short run; `from_run`: from a run's own metrics
cluster     the simulated cluster of a recipe, with the costs of a profile
"""

from polyrhythm.plugin import Plugin

PLUGIN = Plugin(
    "planning",
    needs=("virtual", "memory_estimate", "lease", "scoring"),
    adds={
        "command": {"profile": f"{__name__}.profile_command"},
        "observer": {"profile": f"{__name__}.from_run:HOOKS"},
    },
    purposes={"profile": "measure what each station of a recipe takes on this machine"},
)
