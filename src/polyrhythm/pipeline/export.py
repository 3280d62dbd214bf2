"""Writes a saved policy as one folder of safetensors: in its released layout, as adapters, or by its own names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyrhythm.errors import ConfigError, MissingError

if TYPE_CHECKING:
    from polyrhythm.pipeline.persistence.checkpoints import SavedPolicy


def export(path: Path, out: Path, base: str | None = None) -> dict[str, Any]:
    """Write the policy at `path` into the new folder `out`; returns a summary for display.

    base: released folder that the policy was trained from, in place of the one in its settings. ConfigError: the policy
    has no released layout for that base.
    """
    from polyrhythm.config.registry import known_types, resolve
    from polyrhythm.pipeline.persistence.checkpoints import read_policy
    from polyrhythm.plugin import import_address
    from polyrhythm.policies.base import as_settings

    saved = read_policy(path)
    section = saved.config["policy"]
    kind, own = section["type"], section.get("checkpoint", "")
    what = ""
    if folders := _folder_format(kind):
        settings = as_settings(resolve("policy", section))
        base = base or own
        if base and base == own and not Path(base).expanduser().exists():
            there = "name where it is now: --base FOLDER"
            raise MissingError(f"{path}: it was trained on {base}, which is not there; {there}")
        env = (saved.spec, saved.config.get("seed"))
        what = import_address(folders)().export(settings, saved.weights, out, base=base, source=path, env=env)
    elif base:
        have = [name for name in known_types("policy") if _folder_format(name)]
        raise ConfigError(
            f"--base = {base}: policy.type = {kind} has no released layout; leave it out (those that have one are "
            f"{', '.join(have)})"
        )
    if not what:
        _write_plain(saved, out)
    named = {"base": str(base)} if what and base else {}
    return {"exported": what or "policy", "version": saved.version, **named, "out": str(out)}


def _folder_format(kind: str) -> str:
    """`SettingsTraits.folders` of a policy type; "" for a type outside the registry or with required settings."""
    from polyrhythm.config.registry import NestedRefusal, known_types, resolve
    from polyrhythm.policies.traits import settings_traits

    try:
        return settings_traits(resolve("policy", kind)).folders if kind in known_types("policy") else ""
    except NestedRefusal:
        return ""


def _write_plain(saved: SavedPolicy, out: Path) -> None:
    from polyrhythm.files import name_in_errors, new_folder
    from polyrhythm.pipeline.persistence.checkpoints import EXPORTED_MODEL, EXPORTED_SETTINGS
    from polyrhythm.safetensors_files import write_tensors
    from polyrhythm.specs.plain import as_plain

    spec = None if saved.spec is None else as_plain(saved.spec)
    policy, env = saved.config["policy"], saved.config.get("env")
    content = {"policy": policy, "version": saved.version, "env": env, "spec": spec, "config": saved.config}
    with new_folder(out) as unfinished:
        with name_in_errors(unfinished / EXPORTED_SETTINGS):
            (unfinished / EXPORTED_SETTINGS).write_text(json.dumps(content, indent=1), encoding="utf-8")
        # safetensors refuses tensors that share memory.
        write_tensors({name: tensor.clone() for name, tensor in saved.weights.items()}, unfinished / EXPORTED_MODEL)
