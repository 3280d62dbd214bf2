"""The commands `explain`, `recipes`, `settings` and `new`; the docstring of each is its help."""

from __future__ import annotations

import argparse
import json
import re
import textwrap
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from polyrhythm.cli.show import aligned

if TYPE_CHECKING:
    from polyrhythm.config.catalog import Setting

_DEFAULT = "own_env"


class Recipes:
    """List the shipped recipes, each with its purpose; with NAME, print that recipe.

    `polyrhythm settings` explains what a recipe may set, `polyrhythm new FOLDER` copies an example to change.
    """

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("name", nargs="?", metavar="NAME", help="print this recipe")

    @staticmethod
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


class Settings:
    """List the settings of a recipe with their defaults and meaning: all sections, or one, such as training.optimizer.

    A setting that comes from a paper has its sentence there.

    The settings of environments and policies depend on their type: `polyrhythm envs TYPE` and `polyrhythm policies
    TYPE`.
    """

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        help_ = "a section or setting, such as freshness.max_lag"
        parser.add_argument("section", nargs="?", metavar="SECTION", help=help_)
        parser.add_argument("--json", action="store_true", help="print them as JSON")

    @staticmethod
    def run(arguments: argparse.Namespace) -> int:
        from polyrhythm.cli.adapters import setting_lines
        from polyrhythm.config.catalog import settings_of
        from polyrhythm.config.schema import RunConfig
        from polyrhythm.plugins.listing.papers import realised_by

        top = [setting for setting in settings_of(RunConfig) if "." not in setting.name and "[" not in setting.name]
        found = _find(arguments.section) if arguments.section else top
        if arguments.json:
            print(json.dumps([setting._asdict() for setting in found], indent=2))
        else:
            print("\n".join(setting_lines(found)))
            for value, sentence in realised_by(arguments.section) if arguments.section else ():
                which = f"{value}: " if value else ""
                print(f"  {which}{sentence.paper}, {sentence.at}: {sentence.text}")
            if not arguments.section:
                print("\nthe settings of a section: polyrhythm settings SECTION")
        return 0


def _find(path: str) -> Sequence[Setting]:
    """Settings of the section at this dotted path, or the one setting."""
    from pydantic import BaseModel

    from polyrhythm.config.base import models_in
    from polyrhythm.config.catalog import settings_of, type_of
    from polyrhythm.config.explain import paths_to
    from polyrhythm.config.schema import RunConfig
    from polyrhythm.errors import ConfigError, nearest

    path = path.removesuffix(".type")  # types are listed with their section
    models: list[type[BaseModel]] = [RunConfig]
    for key in path.split("."):
        fields = [model.model_fields[key] for model in models if key in model.model_fields]
        if not fields:
            known = [name for model in models for name in model.model_fields]
            elsewhere = paths_to(key, RunConfig)
            raise ConfigError(
                f"settings {path}: no such setting; {nearest(key, known, elsewhere=elsewhere)}polyrhythm settings "
                "lists the sections"
            )
        parents, models = models, [found for field in fields for found in models_in(field.annotation)]
    if models and path.partition(".")[0] in ("env", "policy"):
        models = []
    types = [f"[{type_of(model)}]" if len(models) > 1 else "" for model in models]
    inner = [s for model, of in zip(models, types, strict=True) for s in settings_of(model, f"{path}{of}.")]
    own = [setting for model in parents for setting in settings_of(model) if setting.name == path.rpartition(".")[2]]
    return inner or [setting._replace(name=path) for setting in own]


class Explain:
    """Print cause and remedy of an error message's code, such as PR104; without CODE, list all codes.

    A message begins with its code: `polyrhythm: error: PR104: rollout.rows = 0: it must be at least 1`.
    """

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("code", nargs="?", metavar="CODE", help="the code of a message, or its number")

    @staticmethod
    def run(arguments: argparse.Namespace) -> int:
        from polyrhythm.error_codes import codes
        from polyrhythm.errors import ConfigError, nearest

        known = {one.code: one for one in codes()}
        if arguments.code is None:
            print(aligned((code, one.what) for code, one in sorted(known.items())))
            return 0
        found = known.get(f"PR{arguments.code.upper().removeprefix('PR')}")
        if found is None:
            near = nearest(arguments.code.upper(), known)
            raise ConfigError(f"explain {arguments.code}: no such code; {near}polyrhythm explain lists all")
        print(f"{found.code}: {found.what}")
        for name, text in (("message", found.message), ("cause", found.cause), ("remedy", found.remedy)):
            shown = re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", text)  # a link's text; its page may not be here
            print(textwrap.fill(shown, 100, initial_indent=f"{name:9}", subsequent_indent=" " * 9))
        return 0


class New:
    """Copy an example into a new folder, to be changed there; without FOLDER, list the examples.

    polyrhythm new mine              an environment of one's own with its recipe (own_env)
    polyrhythm new mine own_policy   another example
    """

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("folder", nargs="?", type=Path, metavar="FOLDER", help="the new folder")
        parser.add_argument("example", nargs="?", default=_DEFAULT, help=f"the example to copy (default: {_DEFAULT})")

    @staticmethod
    def run(arguments: argparse.Namespace) -> int:
        from polyrhythm.config.recipes import examples_folder
        from polyrhythm.errors import ConfigError, nearest
        from polyrhythm.observe.run_folder import take_folder

        examples = {path.name: path for path in sorted(examples_folder().iterdir()) if path.is_dir()}
        if arguments.folder is None:
            print(aligned((name, ", ".join(_files(path))) for name, path in examples.items()))
            return 0
        if arguments.example not in examples:
            near = nearest(arguments.example, examples)
            problem = f"no such example; {near}examples are {', '.join(examples)}"
            raise ConfigError(f"example = {arguments.example}: {problem}")
        source = examples[arguments.example]
        take_folder(arguments.folder)
        # A recipe that extends another example's recipe needs its files too; they are copied into the same folder.
        texts = [(source / name).read_text(encoding="utf-8") for name in _files(source) if name.endswith(".yaml")]
        needed = [other for name, other in examples.items() if any(f"../{name}/" in text for text in texts)]
        for folder in (*needed, source):
            for name in _files(folder):
                text = (folder / name).read_text(encoding="utf-8")
                for other in examples:
                    text = text.replace(f"../{other}/", "").replace(f"examples.{other}.", "")
                (arguments.folder / name).write_text(text, encoding="utf-8")
        recipes = [name for name in _files(source) if name.endswith(".yaml") and arguments.example.startswith("own_")]
        print(f"{arguments.folder}: {', '.join(_files(arguments.folder))}")
        if recipes:
            print(f"to train it: cd {arguments.folder} && polyrhythm train {recipes[0]}")
        return 0


def _files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_file())
