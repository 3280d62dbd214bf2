"""Loads recipes: YAML with `extends`, `preset` and `objective`, deep merge, and `section.key=value` overrides.

A recipe contains only differences. Merging goes section by section; a section that changes its `type` replaces the
whole inherited section, since the keys of another type do not apply. Lists are replaced.
"""

from __future__ import annotations

import logging
import re
import shlex
import unicodedata
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, TypeGuard

import yaml
from pydantic import BaseModel, BeforeValidator, SerializeAsAny, ValidationError

from polyrhythm.config.base import InvalidSetting, Section
from polyrhythm.config.explain import explain
from polyrhythm.config.presets import changed_settings, objective_preset, preset, scale
from polyrhythm.config.recipes import find_recipe, parse, read
from polyrhythm.config.registry import NestedRefusal, expand, known_types, plain, resolve
from polyrhythm.config.schema import RunConfig
from polyrhythm.errors import ConfigError
from polyrhythm.files import atomic_write
from polyrhythm.sources import pinned

log = logging.getLogger(__name__)

Tree = dict[str, Any]
#: Maximum characters of an override in an error; maximum keys of a path, more than any setting has.
_SHOWN, _MOST_KEYS = 160, 64
#: The parser's messages for an unterminated section or text.
_ENDS_WITHIN = re.compile("<stream end>|end of stream")


def load_config(recipe: str | Path | Mapping[str, Any], overrides: Sequence[str | Mapping[str, Any]] = ()) -> RunConfig:
    """Validated configuration of a recipe with overrides, each `section.key=value` or sections.

    recipe: a name, a path, or the content of a file; sections may be settings objects, and a key may be a dotted path:
    {"training.versions": 3}.
    """
    origin = "recipe" if isinstance(recipe, Mapping) else str(recipe)
    if isinstance(recipe, Mapping):
        tree = {"name": "script", **_extended(_sections(plain(recipe)), origin, Path(), ())}
    else:
        path = find_recipe(recipe)
        # Replace spaces and signs: the runs of `my recipe (2).yaml` are in runs/my-recipe-2.
        name = re.sub(r"[^\w.-]+", "-", unicodedata.normalize("NFKC", path.stem)).strip("-.") or "recipe"
        tree = {"name": name, **_read_recipe(path, ())}
    changes: Tree = {}
    _check_order([override for override in overrides if isinstance(override, str)])
    for place, override in enumerate(overrides):
        if isinstance(override, str):
            changes = merge(changes, parse_override(override, overrides[place + 1 :]))
        else:
            changes = merge(changes, _sections(plain(override)))
    if changes.get("devices") is not None and tree.get("devices") is None:
        raise ConfigError(
            f"devices = {changes['devices']}: this recipe is not a row: it does not state the devices that its numbers "
            "are for; leave devices out, and see placement (docs/recipes.md)"
        )
    _tell_replaced(tree, changes)
    return validate(pinned(_merge_preset(tree, changes, "overrides")), origin=origin)


def _merge_preset(base: Tree, change: Tree, origin: str) -> Tree:
    """Merge, in this order: `base`, scaled to the devices of `change`; the preset and the objective of `change`;
    `change`."""
    devices, row = change.get("devices"), base.get("devices")
    if _is_count(devices) and _is_count(row) and devices != row:
        base, changes = scale(base, devices, origin)
        log.info("devices = %d of a row for %d: %s", devices, row, ", ".join(changes))
    own, named = {key: value for key, value in change.items() if key != "preset"}, dict[str, Tree]()
    if "preset" in change:
        named["preset"] = preset(change["preset"], merge(base, own), origin)
        base = merge(base, named["preset"])
    if change.get("objective", "") != "":  # replaces the section, since merging would mix two objectives
        named["objective"] = {"algorithm": objective_preset(change["objective"], origin)}
        base = base | named["objective"]
    tree = merge(base, own)
    for kind, settings in named.items():
        if changed := list(changed_settings(settings, tree)):
            log.info("%s = %s, changed by what is set beside it: %s", kind, change[kind], ", ".join(changed))
    return tree


def validate(tree: Tree, origin: str = "") -> RunConfig:
    """A `RunConfig` from plain data, with the training defaults that its policy declares. ConfigError: lists every
    problem."""
    try:
        return RunConfig.model_validate(_with_policy_defaults(tree))
    except ValidationError as error:
        raise ConfigError(*explain(error, RunConfig), origin=origin) from None


def _with_policy_defaults(tree: Tree) -> Tree:
    """Add the policy's `training_defaults` below the section `training`.

    A value learning rate is left out if the value loss is off. Invalid policies or sections are left to the schema,
    which reports them.
    """
    training = tree.get("training")
    try:
        policy = resolve("policy", tree.get("policy"))
    except (InvalidSetting, NestedRefusal):
        return tree
    if not isinstance(training, dict):
        return tree
    declared, algorithm = merge({}, dict(training_defaults(policy))), tree.get("algorithm")
    value = algorithm.get("value") if isinstance(algorithm, dict) else None
    if isinstance(value, dict) and value.get("coef") == 0:
        declared.get("optimizer", {}).pop("value_lr", None)
    return tree | {"policy": policy, "training": merge(declared, training)}


def training_defaults(policy: BaseModel) -> Mapping[str, Any]:
    """Defaults that the policy's settings declare for the section `training`; {} without any."""
    return getattr(policy, "training_defaults", {})


