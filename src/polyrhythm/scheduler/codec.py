"""Codec: records and component states as plain JSON-able data, and back; that of a saved conductor is `state_codec`.

Encoded forms: a dataclass or a named tuple is
`{"$": "Name", field: …}`, any other tuple `{"()": […]}`, a dict `{"{}": [[k, v], …]}`, an
infinite float `{"f": "inf"}`; everything else is itself. Fields marked `metadata=UNSAVED` are supplied at decoding.

Invariant: the names of a codec's types are unique, as a record carries the name of its class alone.
"""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any

#: Marks a dataclass field that is configuration, not state: it is left out and given again at decoding.
UNSAVED: Mapping[str, bool] = {"unsaved": True}


class Codec:
    """Encodes instances of the given dataclasses, named tuples and enums."""

    def __init__(self, types: Iterable[type]) -> None:
        own = list(dict.fromkeys(types))
        twice = [name for name, count in Counter(kind.__name__ for kind in own).items() if count > 1]
        assert not twice, f"two classes of saved records have one name: {twice}"
        self._types = {kind.__name__: kind for kind in own}

    def extended(self, types: Iterable[type]) -> Codec:
        return Codec((*self._types.values(), *types))

    def encode(self, value: Any) -> Any:
        if isinstance(value, Enum):
            return {"e": [type(value).__name__, value.value]}
        if value is None or isinstance(value, bool | int | str):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else {"f": str(value)}
        if isinstance(value, tuple):
            return self._encode_tuple(value)
        if isinstance(value, deque):
            return {"deque": [self.encode(item) for item in value]}
        if isinstance(value, list):
            return [self.encode(item) for item in value]
        if isinstance(value, dict):
            return {"{}": [[self.encode(key), self.encode(item)] for key, item in value.items()]}
        if is_dataclass(value) and type(value).__name__ in self._types:
            saved = {
                f.name: self.encode(getattr(value, f.name)) for f in fields(value) if not f.metadata.get("unsaved")
            }
            return {"$": type(value).__name__, **saved}
        raise TypeError(f"{type(value).__name__} is not plain data and not a known record")

    def _encode_tuple(self, value: tuple[Any, ...]) -> Any:
        if is_named_tuple(type(value)) and type(value).__name__ in self._types:
            names = type(value)._fields  # type: ignore[attr-defined]
            return {"$": type(value).__name__, **dict(zip(names, map(self.encode, value), strict=True))}
        return {"()": [self.encode(item) for item in value]}

    def decode(self, data: Any, given: Mapping[str, Any] | None = None) -> Any:
        if isinstance(data, list):
            return [self.decode(item, given) for item in data]
        if not isinstance(data, dict):
            return data
        if "$" in data:
            return self._decode_record(data, given or {})
        kind, content = next(iter(data.items()))
        if kind == "e":
            return self._types[content[0]](content[1])
        if kind == "f":
            return float(content)
        if kind == "()":
            return tuple(self.decode(item, given) for item in content)
        if kind == "deque":
            return deque(self.decode(item, given) for item in content)
        if kind == "{}":
            return {self.decode(key, given): self.decode(item, given) for key, item in content}
        raise ValueError(f"unknown encoding {kind!r}; the data was written by another version")

    def _decode_record(self, data: Mapping[str, Any], given: Mapping[str, Any]) -> Any:
        cls = self._types.get(data["$"])
        if cls is None:
            raise ValueError(f"unknown record {data['$']!r}; the data was written by another version")
        content = {name: self.decode(item, given) for name, item in data.items() if name != "$"}
        for f in fields(cls) if is_dataclass(cls) else ():
            if f.metadata.get("unsaved") and f.init:
                content[f.name] = given[f.name] if f.name in given or f.default is MISSING else f.default
        return cls(**content)


def is_named_tuple(kind: type) -> bool:
    return issubclass(kind, tuple) and hasattr(kind, "_fields")


@cache
def state_codec() -> Codec:
    """Codec of all states and records of the scheduler: its dataclasses, named tuples and enums."""
    return Codec(_types())


def _types() -> Iterator[type]:
    package = importlib.import_module("polyrhythm.scheduler")
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        for kind in vars(importlib.import_module(module.name)).values():
            known = isinstance(kind, type) and (is_dataclass(kind) or is_named_tuple(kind) or issubclass(kind, Enum))
            if known and kind.__module__ == module.name:
                yield kind
