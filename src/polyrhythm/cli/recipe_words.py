"""RECIPE and section.key=value, as all commands that take a recipe have them."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from polyrhythm.config.recipes import recipe_names
from polyrhythm.errors import ConfigError, PolyrhythmError, RunDistrusted, RunFolderError

#: Laid under the user's overrides: a recipe without demonstrations or supervised training gets their defaults.
IMITATION = ("demonstrations={}", "supervised={}")


def add_recipe(parser: argparse.ArgumentParser, options: str) -> None:
    """Add `recipe` and `overrides`; `options` is how the usage line shows the command's own."""
    parser.usage = f"%(prog)s [-h] {options} recipe [section.key=value ...]"
    parser.add_argument("recipe", help=f"one of {', '.join(recipe_names())}; or the path of a YAML file")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="section.key=value", help="settings that differ from the recipe"
    )


@contextmanager
def noting_how_to_go_on(folder: Path) -> Iterator[None]:
    """Whatever ends this block early tells, below its own message, the words that go on in the run's folder.

    Not where they would only lead to the same message: the folder or the settings are refused, the run has broken a
    promise, or it has not even begun.
    """
    try:
        yield
    except (RunFolderError, ConfigError, RunDistrusted):
        raise
    except (KeyboardInterrupt, PolyrhythmError, OSError) as error:
        if (folder / "config.yaml").is_file():
            error.add_note(f"to go on: polyrhythm resume {shlex.quote(str(folder))}")
        raise
