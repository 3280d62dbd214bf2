"""Registers the plugin: language models as policies, text environments, conversations and the Python tool."""

from polyrhythm.plugin import Plugin

PLUGIN = Plugin(
    "language",
    needs=("pretrained",),
    adds={
        "env": {
            "chains": "polyrhythm.plugins.language.text.chains:ChainsSettings",
            "frozen_lake": "polyrhythm.plugins.language.text.frozen_lake:FrozenLakeSettings",
            "sokoban": "polyrhythm.plugins.language.text.sokoban:SokobanSettings",
            "prompts": "polyrhythm.plugins.language.text.prompts:PromptsSettings",
            "verifiers": "polyrhythm.plugins.language.text.verifiers_tasks:VerifiersSettings",
            "gem": "polyrhythm.plugins.language.text.gem_env:GemSettings",
            "reasoning_gym": "polyrhythm.plugins.language.text.reasoning_gym_tasks:ReasoningGymSettings",
        },
        "observer": {
            "conversations": "polyrhythm.plugins.language.conversations:HOOKS",
        },
        "policy": {
            "causal_lm": "polyrhythm.plugins.language.causal_lm.settings:CausalLmSettings",
        },
    },
)
