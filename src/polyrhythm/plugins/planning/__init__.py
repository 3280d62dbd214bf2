"""Finds a placement: a profile of each station's work, and a search over what the simulated cluster predicts from it.

profile     the file of measured times and memory: begin reading here
measure     makes it: the stations `alone`, then `together` in a short run; `from_run`: from a run's own metrics
cluster     the simulated cluster of a recipe, with the `costs` of a profile; `memory`: of its stations and devices
arrangement what a placement decides, as settings of a recipe
judge       predicts one by the real scheduler on the simulated cluster
judging     judges many, on several cores
graph       the workflow: who sends what to whom
search      proposes placements: cuts of the graph into temporal and spatial parts (RLinf, algorithm 1)
problem     a recipe's placement problem: costs, choices, the answer, and what more would buy
own_workflow the same for a user's workflow, watched while it runs
theory      ROLL Flash's bounds on the time of a version
"""

from polyrhythm.plugin import Plugin

PLUGIN = Plugin(
    "planning",
    needs=("hardware", "lease", "memory_estimate", "scoring", "virtual", "workflow"),
    adds={
        "command": {
            "plan": f"{__name__}.commands:Plan",
            "profile": f"{__name__}.profile_command",
            "simulate": f"{__name__}.simulate_command",
        },
        "observer": {"profile": f"{__name__}.from_run:HOOKS"},
    },
    purposes={
        "plan": "find a placement, or predict what a setting would gain, or what memory a run would take",
        "profile": "measure what each station of a recipe takes on this machine",
        "simulate": "run the scheduler on a simulated cluster, in virtual time",
    },
)
