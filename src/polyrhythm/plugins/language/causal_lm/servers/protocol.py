"""What differs between servers: how an answer is asked for and read, and how weights are given."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from polyrhythm.errors import RunHalted
from polyrhythm.plugins.language.causal_lm.servers.client import Line, ServerClient, ServerLost
from polyrhythm.policies.engine import EngineRequest, Generated


@dataclass(slots=True)
class ServerStream:
    """A request at the server. version: of its weights; tokens, logprobs: since it began; reason: why it ended, ""
    before. error: what ended it otherwise. failures: lost connections in a row before it. prompt_tokens, shared_tokens:
    of its prompt, and those that the server had computed before. line: its connection."""

    request: EngineRequest
    name: str
    version: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reason: str = ""
    error: RunHalted | None = None
    failures: int = 0
    prompt_tokens: int = 0
    shared_tokens: int = 0
    line: Line = field(default_factory=Line)

    @property
    def prefix(self) -> list[int]:
        """Tokens of the answer that were there before the stream began."""
        return [] if self.request.prefix is None else self.request.prefix.tokens.tolist()

    @property
    def over(self) -> bool:
        return bool(self.reason) or self.error is not None

    @property
    def lost(self) -> bool:
        """Its connection was lost, and it may go on."""
        return isinstance(self.error, ServerLost)

    def generated(self, *, finished: bool) -> Generated:
        """The prefix and what the stream has added."""
        tokens, logprobs = np.array(self.tokens, np.int32), np.array(self.logprobs, np.float32)
        versions = np.full(len(self.tokens), self.version, np.int32)
        if (before := self.request.prefix) is not None:
            tokens = np.concatenate([before.tokens, tokens])
            logprobs = np.concatenate([before.logprobs, logprobs])
            versions = np.concatenate([before.versions, versions])
        return Generated(self.request.request_id, tokens, logprobs, versions, finished)


class AnswerPart(NamedTuple):
    """What an event adds to an answer.

    reason: why the answer ended, "stop" or "length" where it did so by itself, "" while it goes on; matched: what
    stopped it; prompt_tokens, shared_tokens: so far known of its prompt, and those of them that were computed before;
    weights: the version of the weights as the server names it, None where it names none.
    """

    tokens: list[int]
    logprobs: list[float]
    reason: str = ""
    matched: object = None
    prompt_tokens: int = 0
    shared_tokens: int = 0
    weights: str | None = None


class ServerProtocol(Protocol):
    """One kind of server. Every call: RunHalted, if the server says what it should not."""

    client: ServerClient
    path: str
    """Where answers are asked for."""
    ends_streams: bool
    """Whether `abort` and `pause` have the server end streams with what they had; else their connections are cut."""
    fixed: bool
    """Whether its weights cannot be changed: it was started with them."""
    remedy: str
    """How to start it so that its log-probs are those of what is sampled."""

    def begin(self, length: int) -> None:
        """At the start: the server is of this kind, and takes sequences of `length` tokens."""
        ...

    def answer(self, stream: ServerStream) -> Generator[AnswerPart, None, None]:
        """The parts of an answer as they come; the last has a reason."""
        ...

    def weights(self) -> str | None:
        """The version of its weights, None where it cannot tell."""
        ...

    def abort(self, stream: ServerStream) -> None:
        """End one stream at the server."""
        ...

    def pause(self) -> None:
        """End all streams, and begin none until `resume`."""
        ...

    def load(self, folder: Path, version: int) -> None:
        """Load weights from a folder, and name them so. `NotLoaded`: it did not."""
        ...

    def resume(self) -> None:
        """Begin streams again."""
        ...


class NotLoaded(Exception):
    """The server answered that it did not load weights, with this."""
