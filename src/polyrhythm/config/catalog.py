"""Describes the registered adapters: their settings and the packages that they need, without importing these."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from types import NoneType
from typing import Any, Literal, NamedTuple, get_args, get_origin

from pydantic import BaseModel

from polyrhythm.config.base import InvalidSetting, models_in, type_name
from polyrhythm.config.registry import Kind, known_types, settings_class
from polyrhythm.conformance import Finding
from polyrhythm.errors import ConfigError, MissingError, install_command, pip_install


@dataclasses.dataclass(frozen=True, slots=True)
class Declared:
    """Optional declarations of an adapter's settings class, as attributes of these names.

    needs: packages to import; extra: extra of this distribution that installs them; pins: the only version prefix of a
    package that the extra allows. known_tasks: task name → instruction. check: raises a PolyrhythmError with the fix if
    this machine lacks something else. findings: a class method that yields findings about this machine for `polyrhythm
    doctor NAME`, the slow ones last, or None.
    """

    needs: Sequence[str] = ()
    extra: str = ""
    pins: Mapping[str, str] = dataclasses.field(default_factory=dict)
    known_tasks: Mapping[str, str] = dataclasses.field(default_factory=dict)
    check: Callable[[], None] = lambda: None
    findings: Callable[[], Iterable[Finding]] | None = None


def declared(settings: BaseModel | type[BaseModel]) -> Declared:
    """Declarations of a settings class or instance; `check` can be called only for an instance."""
    names = (one.name for one in dataclasses.fields(Declared))
    return Declared(**{name: getattr(settings, name) for name in names if hasattr(settings, name)})


class Need(NamedTuple):
    """A package that an adapter imports. version: "" if it is not found."""

    package: str
    found: bool
    version: str


class Setting(NamedTuple):
    """A field of an adapter's settings. default: plain data; None also if it is required."""

    name: str
    kind: str
    required: bool
    default: Any
    about: str


class Adapter(NamedTuple):
    """An environment or a policy.

    install: command that installs missing packages, "" if none are missing; clash: reason why they cannot be installed
    into this Python, "" if they can.
    """

    type: str
    summary: str
    about: str
    needs: Sequence[Need]
    install: str
    settings: Sequence[Setting]
    tasks: Mapping[str, str]
    clash: str = ""


def adapters(kind: Kind) -> list[Adapter]:
    return [adapter(kind, name) for name in known_types(kind)]


def adapter(kind: Kind, name: str) -> Adapter:
    """The adapter with this name or module:Class. ConfigError: there is none."""
    try:
        model = settings_class(kind, name)
    except InvalidSetting as error:
        raise ConfigError(f"{kind}.{error}") from error
    about = [_one_line(paragraph) for paragraph in (model.__doc__ or "").split("\n\n")]
    own = declared(model)
    needs = [need(package) for package in own.needs]
    missing = [wanted.package for wanted in needs if not wanted.found]
    extra = own.extra
    install = install_command(extra) if extra else pip_install(" ".join(missing))
    clash = ""
    for one in needs if missing else ():
        pinned = own.pins.get(one.package, "").split(".")
        if one.version and one.package in own.pins and one.version.split(".")[: len(pinned)] != pinned:
            clash = (
                f"{one.package} {one.version} is installed here and the extra {extra} needs {own.pins[one.package]}, "
                f"so it takes a Python of its own (env.python={extra})"
            )
            install = f"polyrhythm envs setup {extra}"
            break
    return Adapter(
        name,
        about[0],
        "\n\n".join(about[1:]),
        needs,
        install if missing else "",
        settings_of(model),
        dict(own.known_tasks),
        clash,
    )


def check_installed(kind: Kind, settings: BaseModel) -> None:
    """Raise MissingError if a package that the adapter needs is missing; then run the adapter's own `check`."""
    own = declared(settings)
    missing = [package for package in own.needs if not need(package).found]
    if missing:
        name = type_name(settings)
        found = adapter(kind, name)
        why = f"; {found.clash}" if found.clash else ""
        raise MissingError(
            f"{kind}.type = {name}: the package {missing[0]} is not installed{why}; run: {found.install}"
        )
    own.check()


def need(package: str) -> Need:
    """Look up the package without importing it."""
    found = importlib.util.find_spec(package) is not None
    try:
        return Need(package, found, metadata.version(package) if found else "")
    except metadata.PackageNotFoundError:
        return Need(package, found, "")


def settings_of(model: type[BaseModel], within: str = "") -> list[Setting]:
    """Fields of a settings model, each followed by those of its possible sections: `head[bins].greedy`."""
    found = []
    for name, field in model.model_fields.items():
        if name == "type":
            continue
        sections = {type_of(one): one for one in models_in(field.annotation) if "type" in one.model_fields}
        default = None if field.is_required() else field.get_default(call_default_factory=True)
        default = default.model_dump(mode="json") if isinstance(default, BaseModel) else default
        kind, about = " | ".join(sections) or _kind(field.annotation), _one_line(field.description or "")
        found.append(Setting(within + name, kind, field.is_required(), default, about))
        for kind, section in sections.items():
            found += settings_of(section, f"{within}{name}[{kind}].")
    return found


def type_of(model: type[BaseModel]) -> str:
    """Type of a settings model in a union, such as `gae`; for a user's function `module:function`."""
    field = model.model_fields["type"]
    return (field.description or "").rstrip(".") if field.is_required() else str(field.default)


def _kind(annotation: Any) -> str:
    """A type in the notation of the docs: `int`, `cheap | full`, `list of text`."""
    if annotation is NoneType:
        return "null"
    names = {str: "text", bool: "true | false", Mapping: "section", dict: "section"}
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " | ".join(map(str, inner))
    if origin in (tuple, list, Sequence):
        return f"list of {_kind(inner[0])}"
    if isinstance(annotation, type) or origin in (Mapping, dict) or "Mapping" in str(origin):
        return names.get(origin or annotation, "section" if origin else annotation.__name__)
    if hasattr(annotation, "__metadata__"):
        return _kind(inner[0])
    return " | ".join(_kind(part) for part in inner) or str(annotation)


def _one_line(text: str) -> str:
    return " ".join(text.split())
