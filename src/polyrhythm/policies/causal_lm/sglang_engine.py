"""An engine in an sglang server: each request is a stream of its own, read by a thread.

New weights: the server pauses, which cuts all streams; the model is written to a folder that the server loads; then the
streams go on from their tokens. So every token has the version of the weights that sampled it whatever the server's
cache keeps, as under `on_update: abort`.

A stream that is lost goes on from its tokens too, once the server is there again with the weights of this version: one
that started anew gets them again. Answers name their weights, so none of other weights is taken.

After each change of the weights the engine has the server answer a short prompt, and compares the log-probs with those
of its own module: another model, other weights, or log-probs of something else than what is sampled are found there.

Invariant: a request is waiting for its end in `_streams`, or its result is in `_ended`, or it is gone.
"""

from __future__ import annotations

import logging
import tempfile
import threading
import time
import uuid
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from polyrhythm.errors import RunHalted
from polyrhythm.policies.causal_lm.network import CausalNetwork
from polyrhythm.policies.causal_lm.proof import COMPARED, compared_prompt, worst_difference
from polyrhythm.policies.causal_lm.sampling import Sampling
from polyrhythm.policies.causal_lm.server_stream import ServerStream
from polyrhythm.policies.causal_lm.sglang_client import ServerLost, SglangClient
from polyrhythm.policies.engine import EngineRequest, Generated, refuse_unfit

log = logging.getLogger(__name__)

#: Longest wait of a step: so long new requests and aborts wait for the engine at most.
_STEP_S = 0.05
#: The server's seeds are below this.
_SEEDS = 2**31
#: Added to a logit, it leaves no probability.
_NEVER = -1e9
_COUNTS = ("prompt_tokens", "shared_tokens", "checks", "check_difference")
#: Finish reasons of a stream that ended by itself.
_COMPLETE = frozenset({"stop", "length"})


class ServerSettings(NamedTuple):
    """url, deadline_s, retries: of `SglangClient`; load_s: longest time in which it loads weights; folder: where these
    are written for the server, "" for a temporary one; tolerance: of its log-probs against those of the module here."""

    url: str
    deadline_s: float = 60.0
    folder: str = ""
    tolerance: float = 0.1
    load_s: float = 600.0
    retries: int = 5


