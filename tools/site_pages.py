"""Generates the site's pages docs/reference/*.md from the code; a hook of MkDocs (mkdocs.yml).

Links from docs/ to files outside it, such as ../examples, are relative in the sources, so that they work in a checkout.
The site has no such files: there a link becomes the file's path, or a link below `repo_url` where mkdocs.yml has one.
"""

from __future__ import annotations

import argparse
import dataclasses
import html
import importlib
import inspect
import json
import logging
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pydantic import BaseModel

from polyrhythm.cli.main import command_parser, commands
from polyrhythm.config.base import models_in
from polyrhythm.config.catalog import Setting, adapters, settings_of, type_of
from polyrhythm.config.schema import RunConfig
from polyrhythm.error_codes import GROUPS, codes
from polyrhythm.observe.metrics import documented
from polyrhythm.plugin import plugins
from polyrhythm.plugins.listing.papers import sentences

ROOT = Path(__file__).resolve().parents[1]
#: Modules whose public names the reference lists, with their purpose.
PUBLIC = {
    "polyrhythm": "runs and policies from Python",
    "polyrhythm.specs": "arrays, actions, tasks, trajectories",
    "polyrhythm.envs.base": "environments",
    "polyrhythm.policies.base": "policies",
    "polyrhythm.policies.form": "what a policy asks of its run",
    "polyrhythm.plugins.language.text": "text environments",
    "polyrhythm.plugins.workflow": "workflows of your own",
    "polyrhythm.pipeline.hooks": "observers of a run",
    "polyrhythm.plugin": "packages that add parts",
    "polyrhythm.errors": "errors",
}
_SETTINGS = """# Settings

Every setting of a recipe, as `polyrhythm settings` prints it. `section[type].key` is a key of one type of the section.
Override any on the command line: `polyrhythm train cartpole training.versions=50`. The keys of `env` and `policy`
depend on their type: [environments](environments.md), [policies](policies.md)."""
_ENVIRONMENTS = """# Environments

Settings of `env`, by `env.type`, as `polyrhythm envs TYPE` prints them, with the shapes of observations and actions."""
_POLICIES = """# Policies

Settings of `policy`, by `policy.type`, as `polyrhythm policies TYPE` prints them."""
_COMMANDS = """# Commands

What `polyrhythm --help` and `polyrhythm COMMAND --help` print. Where a command takes RUN, a folder of runs is its
newest. Settings are written `section.key=value`. Exit status: 0 done; 1 a check failed; 2 an error that you can fix
([troubleshooting](../troubleshooting.md)); 3 something is missing on this machine; 130, 143 and 129: ended by Ctrl-C,
SIGTERM, SIGHUP."""
_METRICS = """# Metrics by name

The names of `metrics.jsonl` and of every tracker. `<part>` varies. How to read them: [metrics](../metrics.md)."""
_PLUGINS = """# Plugins

Optional parts, each a folder of `src/polyrhythm/plugins/`; packages of your own add the same kinds
([extending](../extending.md))."""
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^()\s#]+)((?:#[^()\s]*)?)\)")
_CODE = re.compile(r"(^ *```.*?^ *```)", re.MULTILINE | re.DOTALL)
log = logging.getLogger("mkdocs.hooks.site_pages")  # below mkdocs, so that --strict counts its warnings


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    for path, page in PAGES.items():
        files.append(File.generated(config, path, content=page()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001 - the hook's form
    """Fill in what is generated within a page, and replace links to files outside docs/; a missing file is a warning,
    an error with --strict."""
    for mark, generate in PARTS.items():
        markdown = markdown.replace(mark, generate() if mark in markdown else "")
    folder = (Path(config.docs_dir) / page.file.src_uri).parent

    def replaced(found: re.Match[str]) -> str:
        image, text, path, anchor = found.groups()
        target = (folder / path).resolve()
        if ":" in path or target.is_relative_to(config.docs_dir):
            return found[0]
        if not target.exists():
            log.warning("%s links to %s, which does not exist", page.file.src_uri, path)
        shown = target.relative_to(ROOT).as_posix()
        if config.repo_url and not image:
            return f"[{text}]({config.repo_url.rstrip('/')}/blob/main/{shown}{anchor})"
        named = text.strip("`") in (path, shown, target.name)
        return f"`{shown}`" if named else f"{text} (`{shown}`)"

    parts = _CODE.split(markdown)
    return "".join(part if k % 2 else _LINK.sub(replaced, part) for k, part in enumerate(parts))


def error_entries() -> str:
    """A heading for each code of an error, with an example, cause and remedy."""
    lines = []
    for first, title in GROUPS.items():
        own = [one for one in codes() if one.code.startswith(first)]
        lines.append(f"## {title}")
        # The rest of a class comes last.
        for one in sorted(own, key=lambda one: (one.code.endswith("00"), one.code)):
            example = [] if one.message == "anything else" else [f"```text\n{one.code}: {one.message}\n```"]
            lines += [
                f"### {one.code}",
                f"**{one.what}.**",
                *example,
                f"*Cause.* {one.cause}",
                f"*Remedy.* {one.remedy}",
            ]
    return "\n\n".join(lines)


def sentences_by_paper() -> str:
    """A table of each paper: section, sentence, and what realises it."""
    lines: list[str] = []
    paper = ""
    for one in sentences():
        if one.paper != paper:
            paper = one.paper
            lines.append(f"\n## {paper}\n\n| where | sentence | setting |\n|---|---|---|")
        what = ", ".join([*map(_setting_link, one.settings), *[one.also] * bool(one.also)])
        lines.append(f"| {one.at} | {_plain(one.text)} | {what} |")
    return "\n".join(lines)


def sentences_by_setting() -> str:
    """A table of the settings: the sentences that each realises."""
    found: dict[str, list[str]] = {}
    for one in sentences():
        for setting in one.settings:
            found.setdefault(setting, []).append(f"{one.paper.partition(' (')[0]} {one.at}: {_plain(one.text)}")
    rows = [f"| {_setting_link(setting)} | {'<br>'.join(own)} |" for setting, own in sorted(found.items())]
    return "\n".join(["| setting | sentences |", "|---|---|", *rows])


def _setting_link(setting: str) -> str:
    """A setting as code, which leads to the reference where that has it under this name."""
    path = setting.partition("=")[0]
    found = _anchors().get(path.removesuffix(".type"))
    return f"[`{setting}`](reference/settings.md#{found})" if found else f"`{setting}`"


@cache
def _anchors() -> dict[str, str]:
    """Setting, without the types in its name, → its first anchor on the page of settings."""
    found = re.findall(r"^#+ `(\S+)` {#(\S+)}$", settings(), re.MULTILINE)
    return {re.sub(r"\[[^]]*\]", "", name): place for name, place in reversed(found)}


def anchor(path: str) -> str:
    """`training.optimizer.lr` → training-optimizer-lr; `algorithm.loss[ppo].clip_low` → algorithm-loss-ppo-clip_low."""
    return re.sub(r"[.\[\]/<>: ]+", "-", path).strip("-")


def _plain(text: str) -> str:
    """Text of a docstring as Markdown: no character of it is markup, except backquotes."""
    parts = re.split(r"(`[^`]+`)", text)
    plain = (html.escape(part, quote=False).replace("|", "&#124;") for part in parts)
    escaped = (re.sub(r"([\\*_\[\]]|#(?!124;))", r"\\\1", part) for part in plain)
    return "".join(part if part.startswith("`") else other for part, other in zip(parts, escaped, strict=True))


def _code(text: object) -> str:
    """Code that may contain any character, also in a table."""
    return f"<code>{html.escape(str(text)).replace('|', '&#124;')}</code>"


def _setting(setting: Setting, depth: int = 4) -> Iterator[str]:
    default = json.dumps(setting.default, default=str, ensure_ascii=False)
    meaning = "required" if setting.required else f"default {_code(default if len(default) <= 200 else '…')}"
    yield f"{'#' * depth} `{setting.name}` {{#{anchor(setting.name)}}}"
    yield f'<p class="kind">{_code(setting.kind)}, {meaning}</p>'
    if setting.about:
        yield _plain(setting.about)


def settings() -> str:
    top = [one for one in settings_of(RunConfig) if not re.search(r"[.\[]", one.name)]
    lines = [_SETTINGS, "## Top level"]
    sections = {name: models_in(RunConfig.model_fields[name].annotation) for name in RunConfig.model_fields}
    for one in top:
        lines += _setting(one._replace(default="…") if sections[one.name] else one)
    for name, models in sections.items():
        if models and name not in ("env", "policy"):
            lines += _section(name, models, 2)
    return "\n\n".join(lines)


def _section(path: str, models: list[type[BaseModel]], depth: int) -> Iterator[str]:
    """A section's heading, its settings and its own sections; one with types is repeated for each."""
    for model in models:
        typed = "type" in model.model_fields and (len(models) > 1 or depth > 2)
        name = f"{path}[{type_of(model)}]" if typed else path
        own = [one for one in settings_of(model, f"{name}.") if not re.search(r"[.\[]", one.name[len(name) + 1 :])]
        yield f"{'#' * min(depth, 3)} {name} {{#{anchor(name)}-section}}"
        if model.__doc__ and not model.__doc__.startswith("!!!"):
            yield _plain(inspect.cleandoc(model.__doc__))
        inner = {key: models_in(field.annotation) for key, field in model.model_fields.items()}
        for one in own:
            key = one.name.rpartition(".")[2]
            yield from _setting(one._replace(default="…") if inner[key] and isinstance(one.default, dict) else one)
        for key, found in inner.items():
            if found and key != "type":
                yield from _section(f"{name}.{key}", found, depth + 1)


def _adapters(kind: Any, head: str) -> str:
    lines = [head]
    for one in adapters(kind):
        lines += [f"## {one.type}", _plain(one.summary), *([_plain(one.about)] if one.about else [])]
        if one.needs:
            lines.append("Needs " + ", ".join(f"`{need.package}`" for need in one.needs) + ".")
        for setting in one.settings:
            lines += _setting(setting._replace(name=f"{one.type}.{setting.name}"), 4)
    return "\n\n".join(lines)


def environments() -> str:
    return _adapters("env", _ENVIRONMENTS)


def policies() -> str:
    return _adapters("policy", _POLICIES)


def commands_page() -> str:
    table = [
        f"| [`{command}`](#{command.replace(' ', '-')}) | {_plain(purpose)} |"
        for command, purpose in commands().items()
    ]
    lines = [_COMMANDS, "\n".join(["| command | |", "|---|---|", *table])]
    for command in commands():
        _, parser = command_parser(command)
        lines += [f"## {command}", f"```text\n{_usage(parser)}\n```", _described(parser.description or "")]
        rows = [
            f"| {_code(_invocation(action))} | {_plain(_help(parser, action))} |"
            for action in parser._actions
            if action.help is not argparse.SUPPRESS and not isinstance(action, argparse._HelpAction)
        ]
        lines.append("\n".join(["| argument | |", "|---|---|", *rows]))
    return "\n\n".join(lines)


def _usage(parser: argparse.ArgumentParser) -> str:
    return " ".join(parser.format_usage().removeprefix("usage: ").split())


def _described(text: str) -> str:
    """A command's docstring; paragraphs with aligned lines stay as they are."""
    paragraphs = re.split(r"\n\n+", text)
    laid = re.compile(r"\S {2,}\S|^ {2,}", re.MULTILINE)
    return "\n\n".join(f"```text\n{one}\n```" if laid.search(one) else _plain(one) for one in paragraphs)


def _invocation(action: argparse.Action) -> str:
    if not action.option_strings:
        return str(action.metavar or action.dest)
    value = f" {action.metavar or action.dest.upper()}" if action.nargs != 0 else ""
    return ", ".join(action.option_strings) + value


def _help(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    return " ".join(parser._get_formatter()._expand_help(action).split()) if action.help else ""


def metrics() -> str:
    lines = [_METRICS]
    group = ""
    for one in documented():
        if (found := re.split(r"/(?=[^/]*$)|/<", one.names[0])[0]) != group:
            group = found
            lines.append(f"## {group} {{#{anchor(group)}-group}}")
        lines.append(f"#### {', '.join(f'`{name}`' for name in one.names)} {{#{anchor(one.names[0])}}}")
        if one.unit:
            lines.append(f'<p class="kind">{html.escape(one.unit)}</p>')
        lines.append(re.sub(r"\]\((?!\w+:)([^)#]*\.md)", r"](../\1", one.meaning))
    return "\n\n".join(lines)


def python_names() -> str:
    lines = ["# Python names", "The modules to import from; [From Python](../python-api.md) shows them in use."]
    for name, purpose in PUBLIC.items():
        module = importlib.import_module(name)
        lines += [f"## {name}", f"For {purpose}."]
        for public, found in _public(module):
            lines += [f"#### `{public}` {{#{anchor(f'{name}.{public}')}}}", *_described_name(public, found)]
    return "\n\n".join(lines)


def _public(module: Any) -> Iterator[tuple[str, Any]]:
    """Public names of a module: those of `__all__`, or those that it defines."""
    names = getattr(module, "__all__", None)
    for name in names or vars(module):
        found = getattr(module, name)
        own = getattr(found, "__module__", None) == module.__name__ and not name.startswith("_")
        if (names and not name.startswith("__")) or (own and (inspect.isclass(found) or inspect.isfunction(found))):
            yield name, found


def _described_name(name: str, found: Any) -> Iterator[str]:
    is_record = dataclasses.is_dataclass(found) or (inspect.isclass(found) and issubclass(found, tuple))
    if inspect.isclass(found) or inspect.isfunction(found):
        try:
            signature = str(inspect.signature(found))
        except ValueError:
            signature = ""
        if inspect.isclass(found):
            signature = "" if issubclass(found, BaseException) else signature.removesuffix(" -> None")
        yield f"```python\n{_wrapped(name, signature)}\n```"
    doc = inspect.getdoc(found) if getattr(found, "__doc__", None) and not isinstance(found, (str, int, tuple)) else ""
    if doc and not (is_record and doc.startswith(f"{name}(")):
        yield _plain(doc)
    if inspect.isclass(found):
        for key, method in vars(found).items():
            if inspect.isfunction(method) and not key.startswith("_") and method.__doc__:
                yield f"- `{key}`: {_plain(' '.join(inspect.getdoc(method).split()))}"


def _wrapped(name: str, signature: str) -> str:
    """A signature, one parameter a line if it is long."""
    signature = re.sub(r"<factory>|<object object at \w+>", "...", signature).replace("'", "")
    if len(name + signature) <= 100 or "(" not in signature:
        return name + signature
    inner, _, result = signature[1:].rpartition(")")
    return f"{name}(\n    " + re.sub(r", (?=\*?\*?\w+(?:: |=|,|$)|\*, )", ",\n    ", inner) + f"\n){result}"


def plugins_page() -> str:
    lines = [_PLUGINS, "| plugin | purpose | adds |\n|---|---|---|"]
    for name, plugin in plugins().items():
        module = importlib.import_module(f"polyrhythm.plugins.{name}")
        purpose = inspect.cleandoc(module.__doc__ or "").split("\n")[0]
        added = "; ".join(
            f"{kind.replace('_', ' ')} " + ", ".join(f"`{one}`" for one in names) for kind, names in plugin.adds.items()
        )
        lines[-1] += f"\n| `{name}` | {_plain(purpose)} | {added} |"
    return "\n\n".join(lines)


#: Comment in a page → generator of what stands there on the site.
PARTS: dict[str, Callable[[], str]] = {
    "<!-- entries of src/polyrhythm/error_codes.toml -->": error_entries,
    "<!-- sentences by paper -->": sentences_by_paper,
    "<!-- sentences by setting -->": sentences_by_setting,
}
#: Path below docs/ → its generator.
PAGES: dict[str, Callable[[], str]] = {
    "reference/commands.md": commands_page,
    "reference/settings.md": settings,
    "reference/environments.md": environments,
    "reference/policies.md": policies,
    "reference/metrics.md": metrics,
    "reference/python.md": python_names,
    "reference/plugins.md": plugins_page,
}
