"""Shared parts of the published VLA policies: inputs, checkpoints, precision, and a policy over any flow network."""

from polyrhythm.plugin import Plugin

PLUGIN = Plugin(
    "vla",
    needs=("pretrained",),
    adds={
        "policy": {
            "pi0": "polyrhythm.plugins.vla.pi0.settings:Pi0Settings",
            "pi05": "polyrhythm.plugins.vla.pi0.settings:Pi05Settings",
            "groot_n1d5": "polyrhythm.plugins.vla.groot_n1d5.network:GrootSettings",
            "openvla_oft": "polyrhythm.plugins.vla.openvla_oft.policy:OpenVlaOftSettings",
        },
    },
)
