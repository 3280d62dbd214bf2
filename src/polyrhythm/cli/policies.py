"""List the policies and the packages that each needs; with TYPE: its settings, their defaults and meaning.

With --recipe also its form in that recipe's environment and the memory that each station needs; nothing is built.

Released checkpoint folders:
  policies inspect FOLDER [--json]                    what it is, whether it is whole, memory, the lines for a recipe;
                                                      exit status 1 if tensors are missing or do not fit
  policies merge ADAPTERS --base FOLDER --out FOLDER  adapters in peft's layout into the base, in its layout
  policies export RUN --out FOLDER [--base FOLDER]    the same as polyrhythm export
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from polyrhythm.cli import adapters, export
from polyrhythm.cli.show import size_text

if TYPE_CHECKING:
    from polyrhythm.policies.form import PolicyForm


def add_arguments(parser: argparse.ArgumentParser) -> None:
    adapters.add_type(parser)
    parser.add_argument("--recipe", help="show its form and memory in this recipe (one of ours, or a YAML file)")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="section.key=value", help="settings that differ from the recipe"
    )
    parser.add_argument("--base", metavar="FOLDER", help="with merge and export: the released folder that was trained")
    parser.add_argument("--out", metavar="FOLDER", help="with merge and export: the new folder")


def run(arguments: argparse.Namespace) -> int:
    from polyrhythm.errors import ConfigError

    if arguments.type in _folder_commands():
        return _run_on_folder(arguments)
    for name, value in (("base", arguments.base), ("out", arguments.out)):
        if value:
            usages = [usage for usage in _folder_commands().values() if f"--{name}" in usage]
            raise ConfigError(f"--{name} = {value}: it belongs to {' and to '.join(usages)}")
    _refuse_misspelt(arguments.type or "")
    if not arguments.recipe:
        if arguments.overrides:
            raise ConfigError(f"{arguments.overrides[0]}: settings need a recipe; add --recipe NAME")
        return adapters.show("policy", arguments)
    if not arguments.type:
        raise ConfigError(f"--recipe = {arguments.recipe}: no policy is named; write polyrhythm policies TYPE --recipe")
    return _show_form(arguments)


def _folder_commands() -> dict[str, str]:
    """Usage of each command on folders, including `policies NAME` of plugins."""
    from polyrhythm.plugin import plugins

    purposes = [item for plugin in plugins().values() for item in plugin.purposes.items()]
    added = {name.removeprefix("policies "): usage for name, usage in purposes if name.startswith("policies ")}
    return {**added, "export": "polyrhythm policies export RUN --out FOLDER [--base FOLDER]"}


def _run_on_folder(arguments: argparse.Namespace) -> int:
    from polyrhythm.errors import ConfigError
    from polyrhythm.plugin import load

    command, folders = arguments.type, arguments.overrides
    usage = _folder_commands()[command]
    if len(folders) != 1:
        raise ConfigError(f"policies {command} takes one folder, {len(folders)} are named; write {usage}")
    if arguments.recipe:
        raise ConfigError(f"--recipe = {arguments.recipe}: policies {command} takes none; write {usage}")
    if "--out" in usage and not arguments.out:
        raise ConfigError(f"policies {command} needs --out, the new folder; write {usage}")
    folder = Path(folders[0]).expanduser()
    if command == "export":
        export.export_and_tell(folder, Path(arguments.out), arguments.base, as_json=arguments.json)
        return 0
    status: int = load("command", f"policies {command}")(folder, arguments)
    return status


def _refuse_misspelt(word: str) -> None:
    """ConfigError: the word is not a policy's type, but close to a command on folders."""
    from polyrhythm.config.registry import known_types
    from polyrhythm.errors import ConfigError, nearest

    types = known_types("policy")
    if word and ":" not in word and word not in types and (near := nearest(word, _folder_commands())):
        raise ConfigError(
            f"policies {word}: no such policy or command; {near}commands are {', '.join(_folder_commands())}, "
            f"policies {', '.join(types)}"
        )


def _show_form(arguments: argparse.Namespace) -> int:
    from polyrhythm.checks import CheckContext, require_added
    from polyrhythm.config.catalog import adapter
    from polyrhythm.config.load import load_config
    from polyrhythm.config.registry import expand
    from polyrhythm.pipeline.build import env_settings
    from polyrhythm.pipeline.validation.check import check_form

    section = expand(arguments.type)
    others = [text for text in arguments.overrides if not text.startswith(("policy.", "policy="))]
    config = load_config(arguments.recipe, others)
    if config.policy_type != section["type"]:
        config = load_config(arguments.recipe, [f"policy={json.dumps(section)}", *arguments.overrides])
    else:
        config = load_config(arguments.recipe, arguments.overrides)
    spec = env_settings(config).spec()
    form = check_form(config, spec)
    context = CheckContext(config, "machine", spec=spec, form=form)
    require_added(context, "policies")
    memory = context.numbers.get("memory", {})
    if arguments.json:
        one = adapters.plain(adapter("policy", section["type"]))
        print(json.dumps([one | {"form": asdict(form), "memory": memory}], indent=2))
    else:
        print("\n".join([*memory_lines(memory), *[""] * bool(memory), *form_lines(form)]))
    return 0


def form_lines(form: PolicyForm) -> list[str]:
    """Description of the form: a line per array and per published tensor."""
    from polyrhythm.policies.traits import plain_traits

    size = sum(spec.nbytes for spec in form.published.values())
    lines = [
        f"chunk of {form.chunk} actions of {form.action_dim} entries, one value per {form.value}",
        f"{form.parameters:,} parameters, {form.trainable:,} of them trainable",
        f"traits: {', '.join(plain_traits(form.traits)) or 'none'}",
        "forward_inputs of one row",
        *(f"  {name}  {array.dtype} {list(array.shape)}" for name, array in form.answers.items()),
        f"published weights, {size_text(size)} in {len(form.published)} tensors",
    ]
    return lines + [f"  {name}  {spec}" for name, spec in form.published.items()]


def memory_lines(memory: Mapping[str, Mapping[str, int]]) -> list[str]:
    """`trainer          3.2 MB   weights 0.8 MB, gradients 0.8 MB, optimizer 1.6 MB`, one line per station."""
    width = max(map(len, memory), default=0)
    lines = ["memory by station (without activations, simulators and interpreters)"] if memory else []
    for name, parts in memory.items():
        told = ", ".join(f"{part} {size_text(size)}" for part, size in parts.items())
        lines.append(f"  {name:{width}}  {size_text(sum(parts.values())):>9}   {told}")
    return lines
