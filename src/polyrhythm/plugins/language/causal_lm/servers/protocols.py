"""Requests at a server, and its protocols: sglang's own, and OpenAI's completions with tokens and log-probs.

sglang: GET /get_model_info; POST /generate (stream), /abort_request, /pause_generation, /update_weights_from_disk,
/continue_generation. OpenAI: GET /v1/models; POST /v1/completions (stream), with vLLM's additional fields; how weights
change is not part of that protocol, so settings name the calls.
"""

from __future__ import annotations

import http
import os
import uuid
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from polyrhythm.errors import RunHalted
from polyrhythm.plugins.language.causal_lm.engine import Sampling
from polyrhythm.plugins.language.causal_lm.engine_settings import OpenAiSettings, ServerSettings
from polyrhythm.plugins.language.causal_lm.network import CausalNetwork
from polyrhythm.plugins.language.causal_lm.servers.client import Line, ServerClient, ServerLost, ServerRefusal
from polyrhythm.policies.engine import Progress

#: sglang's seeds are below this.
_SGLANG_SEEDS = 2**31
#: OpenAI's seeds are below this; multiplied with this odd number, small counts are far apart.
_SEEDS, _APART = 2**63, 0x9E3779B97F4A7C15


@dataclass(slots=True)
class ServerStream(Progress):
    """A request at the server. version: of its weights; failures: consecutive lost connections before it; name: a
    prefix of no other, as servers abort by prefixes; reason: why it ended, "" while it runs; error: what ended it;
    prompt_tokens, shared_tokens: size of its prompt, and how much of it was cached; line: its connection."""

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


class _Protocol:
    """What the kinds of servers share. Every call raises RunHalted on an unexpected answer.

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


class SglangProtocol(_Protocol):
    kind = "an sglang server"
    path = "/generate"
    never = -1e9
    ends_streams = True
    remedy = "without SGLANG_RETURN_ORIGINAL_LOGPROB"

    def begin(self, length: int) -> None:  # noqa: ARG002 - sglang does not tell its own
        """Check at the start that the server is of this kind and accepts sequences of `length` tokens."""
        self.client.get("/get_model_info")

    def weights(self) -> str | None:
        """Version of the server's weights, None if unknown."""
        version = self.client.get("/get_model_info").get("weight_version")
        return None if version is None else str(version)

    def answer(self, stream: ServerStream) -> Generator[AnswerPart, None, None]:
        """Parts of an answer as they arrive; the last one has a reason."""
        request, before, have = stream.request, stream.tokens, 0
        body = {
            "rid": stream.name,
            "input_ids": [*request.prompt.tolist(), *before],
            "sampling_params": {
                "max_new_tokens": request.max_new_tokens - len(before),
                "temperature": 0.0 if request.greedy else self._sampling.temperature,
                "stop_token_ids": self._stops,
                "ignore_eos": False,  # else stop_token_ids have no effect
                "sampling_seed": request.noise_key % _SGLANG_SEEDS,
                **self._bias,
            },
            "return_logprob": True,
            "stream": True,
        }
        with closing(self.client.stream(self.path, body, stream.line)) as events:
            for event in events:
                part = self._part(event, have)
                have += len(part.tokens)
                yield part

    def _part(self, event: dict[str, Any], have: int) -> AnswerPart:
        """New tokens of an event, which contains all tokens so far or only new ones, depending on the server's
        configuration. have: number of tokens received before."""
        try:
            info = event["meta_info"]
            total, pairs = int(info["completion_tokens"]), info.get("output_token_logprobs") or []
            ending = info.get("finish_reason") or {}
            added = pairs[have:] if len(pairs) == total else pairs
            part = AnswerPart(
                [int(pair[1]) for pair in added],
                [float(pair[0]) for pair in added],
                ending.get("type", ""),
                ending.get("matched"),
                int(info.get("prompt_tokens") or 0),
                int(info.get("cached_tokens") or 0),
                None if info.get("weight_version") is None else str(info["weight_version"]),
            )
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise self.client.error(f"/generate answered {event!r:.200}; name an sglang server") from error
        if have + len(part.tokens) != total:
            raise self.client.error(
                f"/generate has {total} tokens and {have + len(part.tokens)} log-probs; start it with log-probs of "
                "outputs"
            )
        return part

    def abort(self, stream: ServerStream) -> None:
        self.client.post("/abort_request", {"rid": stream.name})

    def pause(self) -> None:
        """End all streams and accept none until `resume`."""
        self.client.post("/pause_generation", {"mode": "abort"})

    def load(self, folder: Path, version: int) -> None:
        """Load weights from a folder and set their version. NotLoaded: the server did not load them."""
        body = {"model_path": str(folder), "weight_version": str(version), "flush_cache": True}
        answer = self.client.post("/update_weights_from_disk", body, self._load_s)
        if answer.get("success") is not True:
            raise NotLoaded(f"{answer.get('message', answer)!r:.200}")

    def resume(self) -> None:
        self.client.post("/continue_generation", {})


