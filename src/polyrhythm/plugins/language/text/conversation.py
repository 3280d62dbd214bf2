"""The contract of a conversation: one row of a text environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import NamedTuple, Protocol

from polyrhythm.plugins.language.text.chat import Prompt


@dataclass(frozen=True, slots=True)
class Reply:
    """What a message leads to. text: the environment's answer, shown before the next message; done: the task ended;
    success: the task's own measure; metrics: values of `TextSettings.metrics`, of which any may be missing. A message
    that is cut gets no reply, and counts 0 in each."""

    text: str = ""
    reward: float = 0.0
    done: bool = True
    success: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)


class Conversation(Protocol):
    """One row of a text environment; it is begun again for every episode."""

    def begin(self, task: int, seed: int) -> Prompt:
        """The prompt: a text, or turns such as {"role": "system", "content": "…"}, which a chat template writes, and
        whose contents stand on lines of their own without one. Equal (task, seed) gives an equal prompt; `draw_apart`
        keeps those of evaluations apart."""
        ...

    def reply(self, message: str) -> Reply:
        """Answer a whole message, without the end-of-text token. A message that was cut at `max_new_tokens` does not
        get here: it ends the episode with reward 0."""
        ...


class Awaited(NamedTuple):
    """What a reply waits for: the descriptor that can be read once it has come; when to give up, by `time.monotonic`,
    which `reply` then says."""

    fileno: int
    deadline: float


@dataclass(frozen=True, slots=True)
class ConversationTraits:
    """Which optional methods of `FullConversation` a conversation has."""

    prepare: bool = False
    awaits: bool = False
    drop: bool = False
    expert: bool = False
    close: bool = False


class FullConversation(Conversation, Protocol):
    """A conversation with all optional methods; which are there, `conversation_traits` says."""

    def prepare(self, message: str) -> None:
        """Begin what `reply` will wait for; called for the messages of all rows before the first `reply`, so that slow
        replies, such as those of a tool, overlap."""
        ...

    def awaits(self) -> Awaited | None:
        """What `reply` to the prepared message would wait for, meanwhile other rows go on; None if nothing. It is not
        closed before `reply`, `drop` or `begin`."""
        ...

    def drop(self) -> None:
        """End what `prepare` has begun, if anything: no `reply` to it follows."""
        ...

    def expert(self) -> str:
        """A scripted expert's next message, for demonstrations; `reply` is called with it."""
        ...

    def close(self) -> None:
        """Free what the row has."""
        ...


def conversation_traits(conversation: object) -> ConversationTraits:
    """Its own `traits`, else the optional methods that it has."""
    declared = getattr(conversation, "traits", None)
    if isinstance(declared, ConversationTraits):
        return declared
    names = [one.name for one in fields(ConversationTraits)]
    return ConversationTraits(**{name: callable(getattr(conversation, name, None)) for name in names})
