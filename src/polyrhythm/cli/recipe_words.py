"""RECIPE and section.key=value, as all commands that take a recipe have them."""

from __future__ import annotations

import argparse

from polyrhythm.config.recipes import recipe_names

#: Laid under the user's overrides: a recipe without demonstrations or supervised training gets their defaults.
IMITATION = ("demonstrations={}", "supervised={}")


def add_recipe(parser: argparse.ArgumentParser, options: str) -> None:
    """Add `recipe` and `overrides`; `options` is how the usage line shows the command's own."""
    parser.usage = f"%(prog)s [-h] {options} recipe [section.key=value ...]"
    parser.add_argument("recipe", help=f"one of {', '.join(recipe_names())}; or the path of a YAML file")
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="settings that differ from the recipe"
    )