class SglangEngine:
    """An engine over a server that gets `network`'s weights. length: the longest sequence; stops: tokens that end one.

    RunHalted from any call: the server answers nothing, or not as this model would.
    """

    def __init__(
        self,
        network: CausalNetwork,
        sampling: Sampling,
        stops: Sequence[int],
        server: ServerSettings,
        *,
        capacity: int,
        length: int,
    ) -> None:
        self.capacity = capacity
        self._network, self._sampling, self._stops, self._length = network, sampling, frozenset(stops), length
        self._server, self._client = server, SglangClient(server.url, server.deadline_s, server.retries)
        self._version = -1
        self._counts: dict[str, int | float] = dict.fromkeys(_COUNTS, 0)
        self._streams: dict[int, ServerStream] = {}
        self._ended: dict[int, Generated] = {}
        self._news = threading.Condition()
        config: Any = network.model.config
        #: For tokens that the model has and the environment has not.
        self._bias = {str(token): _NEVER for token in range(sampling.choices, config.vocab_size)}
        self._client.get("/get_model_info")

    # ------------------------------------------------------------ requests

    def add(self, request: EngineRequest) -> None:
        """ValueError: there is no room for it, in rows or in length, or it would generate nothing."""
        done = request.prefix
        if done is not None and len(done.tokens) and self._complete(request, done):
            self._ended[request.request_id] = done._replace(finished=True)  # it ended while it was cut
            return
        refuse_unfit(request, {*self._streams, *self._ended}, self.capacity, self._length)
        self._begin(request)

    def _complete(self, request: EngineRequest, done: Generated) -> bool:
        return int(done.tokens[-1]) in self._stops or len(done.tokens) == request.max_new_tokens

    def _begin(self, request: EngineRequest, failures: int = 0) -> None:
        # The server aborts by prefix of the name, so none is that of another.
        stream = ServerStream(request, uuid.uuid4().hex, self._version, failures=failures)
        self._streams[request.request_id] = stream
        threading.Thread(target=self._follow, args=(stream,), name=stream.name, daemon=True).start()

    def abort(self, request_id: int) -> Generated:
        """KeyError: there is no such request."""
        if (done := self._ended.pop(request_id, None)) is not None:
            return done._replace(finished=False)
        stream = self._streams[request_id]
        if not stream.over:
            try:
                self._client.post("/abort_request", {"rid": stream.name})
                self._await_cut([stream])
            except ServerLost:
                with self._news:
                    stream.reason = "abort"  # whoever reads it closes the line
        del self._streams[request_id]
        return stream.generated(finished=False)

    def step(self) -> list[Generated]:
        """Wait for a token, not long; the requests that have finished meanwhile."""
        ended, self._ended = list(self._ended.values()), {}
        with self._news:
            if not ended and self._streams and not any(stream.over for stream in self._streams.values()):
                self._news.wait(_STEP_S)
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
        if not ended:  # what has ended is told first
            self._recover([stream for stream in over if stream.error is not None])
        return ended

    def _resume(self, stream: ServerStream) -> None:
        """Go on from its tokens after it was cut, by somebody else, a lost connection or new weights."""
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
        held = self._client.again(lambda: self._client.get("/get_model_info")).get("weight_version")
        if held != str(self._version):  # it started anew
            self.weights_changed(self._version)
            return
        for stream in failed:
            del self._streams[stream.request.request_id]
            self._resume(stream)

    def statistics(self) -> dict[str, int | float]:
        return dict(self._counts)

    # ------------------------------------------------------------ a stream

    def _follow(self, stream: ServerStream) -> None:
        """Consumes: events of the server. Waits for: one. Unblocked by: it, or the client's deadline. Produces: tokens.
        Ends with the stream."""
        try:
            with closing(self._client.stream("/generate", self._body(stream))) as events:
                for event in events:
                    with self._news:
                        if stream.over:
                            return  # it was cut here before the server knew it, and aborts it when the line is closed
                        self._take(stream, event)
                        self._news.notify_all()
            if not stream.over:
                raise self._client.error("/generate ended without a finish_reason; name an sglang server")
        except RunHalted as error:
            with self._news:
                stream.error = error
                self._news.notify_all()

    def _body(self, stream: ServerStream) -> dict[str, Any]:
        request, done = stream.request, stream.request.prefix
        before = [] if done is None else done.tokens.tolist()
        return {
            "rid": stream.name,
            "input_ids": [*request.prompt.tolist(), *before],
            "sampling_params": {
                "max_new_tokens": request.max_new_tokens - len(before),
                "temperature": 0.0 if request.greedy else self._sampling.temperature,
                "stop_token_ids": sorted(self._stops),
                "ignore_eos": False,  # else the stops above end nothing
                "sampling_seed": request.noise_key % _SEEDS,
                **({"logit_bias": self._bias} if self._bias else {}),
            },
            "return_logprob": True,
            "stream": True,
        }

    def _take(self, stream: ServerStream, event: dict[str, Any]) -> None:
        """The tokens of an event, which has all so far, or those that are new, as the server is set."""
        try:
            info = event["meta_info"]
            total, pairs = int(info["completion_tokens"]), info.get("output_token_logprobs") or []
            ending = info.get("finish_reason") or {}
            reason, matched = ending.get("type", ""), ending.get("matched")
            stream.prompt_tokens = int(info.get("prompt_tokens") or 0)
            stream.shared_tokens = int(info.get("cached_tokens") or 0)
            have = len(stream.tokens)
            added = pairs[have:] if len(pairs) == total else pairs
            tokens, logprobs = [int(pair[1]) for pair in added], [float(pair[0]) for pair in added]
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise self._client.error(f"/generate answered {event!r:.200}; name an sglang server") from error
        if have + len(tokens) != total:
            raise self._client.error(
                f"/generate has {total} tokens and {have + len(tokens)} log-probs; start it with log-probs of outputs"
            )
        if unknown := [token for token in tokens if not 0 <= token < self._sampling.choices]:
            raise self._client.error(
                f"it sampled token {unknown[0]}, and the environment's tokenizer has {self._sampling.choices}; start "
                "it with this run's model"
            )
        if (held := info.get("weight_version")) is not None and held != str(stream.version):
            raise self._client.lost(f"it answered with the weights of version {held}, not {stream.version}")
        if reason == "stop" and (isinstance(matched, str) or not (tokens or stream.tokens)):
            raise self._client.error(f"an answer ended by {matched!r}, which ends none; see the server's log")
        stream.tokens += tokens
        stream.logprobs += logprobs
        ends_otherwise = reason == "stop" and stream.tokens[-1] not in self._stops  # the server's tokenizer has more
        stream.reason = "abort" if ends_otherwise else reason

    def _await_cut(self, streams: Sequence[ServerStream]) -> None:
        """Until the server has ended them, which its deadline bounds. A stream without a token may not have reached it
        yet: it is over as it is."""
        until = time.monotonic() + self._server.deadline_s
        with self._news:
            for stream in streams:
                if not stream.over and not stream.tokens:
                    stream.reason = "abort"
            while any(not stream.over for stream in streams):
                if not self._news.wait(until - time.monotonic()) and time.monotonic() >= until:
                    raise self._client.error(
                        f"it did not abort a request within {self._server.deadline_s:g} s (policy.engine.deadline_s); "
                        "see the server's log"
                    )
        for stream in streams:
            if stream.error is not None and not stream.lost:
                raise stream.error

    # ------------------------------------------------------------ weights

    def weights_changed(self, version: int) -> None:
        """Have the server load the weights; what runs is cut, and goes on from its tokens."""
        self._version = version
        if version < 0:
            return  # there are none yet
        running = list(self._streams.values())
        self._client.post("/pause_generation", {"mode": "abort"})
        self._await_cut(running)
        self._load(version)
        self._client.post("/continue_generation", {})
        self._client.again(self._prove)
        self._streams.clear()
        for stream in running:
            self._resume(stream)

    def _load(self, version: int) -> None:
        folder = Path(self._server.folder or tempfile.gettempdir())
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=f"version-{version}-", dir=folder) as found:
                Path(found).chmod(0o755)  # the server may be another user's
                self._write(Path(found))
                body = {"model_path": found, "weight_version": str(version), "flush_cache": True}
                answer = self._client.post("/update_weights_from_disk", body, self._server.load_s)
        except OSError as error:
            raise RunHalted(
                f"policy.engine.folder = {folder}: weights cannot be written ({error.strerror}); make room, or name "
                "another folder"
            ) from error
        if answer.get("success") is not True:
            said = answer.get("message", answer)
            raise self._client.error(
                f"it did not load the weights ({said!r:.200}); it needs this run's model, and to read {folder} "
                "(policy.engine.folder)"
            )

    def _write(self, folder: Path) -> None:
        """The model in the layout of Hugging Face."""
        from safetensors.torch import save_model

        model = self._network.model
        model.config.save_pretrained(folder)  # type: ignore[union-attr, operator]
        save_model(model, str(folder / "model.safetensors"), metadata={"format": "pt"})

    def _prove(self) -> None:
        """RunHalted: its log-probs are not those of the module here."""
        prompt = compared_prompt(self._sampling.choices)
        request = EngineRequest(-1, np.array(prompt, np.int32), COMPARED, False, self._version)
        stream = ServerStream(request, uuid.uuid4().hex, self._version)
        self._follow(stream)
        if stream.error is not None:
            raise stream.error
        worst = worst_difference(self._network, self._sampling, prompt, stream.tokens, stream.logprobs)
        self._counts["checks"] += 1
        self._counts["check_difference"] += worst
        if worst > self._server.tolerance:
            raise self._client.error(
                f"its log-probs differ from this model's by {worst:.3g}, {self._server.tolerance:g} is allowed "
                "(policy.engine.tolerance); start it with this run's model, and without SGLANG_RETURN_ORIGINAL_LOGPROB"
            )
