"""What differs between servers: how an answer is asked for and read, and how weights are given."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import NamedTuple, Protocol

from polyrhythm.plugins.language.causal_lm.servers.client import ServerClient
from polyrhythm.plugins.language.causal_lm.servers.stream import ServerStream


class Part(NamedTuple):
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

    def answer(self, stream: ServerStream) -> Generator[Part, None, None]:
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
