"""Copy an example into a new folder, to be changed there; without FOLDER, list the examples.

polyrhythm new mine              an environment of one's own with its recipe (own_env)
polyrhythm new mine own_policy   another example
"""

from __future__ import annotations

import argparse
from pathlib import Path

from polyrhythm.cli.show import aligned

_DEFAULT = "own_env"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", nargs="?", type=Path, metavar="FOLDER", help="the new folder")
    parser.add_argument("example", nargs="?", default=_DEFAULT, help=f"the example to copy (default: {_DEFAULT})")


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
        raise ConfigError(f"example = {arguments.example}: no such example; {near}examples are {', '.join(examples)}")
    source = examples[arguments.example]
    take_folder(arguments.folder)
    # A recipe that extends another example's recipe needs its files too; they are copied into the same folder.
    needed = [other for name, other in examples.items() if any(f"../{name}/" in text for text in _recipes(source))]
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


def _recipes(folder: Path) -> list[str]:
    return [(folder / name).read_text(encoding="utf-8") for name in _files(folder) if name.endswith(".yaml")]


def _files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_file())
