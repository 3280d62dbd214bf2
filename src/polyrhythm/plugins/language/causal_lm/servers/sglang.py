"""Speaks to an sglang server. Endpoints: GET /get_model_info; POST /generate (stream), /abort_request,
/pause_generation, /update_weights_from_disk, /continue_generation."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from polyrhythm.plugins.language.causal_lm.sampling import Sampling
from polyrhythm.plugins.language.causal_lm.servers.client import ServerClient
from polyrhythm.plugins.language.causal_lm.servers.protocol import AnswerPart, NotLoaded, ServerStream

#: The server's seeds are below this.
_SEEDS = 2**31
#: Added to a logit, it leaves no probability.
_NEVER = -1e9


class SglangProtocol:
    """unsampled: tokens of the model that the environment lacks; load_s: time limit for loading weights."""

    path = "/generate"
    ends_streams = True
    fixed = False
    remedy = "without SGLANG_RETURN_ORIGINAL_LOGPROB"

    def __init__(
        self, client: ServerClient, sampling: Sampling, stops: Sequence[int], unsampled: Sequence[int], load_s: float
    ) -> None:
        self.client, self._load_s = client, load_s
        self._temperature, self._stops = sampling.temperature, sorted(stops)
        self._bias = {str(token): _NEVER for token in unsampled}

    def begin(self, length: int) -> None:  # noqa: ARG002 - sglang does not tell its own
        self.client.get("/get_model_info")

    def weights(self) -> str | None:
        version = self.client.get("/get_model_info").get("weight_version")
        return None if version is None else str(version)

    # ------------------------------------------------------------ answers

    def answer(self, stream: ServerStream) -> Generator[AnswerPart, None, None]:
        have = 0
        with closing(self.client.stream(self.path, self._body(stream), stream.line)) as events:
            for event in events:
                part = self._part(event, have)
                have += len(part.tokens)
                yield part

    def _body(self, stream: ServerStream) -> dict[str, Any]:
        request, before = stream.request, stream.prefix
        return {
            "rid": stream.name,
            "input_ids": [*request.prompt.tolist(), *before],
            "sampling_params": {
                "max_new_tokens": request.max_new_tokens - len(before),
                "temperature": 0.0 if request.greedy else self._temperature,
                "stop_token_ids": self._stops,
                "ignore_eos": False,  # else stop_token_ids have no effect
                "sampling_seed": request.noise_key % _SEEDS,
                **({"logit_bias": self._bias} if self._bias else {}),
            },
            "return_logprob": True,
            "stream": True,
        }

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

    # ------------------------------------------------------------ weights

    def pause(self) -> None:
        self.client.post("/pause_generation", {"mode": "abort"})

    def load(self, folder: Path, version: int) -> None:
        body = {"model_path": str(folder), "weight_version": str(version), "flush_cache": True}
        answer = self.client.post("/update_weights_from_disk", body, self._load_s)
        if answer.get("success") is not True:
            raise NotLoaded(f"{answer.get('message', answer)!r:.200}")

    def resume(self) -> None:
        self.client.post("/continue_generation", {})
