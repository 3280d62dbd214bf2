"""List the environments and the packages that each needs; with TYPE: its settings, their defaults and meaning.

`polyrhythm envs setup NAME` makes a Python of its own for the environments of an extra, for `env.python = NAME`.
"""

from __future__ import annotations

import argparse

from polyrhythm.cli import adapters
from polyrhythm.errors import ConfigError

_SETUP = "setup"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    adapters.add_type(parser)
    parser.add_argument("name", nargs="?", metavar="NAME", help="with setup: the extra, which names the Python too")
    parser.add_argument("--interpreter", metavar="PATH", help="with setup: the Python to make it from (default: this)")
    parser.add_argument(
        "--with", dest="more", action="append", default=[], metavar="REQUIREMENT", help="with setup: install this too"
    )


def run(arguments: argparse.Namespace) -> int:
    if arguments.type != _SETUP:
        if arguments.name or arguments.interpreter or arguments.more:
            raise ConfigError("NAME, --interpreter and --with belong to polyrhythm envs setup NAME")
        return adapters.show("env", arguments)
    if not arguments.name:
        raise ConfigError("envs setup: for which environment? polyrhythm envs setup NAME")
    from polyrhythm.plugins.simulators.separate.settings import envs_folder
    from polyrhythm.plugins.simulators.setup import default_python, set_up

    made = set_up(arguments.name, envs_folder(), arguments.interpreter or default_python(), arguments.more)
    print(f"ready: {made}\nuse it by env.python={arguments.name}")
    return 0
