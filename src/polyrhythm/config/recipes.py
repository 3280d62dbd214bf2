"""Finds recipes by path, beside the recipe that extends them, or by name among the shipped ones, and reads YAML.

PyYAML's safe loader reads, except that 1e-3 is a number and a repeated key is an error. Files are untrusted, so their
cost is bounded: bytes, depth, number of values with aliases expanded, and length of a number.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from polyrhythm.errors import ConfigError, nearest
from polyrhythm.readable import few

_PACKAGE = Path(__file__).resolve().parents[1]


def recipes_folder() -> Path:
    """Folder of shipped recipes: inside an installed package, or at the root of a checkout."""
    inside = _PACKAGE / "recipes"
    return inside if inside.is_dir() else _PACKAGE.parents[1] / "recipes"


def examples_folder() -> Path:
    inside = _PACKAGE / "examples"
    return inside if inside.is_dir() else _PACKAGE.parents[1] / "examples"


def recipe_names() -> list[str]:
    return sorted(path.stem for path in recipes_folder().glob("*.yaml"))


def recipe_word(name: str) -> str:
    """What a command calls a recipe of which only the name is known: that of a file's path is not enough."""
    return name if name in recipe_names() else "RECIPE"


def find_recipe(recipe: str | Path, beside: Path | None = None) -> Path:
    """File of a recipe given by path (relative to `beside`, or to the working folder) or by name."""
    given = Path(recipe)
    folder = beside or Path()
    is_yaml = given.suffix.lower() in (".yaml", ".yml")
    candidates = [folder / given, folder / f"{given}.yaml"] if beside or is_yaml else []
    if given.name == str(recipe):
        candidates.append(recipes_folder() / f"{given.stem if given.suffix == '.yaml' else given}.yaml")
    candidates.append(given)  # a bare name is a shipped recipe first, then a file
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    names = recipe_names()
    if given.is_dir():
        run = f"a run's recipe is its config.yaml; to resume that run: polyrhythm resume {recipe}"
        remedy = run if (given / "config.yaml").is_file() else "give a path to a YAML file"
        raise ConfigError(f"recipe {str(recipe)!r} is a folder; {remedy}")
    from difflib import get_close_matches  # slow, and only errors need it

    files = {path.stem: str(given.parent / path.name) for path in sorted((folder / given).parent.glob("*.y*ml"))}
    close = [files[stem] for stem in get_close_matches(given.stem, files, n=1)]
    where = "this folder" if (folder / given).parent == Path() else (folder / given).parent
    listed = f"the YAML files of {where} are {few(list(files.values()), 8)}; " if files else ""
    raise ConfigError(
        f"recipe {str(recipe)!r} does not exist; {nearest(given.stem, names, elsewhere=close)}{listed}named recipes "
        f"are {', '.join(names)}; or give a path to a YAML file"
    )


# ------------------------------------------------------------ YAML

#: Maximum bytes of a text, nesting depth, and values of a document with aliases expanded.
_LARGEST, _DEPTH, _VALUES = 2**20, 64, 100_000
#: Maximum characters of a value that is not text, such as a number or a date.
_NUMBER = 1000
_TEXT = "tag:yaml.org,2002:str"
#: A key of {…} without the space that YAML needs before its value.
_NO_SPACE = re.compile(r"[{,]\s*[\w.]+:[^\s,}]")


class _Loader(yaml.SafeLoader):
    """Safe loader without two rules of YAML 1.1: that 1e-3 is text, and that the last of two equal keys wins."""

    _open = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose a node, with bounded depth."""
        self._open += 1
        if self._open > _DEPTH:
            mark: Any = self.get_mark()
            raise _refusal(f"sections are nested more than {_DEPTH} deep; write them flatter", mark)
        node = super().compose_node(parent, index)
        self._open -= 1
        return node

    def get_single_node(self) -> yaml.Node | None:
        """The document's root, with bounded expansion."""
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
    """Number of values that a node holds with aliases expanded, and its depth. known: results by node identity.

    MarkedYAMLError: there are too many, it is too deep, or a node contains itself.
    """
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
    """Plain data of one YAML document; `origin`: its name in errors. ConfigError: it is invalid or too large."""
    if len(text) > _LARGEST:
        raise ConfigError(f"more than {_LARGEST} characters; a recipe states only what differs", origin=origin)
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506 - a subclass of the safe loader
    except (yaml.YAMLError, ValueError) as error:  # ValueError: an invalid date or number
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else "not YAML: "
        problem = " ".join(str(getattr(error, "problem", None) or error).split())
        if mark and _NO_SPACE.search("".join(text.splitlines()[mark.line : mark.line + 1])):
            problem += "; put a space after each ':' that follows a key"
        raise ConfigError(f"{where}{problem}", origin=origin) from error


def read(path: Path) -> dict[str, Any]:
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
