"""Settings given from Python as objects: their plain data, and the address at which every station finds their class.

A run's stations are built of plain data, in this process or in others, and a checkpoint holds nothing else; so a class
of the user's own is known by module:Class, also in a script or a notebook, where the module is `__main__`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import FunctionType
from typing import Any

from pydantic import BaseModel

from polyrhythm.config.registry import TABLE, Kind
from polyrhythm.errors import ConfigError

#: The module of a script, or of a notebook's cells: no other process can import it.
MAIN = "__main__"


def plain(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe, or part of one, with every settings object and function in it as what YAML would say.

    What `env` and `policy` are given as mappings is their own affair.
    """
    return {
        key: value if key in TABLE and isinstance(value, Mapping) else _plain(value, key)
        for key, value in recipe.items()
    }


def in_main(tree: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Where in plain data something of the calling script is named: dotted path, and address."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from in_main(value, f"{path}.{key}" if path else str(key))
    elif isinstance(tree, str) and tree.startswith(f"{MAIN}:"):
        yield path, tree


def _plain(value: Any, path: str) -> Any:
    if isinstance(value, BaseModel):
        content = value.model_dump(mode="json")
        return {**content, "type": _type(path, value)} if path in TABLE else content
    if isinstance(value, FunctionType):
        return _address(value, path)
    if isinstance(value, Mapping):
        return {key: _plain(part, f"{path}.{key}") for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part, path) for part in value]
    return value


def _type(kind: Kind, settings: BaseModel) -> str:
    """What `type` must say so that this very class is found. ConfigError: it cannot."""
    said, found = str(getattr(settings, "type", "")), type(settings)
    own = f"{found.__module__}:{found.__qualname__}"
    if TABLE[kind].get(said, said) == own:
        return said
    address = _address(found, kind)
    field = found.model_fields.get("type")
    if field is None or field.annotation is not str:
        raise ConfigError(
            f"{kind}.type = {said or 'missing'}: it does not lead to the class {found.__qualname__}; declare it there "
            f'as type: str = "{address}"'
        )
    return address


def _address(thing: type | FunctionType, path: str) -> str:
    """module:name of a class or function. ConfigError: it has none, as it is made inside a function."""
    if "<" in thing.__qualname__:
        raise ConfigError(
            f"{path} = {thing.__qualname__}: what is defined inside a function, or is a lambda, cannot be found by "
            "name; define it at the top of the file or cell"
        )
    return f"{thing.__module__}:{thing.__qualname__}"
