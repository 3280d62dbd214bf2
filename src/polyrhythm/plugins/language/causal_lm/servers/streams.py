"""Streams of answers at a server: what is asked for, by which protocol, and the threads that read the answers.

A stream has ended when it has a reason or an error. Code that changes a stream holds `news` and notifies it.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from polyrhythm.errors import RunHalted
from polyrhythm.plugins.language.causal_lm.engine import Sampling
from polyrhythm.plugins.language.causal_lm.engine_settings import ServerSettings
from polyrhythm.plugins.language.causal_lm.network import CausalNetwork
from polyrhythm.plugins.language.causal_lm.servers.client import Line, ServerClient, ServerLost
from polyrhythm.policies.engine import Progress


@dataclass(slots=True)
class ServerStream(Progress):
    """A request at the server. version: of its weights; failures: consecutive lost connections before it; name: a
    prefix of no other, as servers abort by prefixes; reason: why it ended, "" while it runs; error: the exception that
    ended it; prompt_tokens, shared_tokens: size of its prompt, and how much of it the server had cached; line: its
    connection."""

    version: int = -1
    failures: int = 0
    name: str = field(default_factory=lambda: uuid.uuid4().hex)
    reason: str = ""
    error: RunHalted | None = None
    prompt_tokens: int = 0
    shared_tokens: int = 0
    line: Line = field(default_factory=Line)

    @property
    def begun(self) -> bool:
        """Whether it has tokens besides the prefix of its request."""
        return len(self.tokens) > (0 if self.request.prefix is None else len(self.request.prefix.tokens))

    @property
    def over(self) -> bool:
        return bool(self.reason) or self.error is not None

    @property
    def lost(self) -> bool:
        """Whether its connection was lost, so that it may be resumed."""
        return isinstance(self.error, ServerLost)


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


class NotLoaded(Exception):
    """The server answered that it did not load weights; the message is its answer."""


class ServerProtocol:
    """One kind of server. Every call raises RunHalted on an unexpected answer.

    kind: its name for errors; path: where answers are asked for; never: the bias of tokens that the environment lacks;
    ends_streams: whether `abort` and `pause` have the server end streams with what they had, else their connections
    are cut; fixed: whether its weights cannot be changed; remedy: how to start it so that its log-probs are those of
    what is sampled.
    """

    kind: ClassVar[str]
    path: ClassVar[str]
    never: ClassVar[float]
    ends_streams: ClassVar[bool]
    remedy: ClassVar[str]
    fixed: bool = False

    def __init__(
        self,
        how: ServerSettings,
        network: CausalNetwork,
        sampling: Sampling,
        stops: Sequence[int],
        key: str = "",
    ) -> None:
        """key: the server's, "" for none."""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.client = ServerClient(how.url, how.deadline_s, how.retries, self.kind, headers)
        self._sampling, self._stops, self._load_s = sampling, sorted(stops), how.load_s
        config: Any = network.model.config
        bias = {str(token): self.never for token in range(sampling.choices, config.vocab_size)}
        self._bias = {"logit_bias": bias} if bias else {}

    def begin(self, length: int) -> None:
        """Check at the start that the server is of this kind and accepts sequences of `length` tokens."""
        raise NotImplementedError

    def answer(self, stream: ServerStream) -> Generator[AnswerPart, None, None]:
        """Parts of an answer as they arrive; the last one has a reason."""
        raise NotImplementedError

    def weights(self) -> str | None:
        """Version of the server's weights, None if unknown."""
        raise NotImplementedError

    def abort(self, stream: ServerStream) -> None:
        """End one stream at the server."""

    def pause(self) -> None:
        """End all streams and accept none until `resume`."""
        raise NotImplementedError

    def load(self, folder: Path, version: int) -> None:
        """Load weights from a folder and set their version. NotLoaded: the server did not load them."""
        raise NotImplementedError

    def resume(self) -> None:
        """Accept streams again."""
        raise NotImplementedError


class StreamReader:
    """choices: number of tokens; stops: tokens that end an answer; deadline_s: time limit for the server to end a
    stream."""

    def __init__(self, protocol: ServerProtocol, choices: int, stops: frozenset[int], deadline_s: float) -> None:
        self._protocol, self._client = protocol, protocol.client
        self._choices, self._stops, self._deadline_s = choices, stops, deadline_s
        self.news = threading.Condition()

    def begin(self, stream: ServerStream) -> None:
        """Start a thread that reads the stream."""
        threading.Thread(target=self.read, args=(stream,), name=stream.name, daemon=True).start()

    def read(self, stream: ServerStream) -> None:
        """Consumes: parts of an answer. Waits for: the next one. Unblocked by: a part, the client's deadline, or a
        cut of the connection. Produces: tokens of the stream. Returns when the stream ends."""
        try:
            with closing(self._protocol.answer(stream)) as parts:
                for part in parts:
                    with self.news:
                        if stream.over:
                            return  # cut here; the server aborts it when the connection closes
                        self._take(stream, part)
                        self.news.notify_all()
            if not stream.over:
                raise self._client.error(
                    f"{self._protocol.path} ended without a finish_reason; name {self._client.kind}"
                )
        except RunHalted as error:
            with self.news:
                if not stream.reason:  # a connection that was cut here raises, too
                    stream.error = error
                self.news.notify_all()

    def _take(self, stream: ServerStream, part: AnswerPart) -> None:
        if unknown := [token for token in part.tokens if not 0 <= token < self._choices]:
            raise self._client.error(
                f"it sampled token {unknown[0]}, and the environment's tokenizer has {self._choices}; start it with "
                "this run's model"
            )
        if part.weights not in (None, str(stream.version)):
            raise self._client.lost(f"it answered with the weights of version {part.weights}, not {stream.version}")
        if part.reason == "stop" and (isinstance(part.matched, str) or not (part.tokens or stream.begun)):
            raise self._client.error(f"an answer ended by {part.matched!r}, which ends none; see the server's log")
        stream.prompt_tokens, stream.shared_tokens = part.prompt_tokens, part.shared_tokens
        stream.tokens += part.tokens
        stream.logprobs += part.logprobs
        stream.versions += [stream.version] * len(part.tokens)
        ends_otherwise = part.reason == "stop" and stream.tokens[-1] not in self._stops  # the server's model has more
        stream.reason = "abort" if ends_otherwise else part.reason

    def end(self, streams: Sequence[ServerStream], ask: Callable[[], None]) -> None:
        """End streams and keep their tokens. ask: tells the server to end them, within its deadline where it does so.
        RunHalted: a stream failed or does not end."""
        if not self._protocol.ends_streams:
            self.cut(streams)
        ask()
        until = time.monotonic() + self._deadline_s
        with self.news:
            for stream in streams:
                if not stream.over and not stream.begun:  # it may not have reached the server yet
                    stream.reason = "abort"
            while any(not stream.over for stream in streams):
                if not self.news.wait(until - time.monotonic()) and time.monotonic() >= until:
                    raise self._client.error(
                        f"it did not abort a request within {self._deadline_s:g} s (policy.engine.deadline_s); see "
                        "the server's log"
                    )
        for stream in streams:
            if stream.error is not None and not stream.lost:
                raise stream.error

    def cut(self, streams: Sequence[ServerStream]) -> None:
        """Mark streams as ended and close their connections."""
        for stream in streams:
            with self.news:
                if not stream.over:
                    stream.reason = "abort"
            stream.line.cut()
