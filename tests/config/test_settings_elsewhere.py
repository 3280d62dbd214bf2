"""Pages name settings that exist; docs/settings-elsewhere.md also values that they take, and defaults."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args, get_origin

import pytest
import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from polyrhythm.config.base import models_in
from polyrhythm.config.presets import OBJECTIVE_PRESETS, PRESETS
from polyrhythm.config.registry import known_types, settings_class
from polyrhythm.config.schema import RunConfig

PAGE = Path(__file__).parents[2] / "docs" / "settings-elsewhere.md"
#: Keys of a recipe that the resolved configuration does not have, and the values that they take.
RECIPE_ONLY: dict[str, list[str]] = {"preset": list(PRESETS), "objective": list(OBJECTIVE_PRESETS)}


class Key(NamedTuple):
    """A key as a cell writes it: `path` or `path: value`."""

    path: str
    value: str | None


class Row(NamedTuple):
    """A row of a table that has a column `ours`. default: our default, None where the row has none; bold: marked so."""

    line: int
    keys: tuple[Key, ...]
    default: str | None
    bold: bool


def cells(line: str) -> list[str]:
    """The cells of a table's row."""
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def code_spans(cell: str) -> list[str]:
    """What stands between backticks."""
    return cell.split("`")[1::2]


def rows(text: str) -> Iterator[Row]:
    """The rows of every table with a column `ours`; a column `our default` may follow."""
    header: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.startswith("|"):
            header = []
        elif not header:
            header = cells(line)
        elif "ours" in header and not line.startswith("|---"):
            row = dict(zip(header, cells(line), strict=True))
            spans = [span.partition(": ") for span in code_spans(row["ours"])]
            keys = tuple(Key(path, value if colon else None) for path, colon, value in spans)
            default = row.get("our default", "")
            yield Row(number, keys, default.replace("**", "") or None, default.startswith("**"))


ROWS = list(rows(PAGE.read_text(encoding="utf-8")))


def sections(model: type[BaseModel], name: str, field: FieldInfo) -> list[type[BaseModel]]:
    """The settings models that a field may hold: those of its annotation, or of the registry."""
    if model is RunConfig and name in ("env", "policy"):
        return [settings_class(name, kind) for kind in known_types(name)]
    return models_in(field.annotation)


def holders(key: Key, types: dict[str, str]) -> list[FieldInfo]:
    """The fields that a dotted path may mean. types: path of a section -> the type that this cell gives it."""
    models: list[type[BaseModel]] = [RunConfig]
    names = key.path.split(".")
    for depth, name in enumerate(names):
        found = [(model, model.model_fields[name]) for model in models if name in model.model_fields]
        if depth == len(names) - 1:
            return [field for _, field in found]
        wanted = types.get(".".join(names[: depth + 1]))
        models = [inner for model, field in found for inner in sections(model, name, field)]
        models = [model for model in models if wanted is None or tag(model) == wanted]
    return []


def tag(model: type[BaseModel]) -> str:
    """The value of `type` that chooses this model; empty where it has none."""
    return str(model.model_fields["type"].default) if "type" in model.model_fields else ""


def accepts(field: FieldInfo, text: str) -> bool:
    """Whether the field takes this value as YAML, or a union of sections has one of this type."""
    value = yaml.safe_load(text)
    if value in [tag(model) for model in models_in(field.annotation)]:
        return True
    metadata = tuple(field.metadata)
    annotation: Any = Annotated[field.annotation, *metadata] if metadata else field.annotation
    try:
        TypeAdapter(annotation).validate_python(float(value) if is_real(field, value) else value)
    except ValidationError:
        return False
    return True


def is_real(field: FieldInfo, value: Any) -> bool:
    """A whole number given to a field of real ones, as recipes may."""
    return type(value) is int and float in flat(field.annotation)


def flat(annotation: Any) -> list[Any]:
    """A type's parts, through unions and Annotated."""
    if get_origin(annotation) is None:
        return [annotation]
    return [leaf for part in get_args(annotation) for leaf in flat(part)]


def plain(field: FieldInfo) -> Any:
    """The default as a recipe writes it; a section by its type."""
    default = field.get_default(call_default_factory=True)
    if isinstance(default, BaseModel):
        return tag(type(default))
    if isinstance(default, dict) and set(default) == {"type"}:
        return default["type"]
    return list(default) if isinstance(default, tuple) else default


def types_in(row: Row) -> dict[str, str]:
    """What the row's own cell says of the types of sections: `algorithm.loss: cispo` is that of `algorithm.loss`."""
    return {path.removesuffix(".type"): value for path, value in row.keys if value is not None}


