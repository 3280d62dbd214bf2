"""Reads YAML with PyYAML's safe loader, except that 1e-3 is a number and a repeated key is an error."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from polyrhythm.errors import ConfigError


class _Loader(yaml.SafeLoader):
    """Safe loader without two rules of YAML 1.1: 1e-3 is text, and the last of two equal keys wins."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"key {key.value} is given twice; keep one", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"), list("-+0123456789.")
)


def parse(text: str, origin: str) -> Any:
    """Plain data of one YAML document; `origin`: its name in errors."""
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506 - a subclass of the safe loader
    except (yaml.YAMLError, ValueError) as error:  # ValueError: an invalid date or number
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ConfigError(f"{where}{getattr(error, 'problem', None) or error}", origin=origin) from error


def read(path: Path) -> dict[str, Any]:
    """The sections of a YAML file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot be read ({error}); name a YAML file", origin=str(path)) from error
    tree = parse(text, origin=str(path))
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(
            f"a recipe has sections (key: value lines), this is a {type(tree).__name__}; write sections",
            origin=str(path),
        )
    return tree
