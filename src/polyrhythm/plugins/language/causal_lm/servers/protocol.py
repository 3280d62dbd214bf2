"""Interface of a server protocol: how answers are requested and parsed, and how weights are loaded."""

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
    """A request at the server. version: of its weights; tokens, logprobs: since the stream began; reason: why it
    ended, "" while it runs; error: the exception that ended it; failures: consecutive lost connections before it;
    prompt_tokens, shared_tokens: size of its prompt, and how much of it the server had cached; line: its connection."""

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
        """Tokens of the answer from before the stream began."""
        return [] if self.request.prefix is None else self.request.prefix.tokens.tolist()

    @property
    def over(self) -> bool:
        return bool(self.reason) or self.error is not None

    @property
    def lost(self) -> bool:
        """Whether its connection was lost, so that it may be resumed."""
        return isinstance(self.error, ServerLost)

    def generated(self, *, finished: bool) -> Generated:
        """The prefix and the tokens of the stream."""
        tokens, logprobs = np.array(self.tokens, np.int32), np.array(self.logprobs, np.float32)
        versions = np.full(len(self.tokens), self.version, np.int32)
        if (before := self.request.prefix) is not None:
            tokens = np.concatenate([before.tokens, tokens])
            logprobs = np.concatenate([before.logprobs, logprobs])
            versions = np.concatenate([before.versions, versions])
        return Generated(self.request.request_id, tokens, logprobs, versions, finished)


class AnswerPart(NamedTuple):
    """One event's addition to an answer.

    reason: "stop" or "length" if the answer ended by itself, "" while it runs; matched: the stop that ended it;
    prompt_tokens, shared_tokens: prompt tokens known so far, and how many of them were cached; weights: version of the
    weights as the server names it, None if it does not.
    """

    tokens: list[int]
    logprobs: list[float]
    reason: str = ""
    matched: object = None
    prompt_tokens: int = 0
    shared_tokens: int = 0
    weights: str | None = None


class ServerProtocol(Protocol):
    """One kind of server. Every call raises RunHalted on an unexpected answer."""

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
        """Check at the start that the server is of this kind and accepts sequences of `length` tokens."""
        ...

    def answer(self, stream: ServerStream) -> Generator[AnswerPart, None, None]:
        """Parts of an answer as they arrive; the last one has a reason."""
        ...

    def weights(self) -> str | None:
        """Version of the server's weights, None if unknown."""
        ...

    def abort(self, stream: ServerStream) -> None:
        """End one stream at the server."""
        ...

    def pause(self) -> None:
        """End all streams and accept none until `resume`."""
        ...

    def load(self, folder: Path, version: int) -> None:
        """Load weights from a folder and set their version. NotLoaded: the server did not load them."""
        ...

    def resume(self) -> None:
        """Accept streams again."""
        ...


class NotLoaded(Exception):
    """The server answered that it did not load weights; the message is its answer."""
