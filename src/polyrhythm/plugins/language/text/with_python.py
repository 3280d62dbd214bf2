"""Python tool in a conversation: runs code of a message in the sandbox and replies with its output."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import cast

from polyrhythm.plugins.language.sandbox.tool import SandboxSettings, ToolCall, ToolOutcome, open_tool
from polyrhythm.plugins.language.text.base import enclosed
from polyrhythm.plugins.language.text.chat import Prompt
from polyrhythm.plugins.language.text.conversation import (
    Awaited,
    Conversation,
    ConversationTraits,
    FullConversation,
    Reply,
    conversation_traits,
)

#: What a prompt says of the tool.
INSTRUCTION = "Python between <python> and </python> is run, and what it prints is shown.\n"


def marked_code(message: str) -> str | None:
    """The last code between <python> and </python> in a message; None without one."""
    last = deque(enclosed(message, "<python>", "</python>"), maxlen=1)
    return last[0] if last else None


def shown_output(outcome: ToolOutcome) -> Reply:
    return Reply(f"<output>\n{outcome.text}</output>\n", done=False)


class WithPython:
    """A conversation in which a message with code runs it; other messages, and the expert, are the inner
    conversation's. The first row of a process starts the sandbox, and the last one that is closed ends it.

    code_in: the code of a message, None if it has none; shown: the reply to an outcome, by default the output between
    `<output>` and `</output>`, after which the episode continues. ConfigError: this machine has no sandbox.
    """

    def __init__(
        self,
        inner: Conversation,
        settings: SandboxSettings,
        code_in: Callable[[str], str | None] = marked_code,
        shown: Callable[[ToolOutcome], Reply] = shown_output,
    ) -> None:
        self._inner = cast(FullConversation, inner)
        self._code_in, self._shown = code_in, shown
        had = conversation_traits(inner)
        self.traits = ConversationTraits(prepare=True, awaits=True, drop=True, expert=had.expert, close=True)
        self._inner_closes = had.close
        self._tool, self._leave = open_tool(settings)
        self._call: ToolCall | None = None

    def begin(self, task: int, seed: int) -> Prompt:
        self.drop()
        return self._inner.begin(task, seed)

    def prepare(self, message: str) -> None:
        if (code := self._code_in(message)) is not None:
            self.drop()
            self._call = self._tool.start(code)

    def awaits(self) -> Awaited | None:
        return None if self._call is None else Awaited(self._call.socket.fileno(), self._call.deadline)

    def drop(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            self._tool.drop(call)

    def reply(self, message: str) -> Reply:
        if self._code_in(message) is None:
            return self._inner.reply(message)
        if self._call is None:
            self.prepare(message)
        call, self._call = self._call, None
        assert call is not None
        return self._shown(self._tool.finish(call))

    def expert(self) -> str:
        return self._inner.expert()

    def close(self) -> None:
        self.drop()
        self._leave()
        if self._inner_closes:
            self._inner.close()
