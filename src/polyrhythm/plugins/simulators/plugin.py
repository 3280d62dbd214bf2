"""Registers adapters of simulators, and environments in a Python of their own."""

from polyrhythm.plugin import Plugin

PLUGIN = Plugin(
    "simulators",
    adds={
        "command": {"envs setup": "polyrhythm.plugins.simulators.setup"},
        "env_key": {"python": "polyrhythm.plugins.simulators.separate.settings:SeparateSettings"},
        "env": {
            "metaworld": "polyrhythm.plugins.simulators.metaworld.env:MetaWorldSettings",
            "maniskill": "polyrhythm.plugins.simulators.maniskill.settings:ManiSkillSettings",
            "robosuite": "polyrhythm.plugins.simulators.robosuite.env:RobosuiteSettings",
            "libero": "polyrhythm.plugins.simulators.libero.env:LiberoSettings",
        },
    },
)