class _EnvAlone(Section):
    """The env section of a configuration."""

    env: Annotated[SerializeAsAny[BaseModel], BeforeValidator(lambda value: resolve("env", value))]
    """The environment's own settings."""


def load_env(name: str, overrides: Sequence[str] = ()) -> BaseModel:
    """Settings of an environment, given as a type, `gymnasium:ID`, `module:Class`, or a recipe (path or name) whose env
    section is used; with `key=value` overrides. ConfigError: lists every problem."""
    is_type = name.partition(":")[0] in known_types("env") or ":" in name
    tree: Tree = {"env": name} if is_type else {"env": _read_recipe(find_recipe(name), ()).get("env")}
    for place, override in enumerate(overrides):
        tree = merge(tree, {"env": parse_override(override, overrides[place + 1 :])})
    try:
        return _EnvAlone.model_validate(tree).env
    except ValidationError as error:
        raise ConfigError(*explain(error, _EnvAlone), origin="--env") from None


def save_config(config: RunConfig, path: Path) -> None:
    """Write the resolved configuration with all defaults; `load_config(path)` restores it."""
    text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    with atomic_write(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


def merge(base: Tree, change: Tree) -> Tree:
    """`base` overridden by `change`; both stay unmodified."""
    merged = dict(base)
    for key, new in change.items():
        merged[key] = new
        if isinstance(new, dict):
            old = expand(base.get(key))
            merged[key] = merge(old if isinstance(old, dict) and not _changes_type(old, new) else {}, new)
    return merged


def _changes_type(old: Tree, new: Tree) -> bool:
    return "type" in old and "type" in new and new["type"] != old["type"]


def parse_override(text: str, rest: Sequence[object] = ()) -> Tree:
    """`a.b=1` → {a: {b: 1}}; the value is YAML. rest: following words, which may continue this one after a missing
    shell quote."""
    path, equals, value = text.partition("=")
    shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]} …"
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"override {shown!r}: it must look like section.key=value")
    if not value.strip():
        raise ConfigError(
            f"override {shown!r}: no value after =; write one, null for none, or \"{path.strip()}=''\" with all of "
            "these quotes for an empty text"
        )
    try:
        return _nested(keys, parse(value, origin=f"override {shown!r}"))
    except ConfigError as error:
        if not _ENDS_WITHIN.search(error.problems[0]):
            raise
        whole = shlex.quote(_rejoined(text, rest) or f"{path}={{key: value}}")
        raise ConfigError(f"{error.problems[0]}; quote it in the shell, as {whole}", origin=error.origin) from error


def _rejoined(text: str, rest: Sequence[object]) -> str:
    """An override that the shell has split at its spaces; "" if the following words do not complete it."""
    for more in rest[:_MOST_KEYS]:
        text += f" {more}"
        with suppress(ConfigError):
            parse(text.partition("=")[2], origin="")
            return text
    return ""


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _sections(tree: Tree) -> Tree:
    """Expand dotted keys to nested sections; later keys override earlier ones."""
    if not any("." in str(key) for key in tree):
        return tree
    found: Tree = {}
    for path, value in tree.items():
        keys = str(path).split(".")
        if not all(keys):
            raise ConfigError(f"key {path!r}: it must look like section.key")
        found = merge(found, _nested(keys, value))
    return found


def _nested(keys: Sequence[str], value: Any) -> Tree:
    if len(keys) > _MOST_KEYS:
        raise ConfigError(f"{'.'.join(keys)[:_SHOWN]} …: {len(keys)} keys; no setting lies deeper than {_MOST_KEYS}")
    for key in reversed(keys):
        value = {key: value}
    assert isinstance(value, dict)
    return value


def _tell_replaced(tree: Tree, changes: Tree) -> None:
    """Warn of settings of the recipe that are dropped because a section changes its type."""
    for name, change in changes.items():
        old = tree.get(name)
        if not (isinstance(old, dict) and isinstance(change, dict) and _changes_type(old, change)):
            continue
        if gone := [key for key in old if key not in change]:
            log.warning(
                "%s.type = %s, the recipe has %s: its settings %s go with it; give what is to stay, as in %s.%s=...",
                *(name, change["type"], old["type"], ", ".join(gone), name, gone[0]),
            )


def _check_order(overrides: Sequence[str]) -> None:
    """Raise ConfigError if a section is set after one of its keys, which would discard the key."""
    for place, override in enumerate(overrides):
        path, _, value = override.partition("=")
        for earlier in overrides[:place]:
            if earlier.startswith(f"{path.strip()}.") and not value.strip().startswith("{"):
                raise ConfigError(f"{override} comes after {earlier}, which it would discard; give it first")


def _read_recipe(path: Path, seen: tuple[Path, ...]) -> Tree:
    path = path.resolve()
    if path in seen:
        chain = " → ".join(step.name for step in (*seen, path))
        raise ConfigError(f"extends = {chain}: recipes extend each other; remove one link", origin=str(path))
    return _extended(read(path), str(path), path.parent, (*seen, path))


def _extended(tree: Tree, origin: str, folder: Path, seen: tuple[Path, ...]) -> Tree:
    """Merge the recipe over the one that it extends, which may be in the same `folder`."""
    parent = tree.pop("extends", None)
    if parent is None:
        return _merge_preset({}, tree, origin)
    if not isinstance(parent, str):
        raise ConfigError(f"extends = {parent}: it must be one recipe's name or path", origin=origin)
    inherited = _read_recipe(find_recipe(parent, beside=folder), seen)
    inherited.pop("name", None)
    return _merge_preset(inherited, tree, origin)
