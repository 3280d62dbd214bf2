"""What optional parts add to the core: each plugin lists addresses by kind and name, and the core imports one on use.

A plugin of ours is a package of `polyrhythm/plugins/`, whose `__init__` has `PLUGIN`; one of another distribution is an
entry point of the group `polyrhythm.plugins` (docs/extending.md). The module of either imports nothing heavy.

Invariant: the core imports no plugin; whatever it needs of one it finds here. Without its folder a plugin's names are
unknown, and the rest works.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal

from polyrhythm.errors import PolyrhythmError

#: What can be added; the contract of each kind is in docs/extending.md. An env_key is a key that the section env of
#: any type may have: its class makes the settings, by `of(section)`. A command `envs NAME` is one of `polyrhythm envs`.
#: ranks: by `placement.trainer.strategy` what several ranks are (`training.ranks`); checkpoint: reads a state by form.
Kind = Literal[
    "env", "env_key", "policy", "engine", "loss", "launcher", "station", "scheduler", "placement", "ranks",
    "checkpoint", "demonstrations", "observer", "check", "command", "report",
]  # fmt: skip

#: Entry points of plugins in other distributions.
GROUP = "polyrhythm.plugins"


class PluginError(PolyrhythmError, ValueError):
    """A plugin cannot be used: none adds the name, two do, or its module is broken."""


@dataclass(frozen=True, slots=True)
class Plugin:
    """An optional part. needs: the plugins that it imports; adds: kind → name → `module:attribute`; purposes: a line
    for each command that it adds."""

    name: str
    needs: tuple[str, ...] = ()
    adds: Mapping[Kind, Mapping[str, str]] = field(default_factory=dict)
    purposes: Mapping[str, str] = field(default_factory=dict)


@cache
def plugins() -> Mapping[str, Plugin]:
    """All plugins by name, ours first. PluginError: one is broken, or two have one name."""
    found: dict[str, Plugin] = {}
    folder = Path(__file__).with_name("plugins")
    ours = sorted(path.parent.name for path in folder.glob("*/__init__.py"))
    sources = [(f"polyrhythm.plugins.{name}:PLUGIN", name) for name in ours]
    sources += [(point.value, point.name) for point in sorted(entry_points(group=GROUP), key=lambda one: one.name)]
    for address, name in sources:
        try:
            plugin = import_address(address)
        except Exception as error:
            raise PluginError(f"plugin {name} = {address}: {error!r}; mend or uninstall it") from error
        if not isinstance(plugin, Plugin):
            raise PluginError(f"plugin {name} = {address}: it is no polyrhythm.plugin.Plugin; mend or uninstall it")
        if plugin.name in found:
            raise PluginError(f"plugin {name} = {address}: another plugin is called {plugin.name}; uninstall one")
        found[plugin.name] = plugin
    return found


@cache
def table(kind: Kind) -> Mapping[str, str]:
    """Name → `module:attribute` of all that plugins add of this kind. PluginError: two add the same name."""
    found: dict[str, str] = {}
    for plugin in plugins().values():
        for name, address in plugin.adds.get(kind, {}).items():
            if name in found:
                raise PluginError(f"plugin {plugin.name}: {kind} {name} is there already, {found[name]}; uninstall one")
            found[name] = address
    return found


def load(kind: Kind, name: str) -> Any:
    """What plugins add under this kind and name. PluginError: nothing."""
    if name not in (known := table(kind)):
        raise PluginError(f"{kind} {name}: no plugin that is installed adds it; install the package that does")
    return import_address(known[name])


def load_all(kind: Kind) -> list[Any]:
    """All that plugins add of this kind."""
    return [import_address(address) for address in table(kind).values()]


def import_address(address: str) -> Any:
    """What `module:attribute` names, or the module."""
    module, _, attribute = address.partition(":")
    imported = importlib.import_module(module)
    return getattr(imported, attribute) if attribute else imported
