"""Tries environment, policy and objective against their contracts, before a run and for `polyrhythm check`."""

from polyrhythm.checks import Check, CheckContext, Cost, Result
from polyrhythm.plugin import Plugin, import_address


def _row(name: str, part: str, cost: Cost, after: str, function: str, *needs: str, until: Cost | None = None) -> Check:
    """A row that runs a `module:function` of this package, which is imported on use."""

    def run(context: CheckContext) -> Result:
        result: Result = import_address(f"{__name__}.{function}")(context)
        return result

    return Check(name, part, cost, run, needs, until, after)


CHECKS = (
    _row("placement", "recipe", "settings", "devices", "rows:seat_warnings", until="trial"),
    _row("placement", "recipe", "contract", "devices", "rows:seat_warnings"),
    _row("notes", "recipe", "settings", "devices", "rows:settings_notes"),
    # what is declared, for `train --check`
    _row("spec", "environment", "machine", "spec", "rows:set_spec"),
    _row("environment", "environment", "machine", "environment's spec", "rows:check_environment", until="trial"),
    _row("policy", "policy", "machine", "policy's form", "rows:check_policy", "spec", until="trial"),
    _row("objective", "training", "machine", "objective", "rows:check_objective", "form", until="trial"),
    _row("updates", "training", "machine", "objective", "rows:describe_updates", "form", until="trial"),
    _row("first weights", "training", "machine", "objective", "rows:check_first_weights", "form", until="trial"),
    _row(
        "files and threads",
        "machine",
        "machine",
        "objective",
        "rows:check_files",
        "form",
        until="trial",
    ),
    _row("shared memory", "machine", "machine", "objective", "rows:check_shared_memory", "form", until="trial"),
    # what works, before a run
    _row("first rows", "environment", "trial", "environment's trial", "rows:try_environment", until="contract"),
    _row("policy's trial", "policy", "trial", "policy's build", "rows:try_policy", until="contract"),
    _row("custom objective", "training", "machine", "custom objective", "rows:try_objective"),
    # what is promised, for `check`
    _row("environment's contract", "environment", "contract", "policy's build", "rows:contract_of_environment", "spec"),
    _row("policy's contract", "policy", "contract", "policy's build", "rows:contract_of_policy", "policy"),
    _row("updates", "training", "contract", "the engine's server", "rows:describe_updates", "tried"),
    _row("observations", "training", "contract", "the engine's server", "rows:describe_scale", "tried"),
)
PLUGIN = Plugin(
    "trial",
    adds={
        "check": {"trial": "polyrhythm.plugins.trial:CHECKS"},
        "command": {"check": "polyrhythm.plugins.trial.command"},
    },
    purposes={"check": "check a recipe, its environment and its policy, without training"},
)
