"""Stations that compute on one device at the same time: under NVIDIA's MPS, or in one process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polyrhythm.checks import Check
from polyrhythm.errors import ConfigError
from polyrhythm.plugin import Plugin

if TYPE_CHECKING:
    from polyrhythm.checks import CheckContext


def _check(context: CheckContext) -> str | None:
    config = context.config
    sharing, what = config.placement.sharing, f"placement.sharing = {config.placement.sharing}"
    if sharing not in ("mps", "process"):
        return None
    if config.launcher != "local":
        raise ConfigError(
            f"{what}: with launcher = {config.launcher} the run does not start its stations' processes here; set "
            "launcher to local, or sharing to share"
        )
    if sharing == "process":
        if config.batching.type == "streams":
            raise ConfigError(f"{what}: a generator of streams keeps its process busy; set sharing to share or mps")
        return None
    from polyrhythm.plugins.sharing.mps import find_program

    return find_program()


CHECKS = (Check("shared devices", "recipe", "machine", _check, after="devices"),)
PLUGIN = Plugin(
    "sharing",
    adds={
        "placement": {
            "mps": "polyrhythm.plugins.sharing.mps:share_seats",
            "process": "polyrhythm.plugins.sharing.streams:share_seats",
        },
        "check": {"shared devices": "polyrhythm.plugins.sharing:CHECKS"},
    },
)
