"""The contract of a conversation: one row of a text environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import NamedTuple, Protocol

from polyrhythm.plugins.language.text.chat import Prompt


@dataclass(frozen=True, slots=True)
class Reply:
    """Result of a message. text: the environment's answer, shown before the next message; done: the task ended;
    success: the task's own measure; metrics: values of `TextSettings.metrics`, any of which may be missing.

    A message that is cut gets no reply, and counts 0 in each metric.
    """

    text: str = ""
    reward: float = 0.0
    done: bool = True
    success: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)


class Conversation(Protocol):
    """One row of a text environment; `begin` starts each episode."""

    def begin(self, task: int, seed: int) -> Prompt:
        """Start an episode and return its prompt: a text, or turns such as {"role": "system", "content": "…"}.

        A chat template formats turns; without one, each content is a line. Equal (task, seed) gives an equal prompt;
        `draw_apart` keeps evaluation prompts out of training.
        """

    def reply(self, message: str) -> Reply:
        """Answer a complete message, without its end-of-text token. A message cut at `max_new_tokens` is not passed
        here: it ends the episode with reward 0."""


class Awaited(NamedTuple):
    """What a reply waits for: a descriptor that becomes readable when it is ready, and a deadline by
    `time.monotonic`, after which `reply` is called and reports the timeout."""

    fileno: int
    deadline: float


@dataclass(frozen=True, slots=True)
class ConversationTraits:
    """Whether a conversation has each of the optional methods of `FullConversation`."""

    prepare: bool = False
    awaits: bool = False
    drop: bool = False
    expert: bool = False
    close: bool = False


class FullConversation(Conversation, Protocol):
    """A conversation with all optional methods; `conversation_traits` tells which of them exist."""

    def prepare(self, message: str) -> None:
        """Start the work of `reply`. Called for the messages of all rows before the first `reply`, so that slow
        replies, such as tool calls, overlap."""

    def awaits(self) -> Awaited | None:
        """What `reply` to the prepared message would wait for, while other rows continue; None if nothing. The
        descriptor stays open until `reply`, `drop` or `begin`."""

    def drop(self) -> None:
        """Cancel the work of `prepare`, if any; `reply` will not be called for it."""

    def expert(self) -> str:
        """A scripted expert's next message, for demonstrations; it is passed to `reply`."""

    def close(self) -> None:
        """Release the row's resources."""


def conversation_traits(conversation: object) -> ConversationTraits:
    """Its own `traits` if present, else derived from its methods."""
    declared = getattr(conversation, "traits", None)
    if isinstance(declared, ConversationTraits):
        return declared
    names = [one.name for one in fields(ConversationTraits)]
    return ConversationTraits(**{name: callable(getattr(conversation, name, None)) for name in names})
