"""Finds chat templates in model folders and renders them as `apply_chat_template` of transformers does.

A template is an untrusted Jinja program: it runs in Jinja's sandbox, on plain data, with limits of time and size.
transformers is not imported because simulators lack it; tests compare the tokens.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from datetime import date, datetime
from datetime import time as clock
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from polyrhythm.specs.model_folder import read_object

#: A turn: its role and its content.
Message = Mapping[str, str]

#: Limits: bytes of a template, characters of a rendering, and its seconds of CPU time.
_TEMPLATE_BYTES, _CHARACTERS, _SECONDS = 2**20, 2**24, 1.0
_CONFIG = "tokenizer_config.json"


class TemplateFault(ValueError):
    """A template cannot be read, rejects the turns or fails; the message says why."""


class FoundTemplate(NamedTuple):
    text: str
    origin: str


def find_template(folder: Path | None, name: str) -> FoundTemplate | None:
    """The template with this name (`default` for "") in a tokenizer's folder, or in a file. None: no name was given
    and the folder has no template. TemplateFault: the named template does not exist."""
    known = {} if folder is None else _templates(folder)
    if not name:
        return known.get("default")
    if name in known:
        return known[name]
    if (file := Path(name).expanduser()).is_file():
        return FoundTemplate(_text(file), str(file))
    names = f"; the tokenizer's folder has {', '.join(sorted(known))}" if known else ""
    raise TemplateFault(f"there is no such file{names}")


def _templates(folder: Path) -> dict[str, FoundTemplate]:
    """Templates by name. Separate files take precedence over tokenizer_config.json, as in transformers."""
    found: dict[str, FoundTemplate] = {}
    for file in ("chat_template.json", _CONFIG):  # the former: of older processors
        entry = read_object(folder / file).get("chat_template")
        listed = entry if isinstance(entry, list) else [{"name": "default", "template": entry}]
        for one in listed:
            if isinstance(one, dict) and isinstance(one.get("template"), str):
                found[str(one.get("name"))] = FoundTemplate(one["template"], str(folder / file))
    single = folder / "chat_template.jinja"
    named = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    for path in (single, *named) if single.is_file() else named:
        found["default" if path == single else path.stem] = FoundTemplate(_text(path), str(path))
    return found


def _text(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            read = stream.read(_TEMPLATE_BYTES + 1)
        return read.decode().replace("\r\n", "\n")
    except (OSError, ValueError) as error:
        raise TemplateFault(f"{file} cannot be read as text ({error})") from error


def special_tokens(folder: Path | None) -> dict[str, str]:
    """Special tokens by their names in templates: `bos_token`, `eos_token` and the like."""
    found: dict[str, str] = {}
    if folder is None:
        return found
    for file in ("special_tokens_map.json", _CONFIG):
        content = read_object(folder / file)
        extra = content.get("extra_special_tokens")
        for name, value in {**content, **(extra if isinstance(extra, dict) else {})}.items():
            text = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(text, str):
                found[name] = text
    return found


class ChatTemplate:
    """A compiled template. fixed: its variables other than messages; today: the date for templates that print it."""

    def __init__(self, text: str, fixed: Mapping[str, Any], today: date | None) -> None:
        if len(text.encode(errors="replace")) > _TEMPLATE_BYTES:
            raise TemplateFault(f"it has more than {_TEMPLATE_BYTES // 2**20} MiB")
        self._fixed = json.loads(json.dumps(dict(fixed)))
        environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        environment.globals |= {"raise_exception": _raise, "strftime_now": _clock(today)}
        environment.globals.pop("lipsum")
        environment.filters |= {"tojson": _as_json, "_counted": _counted, "_measured": _measured}
        try:
            tree = environment.parse(text)
            _limit(tree)
            self._template = Template.from_code(environment, environment.compile(tree), environment.globals)
        except (TemplateError, RecursionError, SyntaxError) as error:
            raise TemplateFault(f"it is not a valid template ({_words(error)})") from error

    def render(self, messages: Sequence[Message], *, ask: bool) -> str:
        """Render the turns. ask: append the start of the next assistant turn. TemplateFault: the template rejects
        them, fails, or exceeds a limit."""
        limits = _Limits()
        token = _limits.set(limits)
        chat = {"messages": [dict(message) for message in messages], "tools": None, "documents": None}
        try:
            parts = []
            for part in self._template.generate({**self._fixed, **chat, "add_generation_prompt": ask}):
                limits.take(len(part))
                parts.append(part)
            return "".join(parts)
        except TemplateError as error:
            raise TemplateFault(_words(error)) from error
        except Exception as error:
            raise TemplateFault(f"it raised {type(error).__name__}: {_words(error)}") from error
        finally:
            _limits.reset(token)


class _Limits:
    """Remaining time and characters of one rendering."""

    def __init__(self) -> None:
        self._end, self._characters = time.thread_time() + _SECONDS, _CHARACTERS

    def check(self) -> None:
        if time.thread_time() > self._end:
            raise TemplateError(f"it takes more than {_SECONDS:g} s")

    def take(self, characters: int) -> None:
        self._characters -= characters
        if self._characters < 0:
            raise TemplateError(f"it makes more than {_CHARACTERS // 2**20} million characters")


_limits: ContextVar[_Limits] = ContextVar("limits of a rendering")


class _Sandbox(ImmutableSandboxedEnvironment):
    """Counts calls and operators against the limits of a rendering; `_limit` counts loops and joined texts."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def call(self, *args: Any, **kwargs: Any) -> Any:
        _limits.get().check()
        return super().call(*args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        size = max(len(part) if isinstance(part, str | list | tuple) else 0 for part in (left, right))
        times = next((abs(part) for part in (left, right) if isinstance(part, int)), 1) if operator == "*" else 1
        if operator == "**" or (operator == "%" and isinstance(left, str)):
            raise SecurityError(f"{operator} is not allowed here")
        _limits.get().take(size * times)
        return super().call_binop(context, operator, left, right)


def _limit(tree: nodes.Template) -> None:
    for loop in tree.find_all(nodes.For):
        loop.iter = nodes.Filter(loop.iter, "_counted", [], [], None, None)
    for joined in tree.find_all(nodes.Concat):
        joined.nodes = [nodes.Filter(part, "_measured", [], [], None, None) for part in joined.nodes]


def _counted(items: Iterable[Any]) -> Iterator[Any]:
    check = _limits.get().check
    for item in items:
        check()
        yield item


def _measured(part: Any) -> Any:
    _limits.get().take(len(part) if isinstance(part, str) else 0)
    return part


class _Generation(Extension):
    """Ignores `{% generation %}` blocks, which mark assistant turns for training masks; masks are computed
    elsewhere."""

    tags = {"generation"}  # noqa: RUF012 - of jinja2

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> None:
    raise TemplateError(str(message))


def _as_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _clock(today: date | None) -> Callable[[str], str]:
    def strftime_now(form: str) -> str:
        if today is None:
            raise TemplateError("it writes today's date, so that tokens would differ from day to day; set date")
        return datetime.combine(today, clock()).strftime(form)

    return strftime_now


def _words(error: BaseException) -> str:
    line = f", line {error.lineno}" if isinstance(error, TemplateSyntaxError) else ""
    return f"{str(error).strip() or type(error).__name__:.200}{line}"