def test_the_page_has_tables_of_five_systems() -> None:
    assert len(ROWS) > 100
    text = PAGE.read_text(encoding="utf-8")
    assert all(f"## {name}" in text for name in ("RLinf", "verl", "ROLL", "AReaL", "TRL"))


def wrong_keys(row: Row) -> list[str]:
    """What is wrong with the row's keys and their values, one sentence each."""
    wrong = []
    for key in row.keys:
        if key.path in RECIPE_ONLY:
            wrong += [] if key.value in RECIPE_ONLY[key.path] else [f"line {row.line}: no {key.path} is {key.value}"]
            continue
        fields = holders(key, types_in(row))
        if not fields:
            wrong.append(f"line {row.line}: there is no recipe key {key.path}")
        elif key.value is not None and not any(accepts(field, key.value) for field in fields):
            wrong.append(f"line {row.line}: {key.path} takes no {key.value}")
    return wrong


def wrong_default(row: Row) -> list[str]:
    """What is wrong with the row's default: its value, or that it is bold where the key need not be set."""
    if row.default is None:
        return []
    if not row.keys:
        return [f"line {row.line}: a default, but no key of ours"]
    last, default = row.keys[-1], yaml.safe_load(row.default)
    defaults = [plain(field) for field in holders(last, types_in(row))]
    if default not in defaults:
        return [f"line {row.line}: the default of {last.path} is {defaults}"]
    if last.value is not None and row.bold != (yaml.safe_load(last.value) != default):
        return [f"line {row.line}: bold says that {last.path} must be set"]
    return []


def test_every_key_exists_and_takes_its_value() -> None:
    assert [sentence for row in ROWS for sentence in wrong_keys(row)] == []


#: Settings that have no field of a section: a key of every environment's, a number that follows from others.
_NO_FIELD = {"env.python", "training.batch_size"}
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def named_settings(text: str) -> set[str]:
    """Dotted names in a page's code spans that begin with a section of a recipe; files and calls are none."""
    words = [word for span in re.findall(r"`([^`\n]+)`", _FENCE.sub("", text)) for word in span.split()]
    paths = {re.split(r"[:=]", word)[0].strip("',\"") for word in words}
    dotted = {path for path in paths if re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", path) and not _FILE.search(path)}
    return {path for path in dotted if path.partition(".")[0] in RunConfig.model_fields} - _NO_FIELD


_FILE = re.compile(r"\.(json|pt|yaml|act)$")


@pytest.mark.parametrize("page", sorted({*PAGE.parent.rglob("*.md")} - {PAGE}), ids=lambda page: page.stem)
def test_settings_that_a_page_names_exist(page: Path) -> None:
    named = named_settings(page.read_text(encoding="utf-8"))
    assert [path for path in sorted(named) if not holders(Key(path, None), {})] == []


def test_settings_are_found_in_text() -> None:
    text = "`training.versions=3`, `freshness: {max_lag: 1}`, `batching.max_rows`, `policy.pt`\n```\n`env.nothing`\n```"
    assert named_settings(text) == {"training.versions", "batching.max_rows"}


def test_our_defaults_are_those_of_the_schema() -> None:
    assert [sentence for row in ROWS for sentence in wrong_default(row)] == []


def test_every_objective_is_on_the_page() -> None:
    named = [key.value for row in ROWS for key in row.keys if key.path == "objective"]
    assert sorted(filter(None, named)) == sorted(OBJECTIVE_PRESETS)


def test_a_wrong_row_is_noticed() -> None:
    header = "| theirs | ours | our default |\n|---|---|---|\n"

    def complaints(ours: str, default: str) -> list[str]:
        (row,) = rows(f"{header}| `x` | {ours} | {default} |")
        return wrong_keys(row) + wrong_default(row)

    assert complaints("`algorithm.loss: cispo`, `algorithm.loss.clip_high`", "**0.28**") == []
    assert complaints("`algorithm.loss: cispo`, `algorithm.loss.clip_high`", "0.2") != [], "0.2 is ppo's"
    assert complaints("`algorithm.loss: cispo`, `algorithm.loss.dual_clip`", "") != [], "cispo has none"
    assert complaints("`algorithm.bootstrap: always`", "**standard**") == []
    assert complaints("`algorithm.bootstrap: always`", "standard") != [], "bold is missing"
    assert complaints("`algorithm.bootstrap: sometimes`", "") != []
    assert complaints("`training.optimizer.betas`", "[0.9, 0.999]") == []
    assert complaints("`objective: rlinf_librero`", "") != []
    assert complaints("none", "0.2") != []
