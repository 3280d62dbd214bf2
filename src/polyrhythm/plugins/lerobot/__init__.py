"""LeRobot's layouts and policies: demonstrations as LeRobotDataset v3.0, and policies in a process of their own."""

from polyrhythm.plugin import Plugin

PLUGIN = Plugin(
    "lerobot",
    needs=("demonstrations", "pretrained", "simulators", "vla"),
    adds={
        "demonstrations": {"lerobot": "polyrhythm.plugins.lerobot.reading"},
        "command": {"demos": "polyrhythm.plugins.lerobot.demos"},
        "policy": {
            "lerobot": "polyrhythm.plugins.lerobot.policies.settings:LerobotSettings",
            "lerobot_flow": "polyrhythm.plugins.lerobot.policies.flow:LerobotFlowSettings",
        },
        "check": {"lerobot": "polyrhythm.plugins.lerobot.policies.checks:CHECKS"},
    },
    purposes={"demos": "record demonstrations of the environment's expert"},
)