class OpenAiProtocol(_Protocol):
    """A stream is ended by closing its connection. Its seed depends on the request and on the number of tokens before
    it, because a server restarts its noise with each request: a resumed answer would repeat the same noise."""

    kind = "a server of OpenAI's protocol"
    path = "/v1/completions"
    never = -100.0  # the lowest bias that the protocol has
    ends_streams = False
    remedy = "with log-probs of what is sampled (vLLM: --logprobs-mode processed_logprobs --generation-config vllm)"

    def __init__(self, how: OpenAiSettings, network: CausalNetwork, sampling: Sampling, stops: Sequence[int]) -> None:
        if how.key_variable and not os.environ.get(how.key_variable):
            raise RunHalted(
                f"policy.engine.key_variable = {how.key_variable}: the environment has no such variable; set it to the "
                "server's key"
            )
        super().__init__(how, network, sampling, stops, os.environ.get(how.key_variable, ""))
        self._model, self._calls = how.model, how.weights
        self.fixed = not how.weights.load

    def begin(self, length: int) -> None:
        try:
            found = self.client.get("/v1/models").get("data")
        except ServerRefusal as refusal:
            if refusal.status != http.HTTPStatus.UNAUTHORIZED:
                raise
            raise self.client.error(
                f"/v1/models answered {refusal.status}: {refusal.said}; set policy.engine.key_variable to the variable "
                "with its key"
            ) from refusal
        if not isinstance(found, list) or not all(isinstance(one, dict) and "id" in one for one in found):
            raise self.client.error(f"/v1/models answered {found!r:.200}; name {self.kind}")
        models = {str(one["id"]): one.get("max_model_len") for one in found}
        self._model = self._model or next(iter(models), "")
        if self._model not in models:
            raise self.client.error(
                f"it has no model {self._model!r} (policy.engine.model), but {', '.join(models) or 'none'}; name one "
                "that it has"
            )
        limit = models[self._model]
        if isinstance(limit, int) and limit < length:
            raise self.client.error(
                f"it takes {limit} tokens, prompts and messages have up to {length}; start it with --max-model-len "
                f"{length}"
            )
        self.weights()

    def weights(self) -> str | None:
        if self.fixed or not self._calls.named:
            return None
        try:
            return str(self.client.get(self._calls.named).get("weight_version"))
        except ServerRefusal as refusal:
            raise self._lacks(self._calls.named, "named", refusal) from refusal

    def answer(self, stream: ServerStream) -> Generator[AnswerPart, None, None]:
        """The weight version is queried after the answer has begun: a server that restarts later ends the answer."""
        last: AnswerPart | None = None  # held until the usage event after it, or the end
        shared, first = 0, True
        body = self._body(stream)
        with closing(self.client.stream(self.path, body, stream.line)) as events:
            for event in events:
                part, usage = self._part(event, len(body["prompt"])), event.get("usage")
                if isinstance(usage, dict):
                    shared = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
                if part is None or last is not None:
                    continue
                if first:
                    first, part = False, part._replace(weights=self.weights())
                if part.reason:
                    last = part
                else:
                    yield part
        if last is not None:
            yield last._replace(shared_tokens=shared)

    def _body(self, stream: ServerStream) -> dict[str, Any]:
        request, before, sampling = stream.request, stream.tokens, self._sampling
        return {
            "model": self._model,
            "prompt": [*request.prompt.tolist(), *before],
            "max_tokens": request.max_new_tokens - len(before),
            "temperature": 0.0 if request.greedy else sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "seed": (request.noise_key + len(before) * _APART) % _SEEDS,
            "stop_token_ids": self._stops,
            "ignore_eos": True,
            "logprobs": 0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._bias,
        }

    def _part(self, event: dict[str, Any], prompt_tokens: int) -> AnswerPart | None:
        try:
            if not event["choices"]:
                return None
            choice = event["choices"][0]
            found = choice.get("logprobs") or {}
            tokens, logprobs = choice.get("token_ids"), [float(value) for value in found.get("token_logprobs") or ()]
            if tokens is None:
                tokens = [name.removeprefix("token_id:") for name in found.get("tokens") or ()]
            tokens = [int(token) for token in tokens]
            reason, matched = choice.get("finish_reason") or "", choice.get("stop_reason")
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise self.client.error(
                f"{self.path} answered {event!r:.200}; name a server that answers with token ids and log-probs"
            ) from error
        if len(tokens) != len(logprobs) or (choice.get("text") and not tokens):
            raise self.client.error(
                f"{self.path} answered {len(tokens)} token ids and {len(logprobs)} log-probs; name a server that "
                "answers with both for each token"
            )
        return AnswerPart(tokens, logprobs, reason, matched, prompt_tokens)

    def abort(self, stream: ServerStream) -> None:
        """Nothing to do: closing the connection ends the stream."""

    def pause(self) -> None:
        self._call("pause", self._calls.pause, {})

    def load(self, folder: Path, version: int) -> None:
        """Load weights. Success is status 200 without {"success": false}."""
        places = {"{folder}": str(folder), "{version}": str(version)}
        try:
            answer = self._call("load", self._calls.load, _filled(self._calls.load_body, places), self._load_s)
        except ServerRefusal as refusal:
            raise NotLoaded(refusal.said) from refusal
        if answer.get("success", True) is not True:
            raise NotLoaded(f"{answer.get('message', answer)!r:.200}")
        self._call("name", self._calls.name, _filled(self._calls.name_body, places))

    def resume(self) -> None:
        self._call("resume", self._calls.resume, {})

    def _call(self, setting: str, path: str, body: Mapping[str, Any], deadline_s: float = 0.0) -> dict[str, Any]:
        if not path:
            return {}
        try:
            return self.client.post(path, body, deadline_s)
        except ServerRefusal as refusal:
            if refusal.status != http.HTTPStatus.NOT_FOUND:
                raise
            raise self._lacks(path, setting, refusal) from refusal

    def _lacks(self, path: str, setting: str, refusal: ServerRefusal) -> Exception:
        return self.client.error(
            f"{path} answered {refusal.status}: {refusal.said}; start vLLM's server with VLLM_SERVER_DEV_MODE=1, or "
            f"name the path of your server (policy.engine.weights.{setting})"
        )


def _filled(body: Any, places: Mapping[str, str]) -> Any:
    """A copy of `body` with its {placeholders} replaced."""
    if isinstance(body, Mapping):
        return {key: _filled(value, places) for key, value in body.items()}
    if isinstance(body, list | tuple):
        return [_filled(value, places) for value in body]
    if isinstance(body, str):
        for place, value in places.items():
            body = body.replace(place, value)
    return body


ServerProtocol = SglangProtocol | OpenAiProtocol
