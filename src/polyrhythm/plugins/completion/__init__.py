"""Completion of the command line in bash, zsh and fish."""

from polyrhythm.plugin import Plugin

PLUGIN = Plugin(
    "completion",
    adds={"command": {"completion": "polyrhythm.plugins.completion.command"}},
    purposes={"completion": "print the script that completes commands in bash, zsh or fish"},
)
