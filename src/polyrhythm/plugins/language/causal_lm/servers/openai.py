"""OpenAI completions protocol, for servers that return tokens and their log-probs, such as vLLM's.

Endpoints: GET /v1/models; POST /v1/completions (stream), with vLLM's additional fields. Weight updates are not part of
that protocol: `WeightCalls` names the server's endpoints.

A stream is ended by closing its connection. Its seed depends on the request and on the number of tokens before it,
because a server restarts its noise with each request: with one seed, a resumed answer would repeat the same noise.
"""

from __future__ import annotations

import http
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from polyrhythm.plugins.language.causal_lm.sampling import Sampling
from polyrhythm.plugins.language.causal_lm.servers.client import ServerClient, ServerRefusal
from polyrhythm.plugins.language.causal_lm.servers.protocol import AnswerPart, NotLoaded, ServerStream

#: Seeds are below this; multiplied with this odd number, small counts are far apart.
_SEEDS, _APART = 2**63, 0x9E3779B97F4A7C15
#: The lowest bias of a logit that the protocol has.
_NEVER = -100.0
#: How tokens are named instead of their text.
_PREFIX = "token_id:"


class WeightCalls(NamedTuple):
    """Paths and bodies of the POST calls that change weights; a path is "" if the server lacks the call. {folder} and
    {version} in bodies are replaced.

    pause, resume: before and after a change; load: loads a folder of safetensors; name: sets the version of the
    weights, which `named` (GET) returns as {"weight_version": …}.
    """

    pause: str
    load: str
    load_body: Mapping[str, Any]
    name: str
    name_body: Mapping[str, Any]
    named: str
    resume: str


class OpenAiProtocol:
    """model: its name at the server, "" for the first that the server lists; other arguments as for
    `SglangProtocol`."""

    path = "/v1/completions"
    ends_streams = False
    remedy = "with log-probs of what is sampled (vLLM: --logprobs-mode processed_logprobs --generation-config vllm)"

    def __init__(
        self,
        client: ServerClient,
        sampling: Sampling,
        stops: Sequence[int],
        unsampled: Sequence[int],
        load_s: float,
        *,
        model: str,
        calls: WeightCalls,
    ) -> None:
        self.client, self._load_s, self._model, self._calls = client, load_s, model, calls
        self.fixed = not calls.load
        self._sampling, self._stops = sampling, sorted(stops)
        self._bias = {str(token): _NEVER for token in unsampled}

    def begin(self, length: int) -> None:
        found = self._models()
        if not isinstance(found, list) or not all(isinstance(one, dict) and "id" in one for one in found):
            raise self.client.error(f"/v1/models answered {found!r:.200}; name {self.client.kind}")
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

    def _models(self) -> Any:
        try:
            return self.client.get("/v1/models").get("data")
        except ServerRefusal as refusal:
            if refusal.status != http.HTTPStatus.UNAUTHORIZED:
                raise
            raise self.client.error(
                f"/v1/models answered {refusal.status}: {refusal.said}; set policy.engine.key_variable to the variable "
                "with its key"
            ) from refusal

    def weights(self) -> str | None:
        if self.fixed or not self._calls.named:
            return None
        try:
            return str(self.client.get(self._calls.named).get("weight_version"))
        except ServerRefusal as refusal:
            raise self._lacks(self._calls.named, "named", refusal) from refusal

    # ------------------------------------------------------------ answers

    def answer(self, stream: ServerStream) -> Generator[AnswerPart, None, None]:
        """Parts of an answer. The weight version is queried after the answer has begun: a server that restarts later
        ends the answer."""
        last: AnswerPart | None = None  # held until the usage event after it, or the end
        shared, first = 0, True
        with closing(self.client.stream(self.path, self._body(stream), stream.line)) as events:
            for event in events:
                part, usage = self._part(event, stream), event.get("usage")
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
        request, before, sampling = stream.request, stream.prefix, self._sampling
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
            **({"logit_bias": self._bias} if self._bias else {}),
        }

    def _part(self, event: dict[str, Any], stream: ServerStream) -> AnswerPart | None:
        """The part of an event; None for an event without a choice."""
        try:
            if not event["choices"]:
                return None
            choice = event["choices"][0]
            found = choice.get("logprobs") or {}
            tokens, logprobs = choice.get("token_ids"), [float(value) for value in found.get("token_logprobs") or ()]
            if tokens is None:
                tokens = [name.removeprefix(_PREFIX) for name in found.get("tokens") or ()]
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
        return AnswerPart(tokens, logprobs, reason, matched, len(stream.request.prompt) + len(stream.prefix))

    def abort(self, stream: ServerStream) -> None:
        """Nothing to do: closing the connection ends the stream."""

    # ------------------------------------------------------------ weights

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
