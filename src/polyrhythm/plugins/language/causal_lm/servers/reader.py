"""Reads the answers of a server, one thread per stream, and ends them.

A stream has ended when it has a reason or an error. Code that changes a stream holds `news` and notifies it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing

from polyrhythm.errors import RunHalted
from polyrhythm.plugins.language.causal_lm.servers.protocol import AnswerPart, ServerProtocol, ServerStream


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
        if part.reason == "stop" and (isinstance(part.matched, str) or not (part.tokens or stream.tokens)):
            raise self._client.error(f"an answer ended by {part.matched!r}, which ends none; see the server's log")
        stream.prompt_tokens, stream.shared_tokens = part.prompt_tokens, part.shared_tokens
        stream.tokens += part.tokens
        stream.logprobs += part.logprobs
        ends_otherwise = part.reason == "stop" and stream.tokens[-1] not in self._stops  # the server's model has more
        stream.reason = "abort" if ends_otherwise else part.reason

    def end(self, streams: Sequence[ServerStream], ask: Callable[[], None]) -> None:
        """End streams and keep their tokens. ask: tells the server to end them. RunHalted: a stream failed or does
        not end."""
        if self._protocol.ends_streams:
            ask()
            self._await(streams)
        else:
            self.cut(streams)
            ask()
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

    def _await(self, streams: Sequence[ServerStream]) -> None:
        """Wait until the server has ended the streams, at most its deadline. A stream without a token may not have
        reached the server yet, so it is marked as ended."""
        until = time.monotonic() + self._deadline_s
        with self.news:
            for stream in streams:
                if not stream.over and not stream.tokens:
                    stream.reason = "abort"
            while any(not stream.over for stream in streams):
                if not self.news.wait(until - time.monotonic()) and time.monotonic() >= until:
                    raise self._client.error(
                        f"it did not abort a request within {self._deadline_s:g} s (policy.engine.deadline_s); see "
                        "the server's log"
                    )
