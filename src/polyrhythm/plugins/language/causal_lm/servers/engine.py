"""Engine at a server: each request is a separate stream, read by a thread.

Weight change: all streams are ended and the server is paused; the model is written to a folder that the server loads;
the streams are resumed from their tokens. So the version of every token is the version of the weights that sampled it,
whatever the server's cache keeps, as under `on_update: abort`.

A lost stream is also resumed from its tokens once the server is back with the weights of this version; a restarted
server receives them again. Answers carry their weight version, so no token of other weights is accepted.

After each weight change the engine requests a short answer and compares its log-probs with those of its own module.
This detects a different model, stale weights, or log-probs of another distribution than the sampled one.

Invariant: a request is in `_streams` until it ends, then its result is in `_ended` until it is returned.
"""

from __future__ import annotations

import logging
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from polyrhythm.errors import RunHalted
from polyrhythm.plugins.language.causal_lm.engine import Sampling, compared_request, worst_difference
from polyrhythm.plugins.language.causal_lm.engine_settings import OpenAiSettings, ServerSettings
from polyrhythm.plugins.language.causal_lm.network import CausalNetwork
from polyrhythm.plugins.language.causal_lm.servers.client import ServerLost
from polyrhythm.plugins.language.causal_lm.servers.protocols import (
    AnswerPart,
    NotLoaded,
    OpenAiProtocol,
    ServerProtocol,
    ServerStream,
    SglangProtocol,
)
from polyrhythm.policies.engine import EngineRequest, Generated, refuse_unfit

log = logging.getLogger(__name__)

#: Longest wait of a step: so long new requests and aborts wait for the engine at most.
_STEP_S = 0.05
_COUNTS = ("prompt_tokens", "shared_tokens", "checks", "check_difference")
#: Reasons of a stream that ended by itself.
_COMPLETE = frozenset({"stop", "length"})


def write_model(network: CausalNetwork, folder: Path) -> None:
    """Write the model in the Hugging Face layout."""
    from safetensors.torch import save_model

    config: Any = network.model.config
    config.architectures = [type(network.model).__name__]  # servers select the model class by it
    config.save_pretrained(folder)
    save_model(network.model, str(folder / "model.safetensors"), metadata={"format": "pt"})


def protocol_of(
    how: ServerSettings, network: CausalNetwork, sampling: Sampling, stops: Sequence[int]
) -> ServerProtocol:
    """RunHalted: the address or the key is wrong. Whether the server answers: its `begin`."""
    if isinstance(how, OpenAiSettings):
        return OpenAiProtocol(how, network, sampling, stops)
    return SglangProtocol(how, network, sampling, stops)


class StreamReader:
    """Reads streams, one thread each, and ends them. A stream has ended when it has a reason or an error; code that
    changes a stream holds `news` and notifies it.

    choices: number of tokens; stops: tokens that end an answer; deadline_s: time limit for the server to end a stream.
    """

    def __init__(self, protocol: ServerProtocol, choices: int, stops: frozenset[int], deadline_s: float) -> None:
        self._protocol, self._client = protocol, protocol.client
        self._choices, self._stops, self._deadline_s = choices, stops, deadline_s
        self.news = threading.Condition()

    def begin(self, stream: ServerStream) -> None:
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
        """End streams and keep their tokens. ask: tells the server. RunHalted: a stream failed or does not end."""
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


