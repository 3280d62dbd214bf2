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
    if config.placement.sharing != "mps":
        return None
    if config.launcher != "local":
        raise ConfigError(
            f"placement.sharing = mps: with launcher = {config.launcher} the run cannot start the control daemon where "
            "its stations are; set launcher to local, or start the daemon yourself and set sharing to share"
        )
    from polyrhythm.plugins.sharing.mps import find_program

    return find_program()


CHECKS = (Check("NVIDIA MPS", "machine", "machine", _check, after="devices"),)
PLUGIN = Plugin(
    "sharing",
    adds={
        "placement": {"mps": "polyrhythm.plugins.sharing.mps:share_seats"},
        "check": {"NVIDIA MPS": "polyrhythm.plugins.sharing:CHECKS"},
    },
)
