"""Registry of settings of environments, policies and trackers by name, and the plain data of settings objects.

An adapter's module is imported only when it is used. Stations and checkpoints hold plain data only, so a user's class
is referenced by module:Class; in a script or notebook the module is `__main__`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any, Literal

from pydantic import BaseModel, ValidationError
from pydantic_core import InitErrorDetails

from polyrhythm.config.base import InvalidSetting, NotFound, type_name
from polyrhythm.conformance import raised
from polyrhythm.errors import ConfigError, nearest
from polyrhythm.plugin import load, table

Kind = Literal["env", "policy", "tracking"]

#: Type name → module:Class of the core's settings; plugins add others.
CORE: dict[Kind, dict[str, str]] = {
    "env": {
        "gymnasium": "polyrhythm.envs.gymnasium_env:GymnasiumSettings",
        "gymnasium_vector": "polyrhythm.envs.gymnasium_vector:GymnasiumVectorSettings",
        "latency": "polyrhythm.envs.latency:LatencySettings",
    },
    "policy": {
        "gaussian": "polyrhythm.policies.gaussian:GaussianSettings",
        "categorical": "polyrhythm.policies.categorical:CategoricalSettings",
        "tiny_vla": "polyrhythm.policies.tiny_vla.policy:TinyVlaSettings",
    },
    "tracking": {},
}


def known_types(kind: Kind) -> dict[str, str]:
    """Type name → module:Class of its settings, the core's first."""
    return {**CORE[kind], **table(kind)}


class NestedRefusal(ValueError):
    """Validation error of an adapter's settings, with the model that `explain` needs."""

    def __init__(self, model: type[BaseModel], error: ValidationError) -> None:
        self.model, self.error = model, error
        super().__init__(str(error))


def expand(value: Any) -> Any:
    """`gymnasium:CartPole-v1` → {type: gymnasium, id: CartPole-v1}; any other string is a type without settings."""
    if not isinstance(value, str):
        return value
    kind, _, argument = value.partition(":")
    return {"type": kind, "id": argument} if kind == "gymnasium" and argument else {"type": value}


def resolve(kind: Kind, value: Any) -> BaseModel:
    """Validated settings of an adapter, given as their model, a mapping with `type`, or a short form.

    Unknown keys are refused in all sections even if the model would ignore them, since a typo would otherwise silently
    select a default. Only a section whose own model has extra="allow" keeps them.
    """
    if isinstance(value, BaseModel):
        return value
    value = expand(value)
    if not isinstance(value, dict) or not isinstance(value.get("type"), str):
        raise InvalidSetting(
            "", value, f"a section with a type is needed; the known types are {', '.join(known_types(kind))}"
        )
    if kind == "env" and (key := next((key for key in table("env_key") if value.get(key)), None)):
        made: BaseModel = load("env_key", key).of(value)
        return made
    model = settings_class(kind, value["type"])
    computed = model.model_computed_fields  # saved, but not accepted as input
    given = {key: item for key, item in value.items() if key not in computed}
    try:
        return model.model_validate(given, extra="forbid")
    except ValidationError as error:
        return _with_allowed_keys(model, given, error)


def _with_allowed_keys(model: type[BaseModel], given: dict[str, Any], refused: ValidationError) -> BaseModel:
    """The settings if `refused` names only keys of sections that allow any key, else raise NestedRefusal."""
    try:
        found = model.model_validate(given)
    except ValidationError as error:
        raise NestedRefusal(model, error if _allows_any_key(model) else refused) from error
    unknown: list[InitErrorDetails] = [
        {"type": "extra_forbidden", "loc": detail["loc"], "input": detail["input"]}
        for detail in refused.errors(include_url=False)
        if detail["type"] == "extra_forbidden" and not _allows_any_key(_section_at(found, detail["loc"][:-1]))
    ]
    if unknown:
        raise NestedRefusal(model, ValidationError.from_exception_data(model.__name__, unknown)) from refused
    return found


def _allows_any_key(section: BaseModel | type[BaseModel]) -> bool:
    return section.model_config.get("extra") == "allow"


def _section_at(settings: BaseModel, location: Sequence[int | str]) -> BaseModel:
    """Section at a pydantic location; steps that are not a field, key or index are tags of unions."""
    section, value = settings, settings
    for step in location:
        content: Any = dict(value) if isinstance(value, BaseModel) else value
        try:
            value = content[step]
        except (LookupError, TypeError):
            continue
        if isinstance(value, BaseModel):
            section = value
    return section


_MISSING = object()


def import_object(address: str, name: str, what: str) -> Any:
    """Import `module:name`, the `type` = `name` that must name `what`. InvalidSetting: that fails."""
    module_name, _, attribute = address.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        fix = f"install it, run this in the folder of {module_name.partition('.')[0]}.py, or correct the name"
        raise NotFound("type", name, f"{address} cannot be imported ({error}); {fix}") from error
    except SyntaxError as error:
        raise InvalidSetting(
            "type", name, f"{module_name} cannot be imported ({error.msg}, line {error.lineno}); correct that line"
        ) from error
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        raise InvalidSetting("type", name, f"importing {module_name} {raised(error)}; fix it there") from error
    found = getattr(module, attribute, _MISSING)
    if module_name == "__main__" and found is _MISSING:
        raise InvalidSetting(
            "type",
            name,
            f"{attribute} was defined in a script or notebook, and this is another process; put it into a module (say "
            f"own.py), name it own:{attribute}, or continue in that script",
        )
    if found is _MISSING:
        raise NotFound("type", name, f"module {module_name} has no {attribute}; name {what} in it")
    return found


def settings_class(kind: Kind, name: str) -> type[BaseModel]:
    """The settings model of a type, or of module:Class. InvalidSetting: there is none."""
    known = known_types(kind)
    address = known.get(name, name)
    if ":" not in address:
        names = ", ".join(known)
        raise InvalidSetting("type", name, f"{nearest(name, known)}known types are {names}; your own is module:Class")
    found = import_object(address, name, "a settings class")
    if not (isinstance(found, type) and issubclass(found, BaseModel) and "type" in found.model_fields):
        raise InvalidSetting(
            "type", name, f"{address} is not a settings model; name a pydantic model that has a `type` field"
        )
    return found


# ------------------------------------------------------------ settings objects as plain data

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
    declared, found = type_name(settings), type(settings)
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
