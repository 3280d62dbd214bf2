"""A local server that speaks OpenAI's completions over a real model, with the fields and endpoints of vLLM's server.

As vLLM: events have new tokens alone, counts come behind the last; noise begins anew with each request; a request whose
client has gone is ended; biases of logits are between -100 and 100; under `ignore_eos` only the stops that were asked
for end an answer; log-probs are those after the cuts. `broken` has it lack what other servers lack.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.plugins.language.server_model import LENGTH, Asked, Model, Told, at_address

from polyrhythm.plugins.language.causal_lm.engine import Sampling
from polyrhythm.plugins.language.causal_lm.network import CausalNetwork

NAME = "m"
KEY = "Bearer secret"


class Handler(BaseHTTPRequestHandler):
    """Endpoints of the server. broken: key (one is needed), development (off), logprobs (none), ids ("named": names of
    tokens alone; "none"), flat (no counts)."""

    protocol_version = "HTTP/1.1"
    model: Model

    def log_message(self, *_: object) -> None:
        """Nothing: tests read what they want to."""

    def do_GET(self) -> None:
        self.model.said.append(self.path)
        match self.path:
            case "/v1/models" if self.allowed():
                self.answer({"object": "list", "data": [{"id": NAME, "max_model_len": LENGTH}]})
            case "/weight_info" if not self.model.broken.get("development"):
                self.answer({"weight_version": self.model.version})
            case "/v1/models":
                self.answer({"error": "Unauthorized"}, 401)
            case _:
                self.answer({"detail": "Not Found"}, 404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        path = self.path
        self.model.said.append(path)
        if path == "/v1/completions":
            self.stream(body)
        elif self.model.broken.get("development"):
            self.answer({"detail": "Not Found"}, 404)
        elif path == "/pause?mode=abort":
            self.model.pause()
            self.answer({"status": "paused"})
        elif path == "/collective_rpc":
            assert body["method"] == "reload_weights"
            if wrong := self.model.update(body["kwargs"]["weights_path"]):
                self.answer({"error": {"message": f"Call to collective_rpc method failed: {wrong}"}}, 500)
            else:
                self.answer({"results": [None]})
        elif path == "/update_weight_version":
            self.model.version = body["new_version"]
            self.answer({"success": True, "new_version": body["new_version"]})
        elif path == "/load":  # another server's
            wrong = self.model.update(body["from"])
            self.model.version = body["as"][0]
            self.answer({"success": not wrong, "message": wrong})
        elif path == "/resume":
            self.model.paused = False
            self.answer({"status": "resumed"})
        else:
            self.answer({"detail": "Not Found"}, 404)

    def allowed(self) -> bool:
        return not self.model.broken.get("key") or self.headers["Authorization"] == KEY

    def answer(self, content: object, status: int = 200) -> None:
        if self.model.broken.get("silent"):
            time.sleep(3)
        text = b"<html>welcome</html>" if self.model.broken.get("page") else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def stream(self, body: dict[str, Any]) -> None:
        model = self.model
        if body["model"] != NAME:
            self.answer({"error": {"message": f"The model `{body['model']}` does not exist."}}, 404)
            return
        assert body["logprobs"] == 0
        assert body["ignore_eos"]
        assert body["stream"]
        assert body["stop_token_ids"] == sorted(model.stops)
        assert (body["top_k"], body["top_p"]) == (model.sampling.top_k or -1, model.sampling.top_p)
        assert body["temperature"] in (0.0, model.sampling.temperature)
        bias = body.get("logit_bias", {})
        assert all(-100 <= value <= 100 for value in bias.values())
        name = f"cmpl-{id(body)}"
        greedy = body["temperature"] == 0.0
        events = model.generate(Asked(name, body["prompt"], body["max_tokens"], greedy, body["seed"], bias))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.close_connection = True
        self.end_headers()
        have = 0
        while (told := events.get()) is not None:
            if model.dies(told) or not self.send(self.event(told, have)):
                model.abort(name)
                return
            have = len(told.pairs)
        if not model.broken.get("flat"):
            counts = {"prompt_tokens": 7, "completion_tokens": have, "prompt_tokens_details": {"cached_tokens": 3}}
            self.send({"choices": [], "usage": counts})
        self.wfile.write(b"data: [DONE]\n\n")

    def send(self, event: dict[str, Any]) -> bool:
        """False: the client has gone."""
        try:
            self.wfile.write(b": still here\n\ndata: " + json.dumps(event).encode() + b"\n\n")
        except OSError:
            return False
        return True

    def event(self, told: Told, have: int) -> dict[str, Any]:
        new, broken = told.pairs[have:], self.model.broken
        choice: dict[str, Any] = {"index": 0, "text": "", "finish_reason": told.reason, "stop_reason": None}
        if not broken.get("logprobs"):
            names = [f"token_id:{token}" for _, token in new]
            choice["logprobs"] = {"tokens": names, "token_logprobs": [logprob for logprob, _ in new]}
        if not broken.get("ids"):
            choice["token_ids"] = [token for _, token in new]
        elif broken["ids"] == "none" and not broken.get("logprobs"):
            choice["logprobs"]["tokens"] = ["a" for _ in new]
        return {"choices": [choice]}


@contextmanager
def serving(
    network: CausalNetwork, sampling: Sampling, *, stops: tuple[int, ...], pause_s: float = 0.0
) -> Iterator[tuple[str, Model]]:
    """The address of a server of this model, and the model."""
    model = Model(network, sampling, stops, pause_s, positioned=False)
    with at_address(model, Handler) as url:
        yield url, model
