"""A local server that speaks sglang's protocol over a real model.

As sglang with deterministic inference: `/abort_request` aborts all whose names begin so; under `ignore_eos` no token
ends an answer, otherwise the stops that were asked for and those of the server's tokenizer do; answers name the version
of the weights.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.plugins.language.server_model import Asked, Model, Told, at_address

from polyrhythm.plugins.language.causal_lm.engine import Sampling
from polyrhythm.plugins.language.causal_lm.network import CausalNetwork


class Handler(BaseHTTPRequestHandler):
    """Endpoints of the server."""

    protocol_version = "HTTP/1.1"
    model: Model

    def log_message(self, *_: object) -> None:
        """Nothing: tests read what they want to."""

    def do_GET(self) -> None:
        self.model.said.append(self.path)
        self.answer({"model_path": "somewhere", "weight_version": self.model.version})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.model.said.append(self.path)
        match self.path:
            case "/generate":
                self.stream(body)
            case "/abort_request":
                self.model.abort(body["rid"])
                self.answer(None)
            case "/pause_generation":
                self.model.pause()
                self.answer({"status": "ok"})
            case "/continue_generation":
                self.model.paused = False
                self.answer({"status": "ok"})
            case "/update_weights_from_disk":
                if not (wrong := self.model.update(body["model_path"])):
                    self.model.version = body["weight_version"]
                self.answer({"success": not wrong, "message": wrong})
            case _:
                self.send_error(404)

    def answer(self, content: object) -> None:
        if self.model.broken.get("silent"):
            time.sleep(3)
        text = b"" if content is None else json.dumps(content).encode()
        if self.model.broken.get("page"):
            text = b"<html>welcome</html>"
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def stream(self, body: dict[str, Any]) -> None:
        asked, model = body["sampling_params"], self.model
        assert body["return_logprob"]
        assert body["stream"]
        assert tuple(asked["stop_token_ids"]) == tuple(sorted(model.stops))
        assert asked["temperature"] in (0.0, model.sampling.temperature)
        most, greedy, seed = asked["max_new_tokens"], asked["temperature"] == 0.0, asked["sampling_seed"]
        assert not asked["ignore_eos"], "stop_token_ids have no effect then"
        bias = asked.get("logit_bias", {})
        events = model.generate(Asked(body["rid"], body["input_ids"], most, greedy, seed, bias))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.close_connection = True
        self.end_headers()
        while (told := events.get()) is not None:
            if model.dies(told):
                model.abort(body["rid"])
                return
            try:
                self.wfile.write(b"data: " + json.dumps(self.event(told)).encode() + b"\n\n")
            except OSError:  # the client has closed the line
                model.abort(body["rid"])
                return
        self.wfile.write(b"data: [DONE]\n\n")

    def event(self, told: Told) -> dict[str, Any]:
        shown = [[logprob, token, None] for logprob, token in told.pairs]
        if self.model.broken.get("incremental") and len(shown) > 1:
            shown = shown[-1:]
        info = {"id": told.name, "completion_tokens": len(told.pairs), "output_token_logprobs": shown}
        info |= {"finish_reason": None if told.reason is None else {"type": told.reason}}
        info |= {"prompt_tokens": 7, "cached_tokens": 3, "weight_version": self.model.version}
        return {"text": "", "output_ids": [pair[1] for pair in shown], "meta_info": info}


@contextmanager
def serving(
    network: CausalNetwork, *, temperature: float = 1.0, stops: tuple[int, ...], pause_s: float = 0.0
) -> Iterator[tuple[str, Model]]:
    """The address of a server of this model, and the model."""
    model = Model(network, Sampling(0, temperature), stops, pause_s)
    with at_address(model, Handler) as url:
        yield url, model
