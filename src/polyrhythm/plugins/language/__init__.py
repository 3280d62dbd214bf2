"""Language models as policies, text environments, conversations and the Python tool."""

import math

from polyrhythm.checks import Check, CheckContext
from polyrhythm.errors import ConfigError
from polyrhythm.plugin import Plugin


def check_calls(context: CheckContext) -> tuple[()]:
    """Raise ConfigError if `supervision.step_s` may end a simulator whose Python calls all stay within their own time
    limit: one step may start a call per row, of which only `at_a_time` run at once. Inline simulators are never ended.
    """
    config, sandbox = context.config, getattr(context.config.env, "sandbox", None)
    if sandbox is None or getattr(config.env, "tool", "python") != "python":
        return ()
    from polyrhythm.pipeline.array_specs import env_batch_infos

    infos = env_batch_infos(config, context.spec)
    rows = max((sum(slot.rows for info in own for slot in info.slots) for own in infos), default=0)
    longest, limit = math.ceil(rows / sandbox.at_a_time) * sandbox.wall_s, config.supervision.step_s
    if config.launcher == "inline" or longest < limit:
        return ()
    fit = math.ceil(limit / sandbox.wall_s) - 1  # consecutive calls that take less than the limit
    other = f"supervision.step_s to {longest + 1:g} or more"
    if fit > 0:
        fitting = f"env.sandbox.at_a_time to {math.ceil(rows / fit)}, or the rows of a simulator to "
        other = f"{fitting}{fit * sandbox.at_a_time}, or {other}"
    raise ConfigError(
        f"env.sandbox.wall_s = {sandbox.wall_s:g}: the calls of a simulator's {rows} rows, {sandbox.at_a_time} at a "
        f"time, may take {longest:g} s, but supervision.step_s = {limit:g} ends a simulator whose step takes longer; "
        f"set {other}"
    )


CHECKS = (
    Check("calls of the Python tool", "recipe", "machine", check_calls, needs=("spec",), after="rows and batches"),
)
PLUGIN = Plugin(
    "language",
    needs=("pretrained", "report"),
    adds={
        "check": {
            "calls of the Python tool": "polyrhythm.plugins.language:CHECKS",
        },
        "env": {
            "chains": "polyrhythm.plugins.language.text.chains:ChainsSettings",
            "frozen_lake": "polyrhythm.plugins.language.text.grids:FrozenLakeSettings",
            "sokoban": "polyrhythm.plugins.language.text.grids:SokobanSettings",
            "prompts": "polyrhythm.plugins.language.text.prompts:PromptsSettings",
            "verifiers": "polyrhythm.plugins.language.text.verifiers_tasks:VerifiersSettings",
            "gem": "polyrhythm.plugins.language.text.gyms:GemSettings",
            "reasoning_gym": "polyrhythm.plugins.language.text.gyms:ReasoningGymSettings",
        },
        "report": {
            "conversations": "polyrhythm.plugins.language.report_section:SECTION",
        },
        "observer": {
            "conversations": "polyrhythm.plugins.language.conversations:HOOKS",
        },
        "policy": {
            "causal_lm": "polyrhythm.plugins.language.causal_lm.policy:CausalLmSettings",
        },
    },
)
