"""Arguments shared by commands: RECIPE, section.key=value, and numbers with error messages for argparse."""

from __future__ import annotations

import argparse
import json
import math
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from polyrhythm.config.recipes import recipe_names
from polyrhythm.errors import ConfigError, PolyrhythmError, RunDistrusted, RunFolderError
from polyrhythm.observe.run_folder import CONFIG_FILE


def add_recipe(parser: argparse.ArgumentParser, options: str) -> None:
    """Add `recipe` and `overrides`; `options`: the command's own options in the usage line."""
    parser.usage = f"%(prog)s [-h] {options} recipe [section.key=value ...]"
    parser.add_argument("recipe", help=f"one of {', '.join(recipe_names())}; or the path of a YAML file")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="section.key=value", help="settings that differ from the recipe"
    )


def add_cluster(parser: argparse.ArgumentParser, what: str) -> None:
    """Add --cluster; what: the option that it belongs to, "" for the command itself."""
    help_ = f"{what}for the cluster that FILE describes (docs/clusters.md), which need not run"
    parser.add_argument("--cluster", metavar="FILE", help=help_)


def cluster_settings(file: str | None) -> list[str]:
    """The settings of a check or plan for the cluster that this file describes. ConfigError: its name is not one."""
    from polyrhythm.config.sections.running import is_description

    if file is None:
        return []
    if not is_description(file):
        raise ConfigError(f"--cluster = {file}: not a file that describes a cluster; name one that ends in .yaml")
    return ["launcher=ray", f"ray.address={json.dumps(file)}"]


@contextmanager
def note_resume_command(folder: Path) -> Iterator[None]:
    """Add the command that resumes the run to an exception of this block.

    Not if resuming would raise it again: a refused folder or refused settings, a distrusted run, or one that has not
    begun.
    """
    try:
        yield
    except (RunFolderError, ConfigError, RunDistrusted):
        raise
    except (KeyboardInterrupt, PolyrhythmError, OSError) as error:
        if (folder / CONFIG_FILE).is_file():
            error.add_note(f"to resume: polyrhythm resume {shlex.quote(str(folder))}")
        raise


def whole(text: str) -> int:
    """0 or more."""
    return _at_least(0, text)


def count(text: str) -> int:
    """1 or more."""
    return _at_least(1, text)


def _at_least(least: int, text: str) -> int:
    if not text.strip().isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of {least} or more")
    return int(text)


def positive(text: str) -> float:
    """A finite number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number
