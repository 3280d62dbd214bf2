"""Advice about a run: what is unstable, which station limits it, and which settings to change, in which order.

findings    what advice is made of, as text and as JSON: begin reading here
measures    shares of a run's time, from its summary and its metrics
stability   rules of what is learned: first, since speed multiplies what goes wrong
speed       rules of the throughput
order       all findings of a run, in the order in which to act
predicted   what a change does to the throughput, simulated from the run's own times
section     the report's section; command: `plan RUN`; hooks: summary and live display
"""

from polyrhythm.plugin import Plugin

PLUGIN = Plugin(
    "advice",
    needs=("memory_estimate", "planning", "report"),
    adds={
        "observer": {"advice": f"{__name__}.hooks:HOOKS"},
        "report": {"advice": f"{__name__}.section:SECTION"},
        "pipeline": {"advice": f"{__name__}.command:print_advice"},
    },
)
