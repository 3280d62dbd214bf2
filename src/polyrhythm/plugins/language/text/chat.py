"""Conversations in the form of a model's chat template, extended token by token.

Invariant: the tokens of a turn are those of the previous turn, the message as sampled, and the template's text after
it: the message's end unless it was sampled, the environment's reply, and the start of the next message. No earlier
token changes, and no message is tokenized again.

The template's text after a message comes from a rendering of all turns with a placeholder for each message: a template
may strip or search messages, and this way it never processes model output.
"""

from __future__ import annotations

import copy
import datetime as dt
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from polyrhythm.errors import ConfigError
from polyrhythm.plugins.language.text.tokenizers import CHARACTERS, Tokenizer
from polyrhythm.specs.model_folder import read_object

#: A turn: its role and its content.
Message = Mapping[str, str]
#: The environment's prompt: a user's text, or several turns.
Prompt = str | Sequence[Message]
#: Stand-ins for a message and a prompt, of characters that no template looks for or strips.
_STAND_IN, _PROMPT = "\ue000message\ue001", "\ue000prompt\ue001"
#: A message with reasoning, in the form in which templates write one.
_REASONED = "<think>\nfirst\n</think>\n\nsecond"
#: Characters of a text that an error shows.
_SHOWN = 40
#: Limits: bytes of a template, characters of a rendering, and its seconds of CPU time.
_TEMPLATE_BYTES, _CHARACTERS, _SECONDS = 2**20, 2**24, 1.0
_CONFIG = "tokenizer_config.json"


class ChatSettings(BaseModel):
    """Settings of the chat template that formats turns, as `apply_chat_template` of transformers."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    template: str = ""
    """A file, or the name of a template in the tokenizer's folder; empty for the folder's default."""
    system: str = ""
    """The system turn at the beginning, unless the environment's prompt has one; empty for none."""
    reply_role: Annotated[str, Field(min_length=1)] = "user"
    """Role of the environment's replies, such as tool."""
    variables: Mapping[str, Any] = {}
    """Further variables of the template, such as {enable_thinking: false}."""
    date: dt.date | None = None
    """The date for templates that write today's."""
    earlier: Literal["refuse", "keep"] = "refuse"
    """refuse: a template that changes earlier turns when a turn is added, such as by leaving out their reasoning, is an
    error; keep: earlier turns stay as they were sampled."""


def _tag(value: Any) -> str:
    return "ChatSettings" if isinstance(value, Mapping | ChatSettings) else "word"


#: A word, or settings of a template.
ChatChoice = Annotated[
    Annotated[Literal["auto", "none"], Tag("word")] | Annotated[ChatSettings, Tag("ChatSettings")], Discriminator(_tag)
]


class Chat:
    """A template with a tokenizer. tokenizer: prefers the template's end of a message; lead: spaces that the
    template writes before a message, so that the model starts with them; gap: spaces that it writes between a
    message and its end, omitted because the end was sampled without them."""

    def __init__(self, what: str, settings: ChatSettings, template: ChatTemplate, tokenizer: Tokenizer) -> None:
        self.what, self.settings, self._template = what, settings, template
        self.tokenizer, self.lead, self.gap = copy.copy(tokenizer), "", ""
        self.tokenizer.start = ()  # the template writes it
        opening = self.opening(_PROMPT)
        before, whole = self.render(opening), self.render([*opening, _turn("assistant", _STAND_IN)], ask=False)
        lead, _, after = whole.removeprefix(before).partition(_STAND_IN)
        if lead.isspace():
            self.lead = lead
        end = after.lstrip(" ")
        ids = [] if tokenizer.lacking(end) else tokenizer.encode(end)
        if ids and ids[0] in tokenizer.marks:
            self.gap = after[: len(after) - len(end)]
            self.tokenizer.ends = tuple(dict.fromkeys((ids[0], *tokenizer.ends)))
        head, _, tail = before.partition(_PROMPT)
        self._around = self._decoded(head), self._decoded(tail)

    def opening(self, prompt: Prompt) -> list[Message]:
        turns = [_turn("user", prompt)] if isinstance(prompt, str) else list(prompt)
        system = self.settings.system
        return [_turn("system", system), *turns] if system and turns[0]["role"] != "system" else turns

    def asked(self, prompt: str) -> str:
        """The user's text in a decoded prompt, without template markup; the whole prompt if it has other turns."""
        head, tail = self._around
        whole = prompt.startswith(head) and prompt.endswith(tail)
        return prompt[len(head) : len(prompt) - len(tail)] if whole else prompt

    def _decoded(self, text: str) -> str:
        return "" if self.tokenizer.lacking(text) else self.tokenizer.decode(self.tokenizer.encode(text))

    def render(self, turns: list[Message], *, ask: bool = True) -> str:
        """Render the turns. TemplateFault: the template rejects them or fails."""
        try:
            return self._template.render(turns, ask=ask)
        except TemplateFault as fault:
            roles = ", ".join(turn["role"] for turn in turns)
            raise TemplateFault(f"{self.what}: turns of {roles}: {fault}") from fault

    def check(self, turns: int) -> None:
        """Try at most three of `turns` turns. ConfigError: the template rejects them, or changes earlier turns."""
        try:
            for message in (_STAND_IN, *([_REASONED] if self.settings.earlier == "refuse" else [])):
                talk = ChatTurns(self, "a")
                for _ in range(min(turns, 3) - 1):
                    talk.reply("b", message)
        except TemplateFault as fault:
            raise ConfigError(str(fault)) from fault


