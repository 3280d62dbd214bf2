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
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from polyrhythm.errors import ConfigError
from polyrhythm.plugins.language.text.chat_template import (
    ChatTemplate,
    Message,
    TemplateFault,
    find_template,
    special_tokens,
)
from polyrhythm.plugins.language.text.tokenizers import CHARACTERS, Tokenizer

#: The environment's prompt: a user's text, or several turns.
Prompt = str | Sequence[Message]
#: Stand-ins for a message and a prompt, of characters that no template looks for or strips.
_STAND_IN, _PROMPT = "\ue000message\ue001", "\ue000prompt\ue001"
#: A message with reasoning, in the form in which templates write one.
_REASONED = "<think>\nfirst\n</think>\n\nsecond"
#: Characters of a text that an error shows.
_SHOWN = 40


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
        """The turns before the first message."""
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
        """Try a conversation of `turns` turns, at most three. ConfigError: the template rejects it, or changes
        earlier turns."""
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


def has_template(tokenizer_setting: str) -> bool:
    folder = _folder(tokenizer_setting)
    try:
        return find_template(folder, "") is not None
    except TemplateFault:
        return False


def _folder(tokenizer_setting: str) -> Path | None:
    return None if tokenizer_setting == CHARACTERS else Path(tokenizer_setting).expanduser()


def open_chat(tokenizer_setting: str, chat: ChatSettings | Literal["auto"], tokenizer: Tokenizer) -> Chat | None:
    """The chat template of a tokenizer, opened once per process; None if `chat` is `auto` and the folder has none."""
    key: Any = tokenizer
    return _opened(tokenizer_setting, chat if chat == "auto" else chat.model_dump_json(), key)


@lru_cache(maxsize=8)
def _opened(tokenizer_setting: str, chat: str, tokenizer: Tokenizer) -> Chat | None:
    settings = ChatSettings() if chat == "auto" else ChatSettings.model_validate_json(chat)
    folder = _folder(tokenizer_setting)
    named = f"env.chat.template = {settings.template}"
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
        template = ChatTemplate(found.text, {**special_tokens(folder), **settings.variables}, settings.date)
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
