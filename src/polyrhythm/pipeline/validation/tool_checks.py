"""Checks that the calls of the Python tool fit the time that supervision gives a step."""

from __future__ import annotations

import math
from collections.abc import Sequence

from polyrhythm.config.schema import RunConfig
from polyrhythm.errors import ConfigError
from polyrhythm.plugins.language.sandbox.tool import SandboxSettings
from polyrhythm.scheduler.records import EnvBatchInfo


def check_calls(config: RunConfig, infos: Sequence[Sequence[EnvBatchInfo]]) -> None:
    """Raise ConfigError if a simulator would be ended for calls that all take the time they have: those of all its rows
    may begin together, `at_a_time` run, and a step has ended when its own has. Inline, nothing is ended."""
    sandbox = getattr(config.env, "sandbox", None)
    if not isinstance(sandbox, SandboxSettings) or getattr(config.env, "tool", "python") != "python":
        return
    rows = max((sum(slot.rows for info in own for slot in info.slots) for own in infos), default=0)
    longest, limit = math.ceil(rows / sandbox.at_a_time) * sandbox.wall_s, config.supervision.step_s
    if config.launcher == "inline" or longest < limit:
        return
    fit = math.ceil(limit / sandbox.wall_s) - 1  # calls, one after another, that take less than the limit
    other = f"supervision.step_s to {longest + 1:g} or more"
    if fit > 0:
        fitting = f"env.sandbox.at_a_time to {math.ceil(rows / fit)}, or the rows of a simulator to "
        other = f"{fitting}{fit * sandbox.at_a_time}, or {other}"
    raise ConfigError(
        f"env.sandbox.wall_s = {sandbox.wall_s:g}: the calls of a simulator's {rows} rows, {sandbox.at_a_time} at a "
        f"time, may take {longest:g} s, but supervision.step_s = {limit:g} ends a simulator whose step takes longer; "
        f"set {other}"
    )
