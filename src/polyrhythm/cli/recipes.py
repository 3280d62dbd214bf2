"""List the shipped recipes, each with its purpose; with NAME, print that recipe.

`polyrhythm settings` explains what a recipe may set, `polyrhythm new FOLDER` copies an example to change.
"""

from __future__ import annotations

import argparse
import re
from itertools import takewhile

from polyrhythm.cli.show import aligned


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="print this recipe")


def run(arguments: argparse.Namespace) -> int:
    from polyrhythm.config.recipes import find_recipe, recipe_names

    if arguments.name:
        print(find_recipe(arguments.name).read_text(encoding="utf-8"), end="")
        return 0
    print(aligned((name, _purpose(find_recipe(name).read_text(encoding="utf-8"))) for name in recipe_names()))
    return 0


def _purpose(text: str) -> str:
    """First sentence of the comment at the top, up to its colon."""
    comment = " ".join(line.removeprefix("#").strip() for line in takewhile(lambda x: x[:1] == "#", text.splitlines()))
    return re.split(r": |\. |\.$| \(", comment, maxsplit=1)[0]
