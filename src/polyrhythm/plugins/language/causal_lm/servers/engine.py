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
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from polyrhythm.errors import RunHalted
from polyrhythm.plugins.language.causal_lm.engine import COMPARED, compared_prompt, worst_difference
from polyrhythm.plugins.language.causal_lm.network import CausalNetwork
from polyrhythm.plugins.language.causal_lm.sampling import Sampling
from polyrhythm.plugins.language.causal_lm.servers.client import ServerLost
from polyrhythm.plugins.language.causal_lm.servers.protocol import NotLoaded, ServerProtocol, ServerStream
from polyrhythm.plugins.language.causal_lm.servers.reader import StreamReader
from polyrhythm.policies.engine import EngineRequest, Generated, refuse_unfit


def load_weights(network: CausalNetwork, protocol: ServerProtocol, folder: str, version: int) -> None:
    """Write the network's weights to a folder and have the server load it. folder: its parent, "" for the system's
    temporary folder.

    RunHalted: they cannot be written, or the server does not load them.
    """
    within = Path(folder or tempfile.gettempdir())
    try:
        within.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f"version-{version}-", dir=within) as found:
            Path(found).chmod(0o755)  # the server may be another user's
            write_model(network, Path(found))
            protocol.load(Path(found), version)
    except OSError as error:
        raise RunHalted(
            f"policy.engine.folder = {within}: weights cannot be written ({error.strerror}); make room, or name "
            "another folder"
        ) from error
    except NotLoaded as said:
        raise protocol.client.error(
            f"it did not load the weights ({said}); it needs this run's model, and to read {within} "
            "(policy.engine.folder)"
        ) from said


def write_model(network: CausalNetwork, folder: Path) -> None:
    """Write the model in the Hugging Face layout."""
    from safetensors.torch import save_model

    config: Any = network.model.config
    config.architectures = [type(network.model).__name__]  # servers select the model class by it
    config.save_pretrained(folder)
    save_model(network.model, str(folder / "model.safetensors"), metadata={"format": "pt"})


log = logging.getLogger(__name__)

#: Longest wait of a step: so long new requests and aborts wait for the engine at most.
_STEP_S = 0.05
_COUNTS = ("prompt_tokens", "shared_tokens", "checks", "check_difference")
#: Reasons of a stream that ended by itself.
_COMPLETE = frozenset({"stop", "length"})


class ServerHandling(NamedTuple):
    """deadline_s: longest time for the server to end a stream; folder: parent of the folders with weights, "" for a
    temporary one; tolerance: largest accepted difference of log-probs from the local module's."""

    deadline_s: float = 60.0
    folder: str = ""
    tolerance: float = 0.1


class ServerEngine:
    """An engine over a server that receives `network`'s weights. length: the longest sequence; stops: tokens that end
    one.

    Every call raises RunHalted if the server does not answer, or not as this model would.
    """

    def __init__(
        self,
        network: CausalNetwork,
        sampling: Sampling,
        stops: Sequence[int],
        server: ServerHandling,
        protocol: ServerProtocol,
        *,
        capacity: int,
        length: int,
    ) -> None:
        self.capacity = capacity
        self._network, self._sampling, self._stops, self._length = network, sampling, frozenset(stops), length
        self._server, self._protocol, self._client = server, protocol, protocol.client
        self._version = -1
        self._counts: dict[str, int | float] = dict.fromkeys(_COUNTS, 0)
        self._streams: dict[int, ServerStream] = {}
        self._ended: dict[int, Generated] = {}
        self._reader = StreamReader(protocol, sampling.choices, self._stops, server.deadline_s)
        protocol.begin(length)

    # ------------------------------------------------------------ requests

    def add(self, request: EngineRequest) -> None:
        """ValueError: there is no free row, the sequence is too long, or it would generate nothing."""
        done = request.prefix
        if done is not None and len(done.tokens) and self._complete(request, done):
            self._ended[request.request_id] = done._replace(finished=True)  # it was complete when it was cut
            return
        refuse_unfit(request, {*self._streams, *self._ended}, self.capacity, self._length)
        self._begin(request)

    def _complete(self, request: EngineRequest, done: Generated) -> bool:
        return int(done.tokens[-1]) in self._stops or len(done.tokens) == request.max_new_tokens

    def _begin(self, request: EngineRequest, failures: int = 0) -> None:
        # The server aborts by name prefix, so no name may be a prefix of another.
        stream = ServerStream(request, uuid.uuid4().hex, self._version, failures=failures)
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
        found = stream.generated(finished=False)
        request = stream.request._replace(prefix=found if len(found.tokens) else None)
        if len(found.tokens) and self._complete(request, found):
            self._ended[request.request_id] = found._replace(finished=True)
            return
        before = 0 if stream.tokens else stream.failures
        self._begin(request, before + 1 if stream.lost else 0)

    def _recover(self, failed: Sequence[ServerStream]) -> None:
        """Resume streams whose connection was lost. RunHalted: another failure, or too many in a row."""
        if not failed:
            return
        failures = [stream.failures for stream in failed if not stream.tokens]
        for stream in failed:
            if not stream.lost or (not stream.tokens and stream.failures >= self._client.retries):
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

    # ------------------------------------------------------------ weights

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
            load_weights(self._network, self._protocol, self._server.folder, version)
            self._protocol.resume()
        self._client.again(self._prove)
        self._streams.clear()
        for stream in running:
            self._resume(stream)

    def _prove(self) -> None:
        """RunHalted: the server's log-probs differ from the local module's."""
        prompt = compared_prompt(self._sampling.choices)
        request = EngineRequest(-1, np.array(prompt, np.int32), COMPARED, False, self._version)
        stream = ServerStream(request, uuid.uuid4().hex, self._version)
        self._reader.read(stream)
        if stream.error is not None:
            raise stream.error
        worst = worst_difference(self._network, self._sampling, prompt, stream.tokens, stream.logprobs)
        self._counts["checks"] += 1
        self._counts["check_difference"] += worst
        if worst > self._server.tolerance:
            raise self._client.error(
                f"its log-probs differ from this model's by {worst:.3g}, {self._server.tolerance:g} is allowed "
                f"(policy.engine.tolerance); start it with this run's model, and {self._protocol.remedy}"
            )
