"""Tries environment, policy and objective against their contracts, before a run and for `polyrhythm check`."""

from collections.abc import Callable
from importlib import import_module

from polyrhythm.checks import Check, CheckContext, Result
from polyrhythm.plugin import Plugin


def _row(name: str) -> Callable[[CheckContext], Result]:
    """Function of the module `rows`, imported on use."""

    def run(context: CheckContext) -> Result:
        result: Result = getattr(import_module("polyrhythm.plugins.trial.rows"), name)(context)
        return result

    return run


CHECKS = (
    Check("spec", "environment", "machine", _row("read_spec"), after="spec"),
    Check("environment", "environment", "trial", _row("try_environment"), after="environment's trial"),
    Check("policy", "policy", "trial", _row("try_policy"), after="policy's trial"),
    Check("objective", "training", "machine", _row("try_objective"), after="custom objective"),
    Check(
        "environment's contract",
        "environment",
        "trial",
        _row("contract_of_environment"),
        needs=("spec",),
        after="policy's build",
    ),
    Check(
        "policy's contract", "policy", "trial", _row("contract_of_policy"), needs=("policy",), after="policy's build"
    ),
)
PLUGIN = Plugin(
    "trial",
    adds={
        "check": {"trial": "polyrhythm.plugins.trial:CHECKS"},
        "command": {"check": "polyrhythm.plugins.trial.command"},
    },
    purposes={"check": "check a recipe, its environment and its policy, without training"},
)
