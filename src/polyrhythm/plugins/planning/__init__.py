"""Finds a placement: a profile of each station's work, and a search over what the simulated cluster predicts from it.

profile     the file of measured times and memory: begin reading here
arrangement what a placement decides, and the memory it takes
graph       the workflow: who sends what to whom
search      proposes placements: cuts of the graph into temporal and spatial parts (RLinf, algorithm 1)
judge       predicts one by the real scheduler on the simulated cluster
theory      ROLL Flash's bounds on the time of a version
"""

from polyrhythm.plugin import Plugin

PLUGIN = Plugin(
    "planning",
    needs=("memory_estimate", "virtual"),
    adds={"command": {"plan": f"{__name__}.commands:Plan"}},
    purposes={"plan": "find a placement, or predict what a setting would gain, or what memory a run would take"},
)
