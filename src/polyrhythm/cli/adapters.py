"""Environments and policies in words: one line each, or all of one."""

from __future__ import annotations

import argparse
import json
import textwrap
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from polyrhythm.config.catalog import Adapter

_WIDTH = 118


def add_type(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("type", nargs="?", metavar="TYPE", help="show this one's settings (or module:Class, your own)")
    parser.add_argument("--json", action="store_true", help="print all of it as JSON")


def show(kind: Literal["env", "policy"], arguments: argparse.Namespace) -> int:
    """Print what the registry has of this kind, or the one that was named."""
    from polyrhythm.config.catalog import adapter, adapters

    found = [adapter(kind, arguments.type)] if arguments.type else adapters(kind)
    if arguments.json:
        print(json.dumps([_plain(one) for one in found], indent=2))
    else:
        print("\n".join(detailed(one) if arguments.type else brief(one) for one in found))
    return 0


def brief(one: Adapter) -> str:
    """`metaworld   Meta-World tasks …` and, below, what it needs."""
    return f"{one.type:12}{one.summary}\n{'':12}{needs(one)}"


def needs(one: Adapter) -> str:
    if not one.needs:
        return "needs nothing more"
    parts = [f"{need.package} {need.version if need.found else 'MISSING'}".strip() for need in one.needs]
    return f"needs {', '.join(parts)}" + (f"; run: {one.install}" if one.install else "")


def detailed(one: Adapter) -> str:
    """All that there is to say: purpose, needs, settings, tasks."""
    about = [textwrap.fill(part, _WIDTH) for part in one.about.split("\n\n") if part]
    lines = [brief(one), "", *about, *[""] * bool(about), "settings"]
    for setting in one.settings:
        default = "required" if setting.required else json.dumps(setting.default, default=str)
        lines.append(f"  {setting.name}: {setting.kind}, {default}")
        lines.append(textwrap.fill(setting.about, _WIDTH, initial_indent="      ", subsequent_indent="      "))
    if one.tasks:
        width = max(map(len, one.tasks))
        lines += ["", "tasks", *(f"  {name:{width}}  {instruction}" for name, instruction in one.tasks.items())]
    return "\n".join(lines)


def _plain(one: Adapter) -> dict[str, object]:
    return {
        **one._asdict(),
        "needs": [need._asdict() for need in one.needs],
        "settings": [setting._asdict() for setting in one.settings],
    }
