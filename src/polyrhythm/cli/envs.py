"""List the environments and the packages that each needs; with TYPE: its settings, their defaults and meaning.

`polyrhythm envs setup NAME` makes a Python of its own for the environments of an extra, for `env.python = NAME`.
"""

from __future__ import annotations

import argparse

from polyrhythm.cli import adapters
from polyrhythm.plugin import load, table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    adapters.add_type(parser)
    for name in _subcommands().values():
        load("command", name).add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    subcommands = _subcommands()
    if arguments.type in subcommands:
        status: int = load("command", subcommands[arguments.type]).run(arguments)
        return status
    for name in subcommands.values():
        load("command", name).refuse_without(arguments)
    return adapters.show("env", arguments)


def _subcommands() -> dict[str, str]:
    """Word after `envs` → name of the plugin command."""
    return {name.partition(" ")[2]: name for name in table("command") if name.startswith("envs ")}
