"""Reads YAML with PyYAML's safe loader, except that 1e-3 is a number and a repeated key is an error.

A file may come from anybody, so what it can cost is bounded: its bytes, its depth, its values once every alias is
written out, and the length of a number.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from polyrhythm.errors import ConfigError

#: Bytes of a text; sections within sections; values of a document with its aliases written out.
_LARGEST, _DEPTH, _VALUES = 2**20, 64, 100_000
#: Characters of a value that is not text: a number, a date.
_NUMBER = 1000
_TEXT = "tag:yaml.org,2002:str"
#: A key of {…} without the space that YAML needs before its value.
_NO_SPACE = re.compile(r"[{,]\s*[\w.]+:[^\s,}]")


class _Loader(yaml.SafeLoader):
    """Safe loader without two rules of YAML 1.1: 1e-3 is text, and the last of two equal keys wins."""

    _open = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """A node of the document, once its depth is known to be bounded."""
        self._open += 1
        if self._open > _DEPTH:
            mark: Any = self.get_mark()
            raise _refusal(f"sections are nested more than {_DEPTH} deep; write them flatter", mark)
        node = super().compose_node(parent, index)
        self._open -= 1
        return node

    def get_single_node(self) -> yaml.Node | None:
        """The document's root, once what it expands to is known to be bounded."""
        root = super().get_single_node()
        if root is not None:
            _measure(root, {})
        return root

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode):
                if node.flow_style and key.style is None and ":" in key.value and value.value == "":
                    raise _refusal(f"{key.value} has no value", key.start_mark)
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"key {key.value} is given twice; keep one", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"), list("-+0123456789.")
)


def _measure(node: yaml.Node, known: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """Values that a node holds with its aliases written out, and its depth. known: of the nodes measured before, by
    identity. MarkedYAMLError: they are too many, too deep, or a node holds itself."""
    if (found := known.get(id(node))) is not None:
        if not found[0]:
            raise _refusal("it holds itself, by an alias; write the values out", node.start_mark)
        return found
    known[id(node)] = 0, 0
    values, depth = 1, 0
    if isinstance(node, yaml.ScalarNode):
        if node.tag != _TEXT and len(node.value) > _NUMBER:
            said = f"a value that is not text has {len(node.value)} characters; at most {_NUMBER} can be read"
            raise _refusal(said, node.start_mark)
    else:
        pairs = isinstance(node, yaml.MappingNode)
        for child in (each for pair in node.value for each in pair) if pairs else node.value:
            more, deeper = _measure(child, known)
            values, depth = values + more, max(depth, deeper)
    if values > _VALUES:
        raise _refusal(f"more than {_VALUES} values with its aliases written out; use fewer", node.start_mark)
    if depth >= _DEPTH:
        raise _refusal(f"sections are nested more than {_DEPTH} deep by aliases; write them flatter", node.start_mark)
    known[id(node)] = values, depth + 1
    return values, depth + 1


def _refusal(problem: str, mark: Any) -> yaml.MarkedYAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, mark)


def parse(text: str, origin: str) -> Any:
    """Plain data of one YAML document; `origin`: its name in errors. ConfigError: it is not one, or too large."""
    if len(text) > _LARGEST:
        raise ConfigError(f"more than {_LARGEST} characters; a recipe states only what differs", origin=origin)
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506 - a subclass of the safe loader
    except (yaml.YAMLError, ValueError) as error:  # ValueError: an invalid date or number
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        problem = " ".join(str(getattr(error, "problem", None) or error).split())
        if mark and _NO_SPACE.search("".join(text.splitlines()[mark.line : mark.line + 1])):
            problem += "; put a space after each ':' that follows a key"
        raise ConfigError(f"{where}{problem}", origin=origin) from error


def read(path: Path) -> dict[str, Any]:
    """The sections of a YAML file."""
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(_LARGEST + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot be read ({error}); name a YAML file", origin=str(path)) from error
    tree = parse(text, origin=str(path))
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(
            f"it must have sections (key: value lines), this is a {type(tree).__name__}; write sections",
            origin=str(path),
        )
    return tree
