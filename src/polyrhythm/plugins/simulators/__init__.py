"""Simulator adapters: Meta-World, ManiSkill, robosuite, LIBERO; environments in a Python of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from polyrhythm.checks import Check
from polyrhythm.plugin import Plugin

if TYPE_CHECKING:
    from polyrhythm.conformance import Finding


def _rendering(_: object) -> Iterator[Finding]:
    from polyrhythm.plugins.simulators.metaworld.env import findings

    return findings()


CHECKS = (Check("rendering", "machine", "machine", _rendering, after="doctor"),)
PLUGIN = Plugin(
    "simulators",
    adds={
        "check": {"rendering": "polyrhythm.plugins.simulators:CHECKS"},
        "command": {"envs setup": "polyrhythm.plugins.simulators.setup"},
        "env_key": {"python": "polyrhythm.plugins.simulators.separate.settings:SeparateSettings"},
        "env": {
            "metaworld": "polyrhythm.plugins.simulators.metaworld.env:MetaWorldSettings",
            "maniskill": "polyrhythm.plugins.simulators.maniskill.env:ManiSkillSettings",
            "robosuite": "polyrhythm.plugins.simulators.robosuite.env:RobosuiteSettings",
            "libero": "polyrhythm.plugins.simulators.libero.env:LiberoSettings",
        },
    },
)
