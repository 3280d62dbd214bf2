"""Registry of optional parts: each plugin lists addresses by kind and name, and the core imports one on use.

Our plugins are packages of `polyrhythm/plugins/` with `PLUGIN` in their `__init__`; those of other distributions are
entry points of the group `polyrhythm.plugins` (docs/extending.md). Plugin modules must import nothing heavy. Invariant:
the core imports plugins only through this module; without a plugin's folder its names are unknown and the rest works.
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

#: Kinds of additions; docs/extending.md has their interfaces. env_key: a key that the env section of any type may have;
#: its class makes the settings, by `of(section)`. command: `envs NAME` is a subcommand of `polyrhythm envs`. ranks:
#: strategy of several trainer ranks, by `placement.trainer.strategy` (`training.ranks`). checkpoint: reads a state by
#: form. pipeline: a phase or a product of a run, such as its videos. source: a scheme of names of folders (`sources`).
Kind = Literal[
    "env", "env_key", "policy", "engine", "loss", "launcher", "devices", "station", "scheduler", "placement", "ranks",
    "checkpoint", "demonstrations", "pipeline", "observer", "tracking", "check", "command", "report", "source",
]  # fmt: skip

#: Entry points of plugins in other distributions.
GROUP = "polyrhythm.plugins"


class PluginError(PolyrhythmError, ValueError):
    """A plugin cannot be used: a name is unknown or added twice, or a module is broken."""


@dataclass(frozen=True, slots=True)
class Plugin:
    """An optional part. needs: plugins that it imports; adds: kind → name → `module:attribute`; purposes: one line for
    each command that it adds."""

    name: str
    needs: tuple[str, ...] = ()
    adds: Mapping[Kind, Mapping[str, str]] = field(default_factory=dict)
    purposes: Mapping[str, str] = field(default_factory=dict)


@cache
def plugins() -> Mapping[str, Plugin]:
    """All plugins by name, ours first. PluginError: one is broken, or two have the same name."""
    found: dict[str, Plugin] = {}
    folder = Path(__file__).with_name("plugins")
    ours = sorted(path.parent.name for path in folder.glob("*/__init__.py"))
    sources = [(f"polyrhythm.plugins.{name}:PLUGIN", name) for name in ours]
    sources += [(point.value, point.name) for point in sorted(entry_points(group=GROUP), key=lambda one: one.name)]
    for address, name in sources:
        try:
            plugin = import_address(address)
        except Exception as error:
            raise PluginError(f"plugin {name} = {address}: {error!r}; fix or uninstall it") from error
        if not isinstance(plugin, Plugin):
            raise PluginError(f"plugin {name} = {address}: it is not a polyrhythm.plugin.Plugin; fix or uninstall it")
        if plugin.name in found:
            raise PluginError(f"plugin {name} = {address}: another plugin is called {plugin.name}; uninstall one")
        found[plugin.name] = plugin
    return found


@cache
def table(kind: Kind) -> Mapping[str, str]:
    """Name → `module:attribute` of all additions of this kind. PluginError: two plugins add the same name."""
    found: dict[str, str] = {}
    for plugin in plugins().values():
        for name, address in plugin.adds.get(kind, {}).items():
            if name in found:
                raise PluginError(f"plugin {plugin.name}: {kind} {name} is there already, {found[name]}; uninstall one")
            found[name] = address
    return found


def load(kind: Kind, name: str) -> Any:
    """Import the addition of this kind and name. PluginError: there is none."""
    if name not in (known := table(kind)):
        raise PluginError(f"{kind} {name}: no plugin that is installed adds it; install the package that does")
    return import_address(known[name])


def load_all(kind: Kind) -> list[Any]:
    """Import all additions of this kind."""
    return [import_address(address) for address in table(kind).values()]


def import_address(address: str) -> Any:
    """Import `module:attribute`, or a module."""
    module, _, attribute = address.partition(":")
    imported = importlib.import_module(module)
    return getattr(imported, attribute) if attribute else imported
