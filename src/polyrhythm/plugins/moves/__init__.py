"""`placement.moves`: changes what a running conductor may change between two versions, and keeps what measures better.

start       the settings of a plan, with which `placement: auto` begins
rules       what a run's devices, settings and memory allow
timing      measured times of passes, slots, updates and weights, from the run's own events
operation   what is changed, and the neighbours of a present operation
search      forecasts of the neighbours, in slices
judge       one forecast: the simulated cluster with the measured times
mover       when a search begins, what is tried, kept or undone: begin reading here
conductor   the conductor around another one, which feeds the mover and applies its moves
hooks       metrics of what is in force
"""

from polyrhythm.checks import Check, CheckContext, Result
from polyrhythm.plugin import Plugin


def _moves(context: CheckContext) -> Result:
    from polyrhythm.plugins.moves.rules import moves_found

    return moves_found(context) if context.config.placement.moves else ()


CHECKS = (Check("moves", "training", "machine", _moves, needs=("form",), after="the engine's server"),)
PLUGIN = Plugin(
    "moves",
    needs=("autobatch", "memory_estimate", "planning", "virtual"),
    adds={
        "check": {"moves": f"{__name__}:CHECKS"},
        "pipeline": {"start": f"{__name__}.start:planned", "move_rules": f"{__name__}.rules:move_rules"},
        "observer": {"moves": f"{__name__}.hooks:HOOKS"},
        "scheduler": {"moves": f"{__name__}.conductor:MovingConductor"},
    },
)
