"""Python tool in a conversation: runs code of a message in the sandbox and replies with its output."""

from __future__ import annotations

from collections import deque
from typing import cast

from polyrhythm.plugins.language.sandbox.tool import (
    PythonTool,
    SandboxSettings,
    ToolCall,
    ToolOutcome,
    close_tool,
    open_tool,
)
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

#: Around code in a message.
_MARKS = "<python>", "</python>"
#: What a prompt says of the tool.
INSTRUCTION = "Python between <python> and </python> is run, and what it prints is shown.\n"


class PythonRunner:
    """The Python tool of one row, one call at a time. The first row of a process starts the sandbox."""

    def __init__(self, settings: SandboxSettings) -> None:
        self._settings = settings
        self._tool: PythonTool | None = open_tool(settings)
        self._call: ToolCall | None = None

    def start(self, code: str) -> None:
        """Begin a call; cancels the previous one."""
        self.drop()
        assert self._tool is not None
        self._call = self._tool.start(code)

    def awaits(self) -> Awaited | None:
        """The end of the running call; None if there is none."""
        return None if self._call is None else Awaited(self._call.socket.fileno(), self._call.deadline)

    def finish(self, code: str) -> ToolOutcome:
        """Outcome of the running call, or of running `code` if there is none. Raises SandboxLost."""
        if self._call is None:
            self.start(code)
        call, self._call = self._call, None
        assert self._tool is not None
        assert call is not None
        return self._tool.finish(call)

    def drop(self) -> None:
        """Cancel the running call, if any."""
        call, self._call = self._call, None
        if self._tool is not None and call is not None:
            self._tool.drop(call)

    def close(self) -> None:
        """Release the tool; the last release in a process ends the sandbox."""
        self.drop()
        if self._tool is not None:
            self._tool = None
            close_tool(self._settings)


class WithPython:
    """A conversation in which a message with `<python>code</python>` runs the last such code; other messages, and the
    expert, are the inner conversation's.

    The reply is the output, between `<output>` and `</output>`, and the episode continues. ConfigError: the sandbox is
    not available on this machine.
    """

    def __init__(self, inner: Conversation, settings: SandboxSettings) -> None:
        self._inner, self._runner = cast(FullConversation, inner), PythonRunner(settings)
        had = conversation_traits(inner)
        self.traits = ConversationTraits(prepare=True, awaits=True, drop=True, expert=had.expert, close=True)
        self._inner_closes = had.close

    def begin(self, task: int, seed: int) -> Prompt:
        self._runner.drop()
        return self._inner.begin(task, seed)

    def prepare(self, message: str) -> None:
        if (code := _code_in(message)) is not None:
            self._runner.start(code)

    def awaits(self) -> Awaited | None:
        return self._runner.awaits()

    def drop(self) -> None:
        self._runner.drop()

    def reply(self, message: str) -> Reply:
        code = _code_in(message)
        if code is None:
            return self._inner.reply(message)
        return Reply(f"<output>\n{self._runner.finish(code).text}</output>\n", done=False)

    def expert(self) -> str:
        return self._inner.expert()

    def close(self) -> None:
        self._runner.close()
        if self._inner_closes:
            self._inner.close()


def _code_in(message: str) -> str | None:
    """The last code block of a message; None without one."""
    last = deque(enclosed(message, *_MARKS), maxlen=1)
    return last[0] if last else None
