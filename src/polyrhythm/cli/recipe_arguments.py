"""The arguments RECIPE and section.key=value, shared by all commands that take a recipe."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from polyrhythm.config.recipes import recipe_names
from polyrhythm.errors import ConfigError, PolyrhythmError, RunDistrusted, RunFolderError
from polyrhythm.observe.run_folder import CONFIG_FILE

#: Overrides applied before the user's: a recipe without demonstrations or supervised training gets their defaults.
IMITATION = ("demonstrations={}", "supervised={}")


def add_recipe(parser: argparse.ArgumentParser, options: str) -> None:
    """Add `recipe` and `overrides`; `options`: the command's own options in the usage line."""
    parser.usage = f"%(prog)s [-h] {options} recipe [section.key=value ...]"
    parser.add_argument("recipe", help=f"one of {', '.join(recipe_names())}; or the path of a YAML file")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="section.key=value", help="settings that differ from the recipe"
    )


@contextmanager
def note_resume_command(folder: Path) -> Iterator[None]:
    """Add the command that resumes the run to an exception of this block.

    Not if resuming would only raise it again: the folder or the settings are refused, the run is distrusted, or it
    has not begun.
    """
    try:
        yield
    except (RunFolderError, ConfigError, RunDistrusted):
        raise
    except (KeyboardInterrupt, PolyrhythmError, OSError) as error:
        if (folder / CONFIG_FILE).is_file():
            error.add_note(f"to resume: polyrhythm resume {shlex.quote(str(folder))}")
        raise