class ChatTurns:
    """One conversation. shown: the newest part of the context, up to the start of the next message."""

    def __init__(self, chat: Chat, prompt: Prompt) -> None:
        self._chat, self._turns = chat, chat.opening(prompt)
        self._text = self.shown = chat.render(self._turns)  # with placeholders for messages

    def reply(self, text: str, message: str = _STAND_IN) -> str:
        """Add the environment's reply; return the text from the end of the newest message to the start of the next.
        message: placeholder for the newest one. TemplateFault: the template changes earlier turns, or fails."""
        chat, text = self._chat, text.replace(message, "")  # a model may have had a tool print the placeholder
        self._turns += [_turn("assistant", message), _turn(chat.settings.reply_role, text)]
        found, before = chat.render(self._turns), self._text + chat.lead + message
        if not found.startswith(before) and chat.settings.earlier == "refuse":
            raise TemplateFault(f"{chat.what}: {_change(before, found, message)}")
        if message not in found:
            raise TemplateFault(f"{chat.what}: it leaves out the assistant's message; use another template")
        self._text, self.shown = found, found.rpartition(message)[2].removeprefix(chat.gap)
        return self.shown


def has_template(tokenizer: str) -> bool:
    """Whether the tokenizer's folder has a chat template. tokenizer: the setting."""
    try:
        return find_template(_folder(tokenizer), "") is not None
    except TemplateFault:
        return False


def _folder(tokenizer: str) -> Path | None:
    return None if tokenizer == CHARACTERS else Path(tokenizer).expanduser()


def open_chat(setting: str, chat: ChatSettings | Literal["auto"], tokenizer: Tokenizer) -> Chat | None:
    """The tokenizer's chat template, opened once per process; None if `chat` is `auto` and there is none."""
    return _opened(setting, chat if chat == "auto" else chat.model_dump_json(), tokenizer)


@lru_cache(maxsize=8)
def _opened(setting: str, chat: str, tokenizer: Tokenizer) -> Chat | None:
    settings = ChatSettings() if chat == "auto" else ChatSettings.model_validate_json(chat)
    folder, named = _folder(setting), f"env.chat.template = {settings.template}"
    try:
        found = find_template(folder, settings.template)
    except TemplateFault as fault:
        raise ConfigError(f"{named}: {fault}; name one of these, or a file") from fault
    if found is None:
        if chat == "auto":
            return None
        raise ConfigError(
            f"env.chat: there is no chat template for {tokenizer.origin}; name a file in env.chat.template, or set "
            "env.chat to none"
        )
    what = named if settings.template else f"env.chat{' = auto' if chat == 'auto' else ''} ({found.origin})"
    try:
        special = {} if folder is None else special_tokens(folder)
        template = ChatTemplate(found.text, {**special, **settings.variables}, settings.date)
        return Chat(what, settings, template, tokenizer)
    except TemplateFault as fault:
        problem = str(fault) if str(fault).startswith(what) else f"{what}: {fault}"
        raise ConfigError(f"{problem}; correct env.chat, or set it to none for plain text") from fault


