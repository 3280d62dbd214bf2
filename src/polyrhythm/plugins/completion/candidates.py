"""Words that can stand next on a command line.

Only the modules of arguments are imported, and those of settings where one is completed: neither torch nor numpy.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from polyrhythm.cli.main import command_parser, commands, split_command
from polyrhythm.config.recipes import recipe_names
from polyrhythm.config.registry import known_types
from polyrhythm.plugin import table


def candidates(words: Sequence[str]) -> list[str]:
    """What the last of the words after `polyrhythm` can become; nothing where it can be a file or any value."""
    *before, last = words
    return [one for one in _possible(before, last) if one.startswith(last) and one != last]


def _possible(before: Sequence[str], last: str) -> Sequence[str]:
    known = commands()
    if not before:
        return [*(name for name in known if " " not in name), "--help", "--version"]
    command, words = split_command(before)
    if command not in known:
        return []
    # `envs setup` is part of `envs`; `eval compare` is a command of its own.
    inner = [name.partition(" ")[2] for name in table("command") if name.startswith(f"{command} ") and "-" not in name]
    _, parser = command_parser(command)
    options, places = _options(parser), _places(parser)
    positional, waiting = _read(words, options)
    if waiting is not None:
        return _values_of(command, waiting)
    if last.startswith("-"):
        return list(options)
    if positional >= len(places) and not (places and places[-1].nargs in ("*", "+")):
        return []
    return [*inner * (positional == 0), *_values_of(command, places[min(positional, len(places) - 1)], last)]


def _options(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    return {name: action for action in parser._actions for name in action.option_strings}


def _places(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [action for action in parser._actions if not action.option_strings]


def _read(words: Sequence[str], options: dict[str, argparse.Action]) -> tuple[int, argparse.Action | None]:
    """Number of positional words, and the option that waits for its value, if the last one does."""
    positional, waiting = 0, None
    for word in words:
        if waiting is not None:
            waiting = None
        elif word.startswith("-"):
            action = options.get(word.partition("=")[0])
            waiting = action if action is not None and action.nargs != 0 and "=" not in word else None
        else:
            positional += 1
    return positional, waiting


#: Command and argument → kind of adapter whose types are its values.
_ADAPTERS: dict[tuple[str, str], Literal["env", "policy"]] = {
    ("envs", "type"): "env",
    ("doctor", "env"): "env",
    ("join", "env"): "env",
    ("policies", "type"): "policy",
}


def _values_of(command: str, action: argparse.Action, last: str = "") -> Sequence[str]:
    if action.choices:
        return [str(choice) for choice in action.choices]
    if action.dest == "recipe" or (command, action.dest) == ("recipes", "name"):
        return recipe_names()
    if (command, action.dest) in _ADAPTERS:
        return list(known_types(_ADAPTERS[command, action.dest]))
    if action.metavar == "section.key=value":
        return list(_next_parts(last, _settings()))
    if (command, action.dest) == ("settings", "section"):
        return sorted(_settings())
    if (command, action.dest) == ("new", "example"):
        from polyrhythm.config.recipes import examples_folder

        return sorted(path.name for path in examples_folder().iterdir() if path.is_dir())
    return []


def _next_parts(last: str, settings: dict[str, set[str]]) -> Iterator[str]:
    """One part of the path further: `training.` from `tr`, `training.epochs=` from `training.ep`; then values."""
    path, given, _ = last.partition("=")
    if given:
        yield from (f"{path}={value}" for value in sorted(settings.get(path, ())))
        return
    depth = last.count(".")
    for part in sorted({".".join(path.split(".")[: depth + 1]) for path in settings if path.startswith(last)}):
        if any(path.startswith(f"{part}.") for path in settings):
            yield f"{part}."
        if part in settings and (settings[part] or not any(path.startswith(f"{part}.") for path in settings)):
            yield f"{part}="


def _settings() -> dict[str, set[str]]:
    """Path of each setting → its values, where these have names."""
    from polyrhythm.config.presets import PRESETS
    from polyrhythm.config.schema import RunConfig

    found: dict[str, set[str]] = {"preset": set(PRESETS)}
    _collect(RunConfig, "", found)
    kinds: tuple[Literal["env", "policy"], ...] = ("env", "policy")
    for kind in kinds:
        found[kind] = found[f"{kind}.type"] = set(known_types(kind))
    found["tracking"] = set(known_types("tracking"))
    return found


def _collect(model: type[BaseModel], prefix: str, found: dict[str, set[str]]) -> None:
    from polyrhythm.config.base import models_in

    for name, field in model.model_fields.items():
        values = found.setdefault(prefix + name, set())
        sections = models_in(field.annotation)
        values.update(_names(field.annotation))
        if get_origin(field.annotation) not in (tuple, list):
            for section in sections:
                _collect(section, f"{prefix}{name}.", found)
        if f"{prefix}{name}.type" in found:
            values.update(found[f"{prefix}{name}.type"])


def _names(annotation: Any) -> Iterator[str]:
    """The values of a type that has names for them, such as a Literal."""
    if get_origin(annotation) is Literal:
        yield from map(str, get_args(annotation))
    elif annotation is bool:
        yield from ("false", "true")
    elif annotation is type(None):
        yield "null"
    elif not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        for part in get_args(annotation):
            yield from _names(part)
