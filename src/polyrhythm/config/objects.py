"""Converts settings objects from Python to plain data.

Stations and checkpoints hold plain data only, so a user's class is referenced by module:Class; in a script or notebook
the module is `__main__`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from types import FunctionType
from typing import Any

from pydantic import BaseModel

from polyrhythm.config.registry import CORE, Kind, known_types
from polyrhythm.errors import ConfigError

#: Module of a script or notebook, which no other process can import.
MAIN = "__main__"


def plain(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Convert settings objects and functions of a recipe, or part of one, to the data of its YAML form.

    `env` and `policy` given as mappings are left unchanged.
    """
    return {
        key: value if key in CORE and isinstance(value, Mapping) else _plain(value, key)
        for key, value in recipe.items()
    }


def in_main(tree: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Dotted path and address of each reference to `__main__` in plain data: module:name, or the id of a Gymnasium
    environment that is registered there."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from in_main(value, f"{path}.{key}" if path else str(key))
    elif isinstance(tree, list):
        for place, value in enumerate(tree):
            yield from in_main(value, f"{path}.{place}")
    elif isinstance(tree, str) and (tree.startswith(f"{MAIN}:") or _registered_in_main(tree)):
        yield path, tree


def _registered_in_main(env_id: str) -> bool:
    gymnasium = sys.modules.get("gymnasium")
    spec = gymnasium.registry.get(env_id) if gymnasium else None
    entry: Any = getattr(spec, "entry_point", None)
    return getattr(entry, "__module__", "") == MAIN or f"{entry}".startswith(f"{MAIN}:")


def _plain(value: Any, path: str) -> Any:
    if isinstance(value, BaseModel):
        content = value.model_dump(mode="json")
        return {**content, "type": _type(path, value)} if path in CORE else content
    if isinstance(value, FunctionType):
        return _address(value, path)
    if isinstance(value, Mapping):
        return {key: _plain(part, f"{path}.{key}") for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part, path) for part in value]
    return value


def _type(kind: Kind, settings: BaseModel) -> str:
    """The `type` by which the settings' class is found. ConfigError: there is none."""
    declared, found = str(getattr(settings, "type", "")), type(settings)
    own = f"{found.__module__}:{found.__qualname__}"
    if known_types(kind).get(declared, declared) == own:
        return declared
    address = _address(found, kind)
    field = found.model_fields.get("type")
    if field is None or field.annotation is not str:
        raise ConfigError(
            f"{kind}.type = {declared or 'missing'}: it does not name the class {found.__qualname__}; declare it there "
            f'as type: str = "{address}"'
        )
    return address


def _address(thing: type | FunctionType, path: str) -> str:
    """module:name of a class or function. ConfigError: it is defined inside a function."""
    if "<" in thing.__qualname__:
        raise ConfigError(
            f"{path} = {thing.__qualname__}: a lambda, or what is defined inside a function, cannot be found by "
            "name; define it at the top of the file or cell"
        )
    return f"{thing.__module__}:{thing.__qualname__}"