def _turn(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _change(before: str, found: str, message: str) -> str:
    ways = (
        "set env.max_turns to 1, name a template that leaves them as they are in env.chat.template, or set "
        "env.chat.earlier to keep, for turns as they were sampled"
    )
    if message == _REASONED:
        return f"it writes earlier messages without what stands between <think> and </think>; {ways}"
    first = next((i for i, pair in enumerate(zip(before, found, strict=False)) if pair[0] != pair[1]), len(found))
    old, new = (text[first : first + _SHOWN].replace(_STAND_IN, "…") for text in (before, found))
    return f"once a turn is added it writes {new!r} where {old!r} stood before; {ways}"


class TemplateFault(ValueError):
    """A template cannot be read, rejects the turns or fails; the message says why."""


class FoundTemplate(NamedTuple):
    text: str
    origin: str


def find_template(folder: Path | None, name: str) -> FoundTemplate | None:
    """The template with this name (`default` for "") in a tokenizer's folder, or in a file. None: no name was given
    and the folder has no template. TemplateFault: the named template does not exist.

    Separate files take precedence over tokenizer_config.json, as in transformers.
    """
    known: dict[str, FoundTemplate] = {}
    if folder is not None:
        for config in ("chat_template.json", _CONFIG):  # the former: of older processors
            entry = read_object(folder / config).get("chat_template")
            for one in entry if isinstance(entry, list) else [{"name": "default", "template": entry}]:
                if isinstance(one, dict) and isinstance(one.get("template"), str):
                    known[str(one.get("name"))] = FoundTemplate(one["template"], str(folder / config))
        for path in folder.glob("chat_template.jinja"):
            known["default"] = FoundTemplate(_text(path), str(path))
        for path in (folder / "additional_chat_templates").glob("*.jinja"):
            known[path.stem] = FoundTemplate(_text(path), str(path))
    if not name or name in known:
        return known.get(name or "default")
    if (file := Path(name).expanduser()).is_file():
        return FoundTemplate(_text(file), str(file))
    names = f"; the tokenizer's folder has {', '.join(sorted(known))}" if known else ""
    raise TemplateFault(f"there is no such file{names}")


def _text(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            return stream.read(_TEMPLATE_BYTES + 1).decode().replace("\r\n", "\n")
    except (OSError, ValueError) as error:
        raise TemplateFault(f"{file} cannot be read as text ({error})") from error


def special_tokens(folder: Path) -> dict[str, str]:
    """Special tokens by their names in templates: `bos_token`, `eos_token` and the like."""
    found: dict[str, str] = {}
    for file in ("special_tokens_map.json", _CONFIG):
        content = read_object(folder / file)
        extra = content.get("extra_special_tokens")
        for name, value in {**content, **(extra if isinstance(extra, dict) else {})}.items():
            text = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(text, str):
                found[name] = text
    return found


class ChatTemplate:
    """A compiled template, rendered as `apply_chat_template` of transformers does, which simulators lack; tests compare
    the tokens. It is an untrusted program: it runs in Jinja's sandbox, on plain data, with limits of time and size.

    fixed: its variables other than messages; today: the date for templates that print it.
    """

    def __init__(self, text: str, fixed: Mapping[str, Any], today: dt.date | None) -> None:
        if len(text.encode(errors="replace")) > _TEMPLATE_BYTES:
            raise TemplateFault(f"it has more than {_TEMPLATE_BYTES // 2**20} MiB")
        self._fixed = json.loads(json.dumps(dict(fixed)))
        environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        environment.globals |= {"raise_exception": self._raise, "strftime_now": self._strftime_now}
        environment.globals.pop("lipsum")
        environment.filters |= {"tojson": _as_json, "_counted": _counted, "_measured": _measured}
        self._today = today
        try:
            tree = environment.parse(text)
            for loop in tree.find_all(nodes.For):
                loop.iter = nodes.Filter(loop.iter, "_counted", [], [], None, None)
            for joined in tree.find_all(nodes.Concat):
                joined.nodes = [nodes.Filter(part, "_measured", [], [], None, None) for part in joined.nodes]
            self._template = Template.from_code(environment, environment.compile(tree), environment.globals)
        except (TemplateError, RecursionError, SyntaxError) as error:
            raise TemplateFault(f"it is not a valid template ({_words(error)})") from error

    def render(self, messages: Sequence[Message], *, ask: bool) -> str:
        """ask: append the start of the next assistant turn. TemplateFault: it rejects the turns or fails."""
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

    @staticmethod
    def _raise(message: str) -> None:
        raise TemplateError(str(message))

    def _strftime_now(self, form: str) -> str:
        if self._today is None:
            raise TemplateError("it writes today's date, so that tokens would differ from day to day; set date")
        return dt.datetime.combine(self._today, dt.time()).strftime(form)


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
    """Counts calls and operators against the limits of a rendering; filters count loops and joined texts."""

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


def _counted(items: Iterable[Any]) -> Iterator[Any]:
    check = _limits.get().check
    for item in items:
        check()
        yield item


def _measured(part: Any) -> Any:
    _limits.get().take(len(part) if isinstance(part, str) else 0)
    return part


class _Generation(Extension):
    """Ignores `{% generation %}` blocks, which mark assistant turns for training masks."""

    tags = {"generation"}  # noqa: RUF012 - of jinja2

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _as_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _words(error: BaseException) -> str:
    line = f", line {error.lineno}" if isinstance(error, TemplateSyntaxError) else ""
    return f"{str(error).strip() or type(error).__name__:.200}{line}"
