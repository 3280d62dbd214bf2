"""Prints the list of environments or policies, or the details of one."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal, get_type_hints

from polyrhythm.cli.show import columns

if TYPE_CHECKING:
    from polyrhythm.config.catalog import Adapter, Setting
    from polyrhythm.specs import EnvSpec

_WIDTH = 118


def add_type(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("type", nargs="?", metavar="TYPE", help="show the settings of this one (also: module:Class)")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def show(kind: Literal["env", "policy"], arguments: argparse.Namespace) -> int:
    """Print all registered adapters of this kind, or the named one."""
    from polyrhythm.config.catalog import adapter, adapters
    from polyrhythm.config.registry import expand
    from polyrhythm.specs.plain import as_plain

    if not arguments.type:
        found = adapters(kind)
        print(json.dumps([plain(one) for one in found], indent=2) if arguments.json else "\n".join(map(brief, found)))
        return 0
    section = expand(arguments.type)
    one = adapter(kind, section["type"])
    spec = offered(kind, section, one)
    traits = declared_traits(kind, section)
    if arguments.json:
        shown = {"spec": as_plain(spec)} if not isinstance(spec, str) else {}
        print(json.dumps([plain(one) | shown | {"traits": traits}], indent=2))
    else:
        print("\n".join([detailed(one), *trait_lines(traits), *spec_lines(spec)]))
    return 0


def declared_traits(kind: Literal["env", "policy"], section: dict[str, Any]) -> dict[str, Any]:
    """Traits of a policy with these settings, without defaults, {} if settings are missing; or the traits that an
    environment has, each with its meaning."""
    from polyrhythm.config.registry import NestedRefusal, resolve, settings_class
    from polyrhythm.envs.base import EnvTraits, traits_of
    from polyrhythm.policies.traits import plain_traits, settings_traits

    if kind == "env":
        found = asdict(traits_of(settings_class("env", section["type"])))
        meanings = get_type_hints(EnvTraits, include_extras=True)
        return {name: meanings[name].__metadata__[0] for name, has in found.items() if has}
    try:
        return plain_traits(settings_traits(resolve("policy", section)))
    except NestedRefusal:
        return {}


def trait_lines(traits: Mapping[str, Any]) -> list[str]:
    """`  policy.critic: true`, one line per declared trait."""
    flat: dict[str, Any] = {}
    for name, value in traits.items():
        flat |= {f"{name}.{inner}": x for inner, x in value.items()} if isinstance(value, dict) else {name: value}
    lines = [f"  {name}: {value if isinstance(value, str) else json.dumps(value)}" for name, value in flat.items()]
    return ["", "traits", *lines] if flat else []


def offered(kind: Literal["env", "policy"], section: dict[str, Any], one: Adapter) -> EnvSpec | str:
    """Spec of an environment with these settings, or the reason why it is unknown; "" for a policy."""
    from polyrhythm.config.explain import explain
    from polyrhythm.config.registry import NestedRefusal, resolve
    from polyrhythm.conformance import raised
    from polyrhythm.envs.base import EnvSettings
    from polyrhythm.errors import PolyrhythmError

    if kind == "policy":
        return ""
    lacking = [setting.name for setting in one.settings if setting.required and setting.name not in section]
    if lacking:
        return f"depend on {', '.join(lacking)}"
    if one.install:
        return f"are unknown before: {one.install}"
    try:
        settings = resolve("env", section)
    except NestedRefusal as error:
        return f"are unknown: {'; '.join(explain(error.error, error.model, kind))}"
    if not isinstance(settings, EnvSettings):
        return "are unknown: the settings need spec() and build(rows)"
    try:
        return settings.spec()
    except PolyrhythmError as error:  # its message names the environment; the line that raised it is ours
        return f"are unknown: {error}"
    except Exception as error:  # noqa: BLE001 - a user's class may raise anything
        return f"are unknown: spec() {raised(error)}"


def spec_lines(spec: EnvSpec | str) -> list[str]:
    """Observation, action, episode and tasks of an environment, or the reason why they are unknown."""
    if isinstance(spec, str):
        return ["", f"observation and action {spec}"] if spec else []
    width = max(map(len, spec.observation), default=0)
    lines = ["", "observation of one row, with these defaults"]
    lines += [f"  {name:{width}}  {array.dtype} {list(array.shape)}" for name, array in spec.observation.items()]
    action = spec.action
    form = f"{action.dtype} [{action.dim}]"
    low, high = action.low, action.high
    if action.kind == "discrete":
        low, high = (0,) * action.dim, tuple(count - 1 for count in action.counts)
    within = _bounds(low, high)
    lines += ["action", f"  {form} in {within}", f"episode of up to {spec.max_steps} env steps"]
    known = [f"  {task.name}: {task.instruction}" for task in spec.tasks]
    return [*lines, "tasks", *known]


def _bounds(low: tuple[float, ...], high: tuple[float, ...]) -> str:
    """`-1..1`, or one range per entry if they differ."""
    pairs = [f"{a:g}..{b:g}" for a, b in zip(low, high, strict=True)]
    return pairs[0] if len(set(pairs)) == 1 else ", ".join(pairs)


def brief(one: Adapter) -> str:
    """`metaworld         Meta-World tasks …` and, below it, the packages that it needs."""
    return f"{one.type:17} {one.summary}\n{'':18}{needs(one)}"


def needs(one: Adapter) -> str:
    if not one.needs:
        return "needs no other package"
    parts = [f"{need.package} {need.version if need.found else 'MISSING'}".strip() for need in one.needs]
    return f"needs {', '.join(parts)}" + (f"; run: {one.install}" if one.install else "")


def detailed(one: Adapter) -> str:
    """Purpose, packages, settings and tasks."""
    about = [textwrap.fill(part, columns(_WIDTH)) for part in one.about.split("\n\n") if part]
    lines = [brief(one), "", *about, *[""] * bool(about), "settings", *setting_lines(one.settings)]
    if one.tasks:
        width = max(map(len, one.tasks))
        lines += ["", "tasks", *(f"  {name:{width}}  {instruction}" for name, instruction in one.tasks.items())]
    return "\n".join(lines)


def setting_lines(settings: Sequence[Setting]) -> list[str]:
    """Name, kind, default and meaning of each setting."""
    lines, width, indent = [], columns(_WIDTH), 6 * " "
    for setting in settings:
        default = "required" if setting.required else json.dumps(setting.default, default=str)
        head = f"  {setting.name}: {setting.kind}, "
        lines.append(head + textwrap.shorten(default, max(40, width - len(head)), placeholder=" ..."))
        if setting.about:
            lines.append(textwrap.fill(setting.about, width, initial_indent=indent, subsequent_indent=indent))
    return lines


def plain(one: Adapter) -> dict[str, object]:
    return {
        **one._asdict(),
        "needs": [need._asdict() for need in one.needs],
        "settings": [setting._asdict() for setting in one.settings],
    }