class ServerEngine:
    """An engine over a server that receives `network`'s weights. length: the longest sequence; stops: tokens that end
    one. Every call raises RunHalted if the server does not answer, or not as this model would."""

    def __init__(
        self,
        how: ServerSettings,
        network: CausalNetwork,
        sampling: Sampling,
        stops: Sequence[int],
        *,
        capacity: int,
        length: int,
    ) -> None:
        self.capacity = capacity
        self._how, self._network, self._sampling, self._length = how, network, sampling, length
        self._stops = frozenset(stops)
        self._protocol = protocol_of(how, network, sampling, stops)
        self._client = self._protocol.client
        self._version = -1
        self._counts: dict[str, int | float] = dict.fromkeys(_COUNTS, 0)
        self._streams: dict[int, ServerStream] = {}
        self._ended: dict[int, Generated] = {}
        self._reader = StreamReader(self._protocol, sampling.choices, self._stops, how.deadline_s)
        self._protocol.begin(length)

    def add(self, request: EngineRequest) -> None:
        """ValueError: there is no free row, the sequence is too long, or it would generate nothing."""
        if not self._end_if_complete(request):
            refuse_unfit(request, {*self._streams, *self._ended}, self.capacity, self._length)
            self._begin(request)

    def _end_if_complete(self, request: EngineRequest) -> bool:
        """End a request whose prefix was complete when it was cut; returns whether it was."""
        done = request.prefix
        if done is None or not len(done.tokens):
            return False
        complete = int(done.tokens[-1]) in self._stops or len(done.tokens) == request.max_new_tokens
        if complete:
            self._ended[request.request_id] = done._replace(finished=True)
        return complete

    def _begin(self, request: EngineRequest, failures: int = 0) -> None:
        stream = ServerStream.of(request)
        stream.version, stream.failures = self._version, failures
        self._streams[request.request_id] = stream
        self._reader.begin(stream)

    def abort(self, request_id: int) -> Generated:
        """KeyError: unknown request."""
        if (done := self._ended.pop(request_id, None)) is not None:
            return done._replace(finished=False)
        stream = self._streams[request_id]
        if not stream.over:
            try:
                self._reader.end([stream], lambda: self._protocol.abort(stream))
            except ServerLost:
                self._reader.cut([stream])
        del self._streams[request_id]
        return stream.generated(finished=False)

    def step(self) -> list[Generated]:
        """Wait briefly for a token; return the requests that have finished."""
        ended, self._ended = list(self._ended.values()), {}
        with self._reader.news:
            if not ended and self._streams and not any(stream.over for stream in self._streams.values()):
                self._reader.news.wait(_STEP_S)
            over = [stream for stream in self._streams.values() if stream.over]
        for stream in over:
            if stream.error is not None:
                continue
            del self._streams[stream.request.request_id]
            self._counts["prompt_tokens"] += stream.prompt_tokens
            self._counts["shared_tokens"] += stream.shared_tokens
            if stream.reason in _COMPLETE:
                ended.append(stream.generated(finished=True))
            else:
                self._resume(stream)
        if not ended:  # return finished requests before raising
            self._recover([stream for stream in over if stream.error is not None])
        return ended

    def _resume(self, stream: ServerStream) -> None:
        """Resume a stream from its tokens after a cut, a lost connection or a weight change."""
        request = stream.request._replace(prefix=stream.generated(finished=False) if stream.tokens else None)
        if not self._end_if_complete(request):
            self._begin(request, (0 if stream.begun else stream.failures) + 1 if stream.lost else 0)

    def _recover(self, failed: Sequence[ServerStream]) -> None:
        """Resume streams whose connection was lost. RunHalted: another failure, or too many in a row."""
        if not failed:
            return
        failures = [stream.failures for stream in failed if not stream.begun]
        for stream in failed:
            if not stream.lost or (not stream.begun and stream.failures >= self._client.retries):
                assert stream.error is not None
                raise stream.error
        log.warning("%d streams go on: %s", len(failed), failed[0].error)
        self._client.pause(1 + max(failures, default=0))
        if self._client.again(self._protocol.weights) != str(self._version):  # it has restarted
            self.weights_changed(self._version)
            return
        for stream in failed:
            del self._streams[stream.request.request_id]
            self._resume(stream)

    def statistics(self) -> dict[str, int | float]:
        return dict(self._counts)

    def weights_changed(self, version: int) -> None:
        """Have the server load the weights; running streams are cut and resumed from their tokens."""
        if self._protocol.fixed and self._version not in (-1, version):
            raise self._client.error(
                "its weights cannot be changed (policy.engine.weights.load is empty); name the path that loads weights"
            )
        self._version = version
        if version < 0:
            return  # no weights yet
        running = list(self._streams.values())
        if self._protocol.fixed:
            self._reader.end(running, lambda: None)
        else:
            self._reader.end(running, self._protocol.pause)
            self._load()
            self._protocol.resume()
        self._client.again(self._prove)
        self._streams.clear()
        for stream in running:
            self._resume(stream)

    def _load(self) -> None:
        """Have the server load the weights from a folder. RunHalted: they cannot be written, or are not loaded."""
        within = Path(self._how.folder or tempfile.gettempdir())
        try:
            within.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=f"version-{self._version}-", dir=within) as found:
                Path(found).chmod(0o755)  # the server may be another user's
                write_model(self._network, Path(found))
                self._protocol.load(Path(found), self._version)
        except OSError as error:
            raise RunHalted(
                f"policy.engine.folder = {within}: weights cannot be written ({error.strerror}); make room, or name "
                "another folder"
            ) from error
        except NotLoaded as said:
            raise self._client.error(
                f"it did not load the weights ({said}); it needs this run's model, and to read {within} "
                "(policy.engine.folder)"
            ) from said

    def _prove(self) -> None:
        """RunHalted: the server's log-probs differ from the local module's."""
        stream = ServerStream(compared_request(self._sampling.choices, self._version), version=self._version)
        self._reader.read(stream)
        if stream.error is not None:
            raise stream.error
        worst = worst_difference(self._network, self._sampling, stream)
        self._counts["checks"] += 1
        self._counts["check_difference"] += worst
        if worst > self._how.tolerance:
            raise self._client.error(
                f"its log-probs differ from this model's by {worst:.3g}, {self._how.tolerance:g} is allowed "
                f"(policy.engine.tolerance); start it with this run's model, and {self._protocol.remedy}"
            )
