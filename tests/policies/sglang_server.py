"""A local server that speaks sglang's protocol over the native engine, so that its log-probs are real.

As sglang with deterministic inference: sampling noise is keyed by (seed, position in the sequence); `/abort_request`
aborts all whose names begin so; a paused server starts nothing; log-probs are those after the temperature, of greedy
answers those without one; under `ignore_eos` no token ends an answer, otherwise the stops that were asked for and those
of the server's tokenizer do; a bias is added to logits; answers name the version of the weights. It can be told to
misbehave.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyrhythm.policies.causal_lm.engine import NativeEngine
from polyrhythm.policies.causal_lm.network import CausalNetwork, loaded_network
from polyrhythm.policies.causal_lm.sampling import Sampling, draw, process_logits
from polyrhythm.policies.engine import EngineRequest

LENGTH = 64


class PositionedEngine(NativeEngine):
    """The native engine, whose noise is keyed by the position in the sequence, and which tells what runs. bias: by
    token; endless: requests that no token ends."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.bias: dict[str, float] = {}
        self.endless: set[int] = set()

    def _ends(self, row: Any) -> bool:
        return row.request.request_id not in self.endless and super()._ends(row)

    def _sample(self, features: Tensor) -> None:
        logits = self._network.logits(features)
        logits[:, [int(token) for token in self.bias]] += torch.tensor(list(self.bias.values()))
        log_p = process_logits(logits, self._sampling)
        uniform = torch.tensor([row.uniform.at(row.length) for row in self._running])
        tokens, logprobs = draw(log_p, uniform, self._greedy[: len(features)])
        plain = logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
        logprobs = torch.where(self._greedy[: len(features)], plain, logprobs)
        for row, token, logprob in zip(self._running, tokens.tolist(), logprobs.tolist(), strict=True):
            row.tokens.append(token)
            row.logprobs.append(logprob)
            row.versions.append(0)

    def progress(self) -> dict[int, list[tuple[float, int]]]:
        """By request, log-prob and token of what it has so far."""
        return {row.request.request_id: list(zip(row.logprobs, row.tokens, strict=True)) for row in self._running}


class Model:
    """The server's engine and a thread that decodes. pause_s: between two tokens; vocabulary: tokens of the model."""

    def __init__(self, network: CausalNetwork, temperature: float, stops: tuple[int, ...], pause_s: float) -> None:
        self.lock = threading.RLock()
        self.temperature, self.stops, self.pause_s = temperature, stops, pause_s
        self.names: dict[int, tuple[str, queue.SimpleQueue[dict[str, Any] | None]]] = {}
        self.paused, self.closed, self.count = False, False, 0
        self.said: list[str] = []
        self.ends: tuple[int, ...] = ()  # of the server's tokenizer
        self.version = "default"
        self.broken: dict[str, Any] = {}
        self.load(network)
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def load(self, network: CausalNetwork) -> None:
        choices = network.model.config.vocab_size  # type: ignore[union-attr]
        sampling = Sampling(choices, self.temperature)
        self.network = network
        self.engine = PositionedEngine(network, sampling, (*self.stops, *self.ends), capacity=64, length=LENGTH)
        self.engine.weights_changed(0)

    def run(self) -> None:
        while not self.closed:
            with self.lock:
                if not self.paused and self.names:
                    before = self.engine.progress()
                    finished = self.engine.step()
                    for number, pairs in self.engine.progress().items():
                        if len(pairs) > len(before.get(number, ())):
                            self.tell(number, pairs, None)
                    for one in finished:
                        stopped = int(one.tokens[-1]) in (*self.stops, *self.ends)
                        pairs = list(zip(one.logprobs.tolist(), one.tokens.tolist(), strict=True))
                        self.tell(one.request_id, pairs, "stop" if stopped else "length")
            time.sleep(self.pause_s)

    def tell(self, number: int, pairs: list[tuple[float, int]], reason: str | None) -> None:
        name, events = self.names[number]
        shift = self.broken.get("token", 0)
        shown = [[logprob * self.broken.get("scale", 1.0), token + shift, None] for logprob, token in pairs]
        if self.broken.get("incremental") and len(shown) > 1:
            shown = shown[-1:]
        info = {"id": name, "completion_tokens": len(pairs), "output_token_logprobs": shown}
        info |= {"finish_reason": None if reason is None else {"type": reason}, "weight_version": self.version}
        info |= {"prompt_tokens": 7, "cached_tokens": 3}
        events.put({"text": "", "output_ids": [pair[1] for pair in shown], "meta_info": info})
        if reason is not None:
            events.put(None)
            del self.names[number]

    def generate(self, body: dict[str, Any]) -> queue.SimpleQueue[dict[str, Any] | None]:
        asked = body["sampling_params"]
        assert body["return_logprob"]
        assert body["stream"]
        assert tuple(asked["stop_token_ids"]) == tuple(sorted(self.stops))
        assert asked["temperature"] in (0.0, self.temperature)
        while True:
            with self.lock:  # a paused server keeps requests waiting: looked at under the lock that pausing takes
                if not self.paused:
                    return self.start(body, asked)
            time.sleep(0.002)

    def start(self, body: dict[str, Any], asked: dict[str, Any]) -> queue.SimpleQueue[dict[str, Any] | None]:
        self.count += 1
        self.names[self.count] = (body["rid"], queue.SimpleQueue())
        prompt = np.array(body["input_ids"], np.int32)
        greedy, seed = asked["temperature"] == 0.0, asked["sampling_seed"]
        self.engine.bias = asked.get("logit_bias", {})
        if asked["ignore_eos"]:
            self.engine.endless.add(self.count)
        self.engine.add(EngineRequest(self.count, prompt, asked["max_new_tokens"], greedy, seed))
        return self.names[self.count][1]

    def abort(self, name: str) -> None:
        with self.lock:
            for number, (own, _) in list(self.names.items()):
                if own.startswith(name):
                    one = self.engine.abort(number)
                    pairs = list(zip(one.logprobs.tolist(), one.tokens.tolist(), strict=True))
                    self.tell(number, pairs, "abort")

    def update(self, body: dict[str, Any]) -> dict[str, Any]:
        with self.lock:
            assert self.paused
            assert not self.names
            time.sleep(self.broken.get("load_s", 0.0))
            try:
                self.load(loaded_network(body["model_path"]))
                self.version = body["weight_version"]
            except Exception as error:  # noqa: BLE001 - the client is told
                return {"success": False, "message": str(error)}
            return {"success": not self.broken.get("update"), "message": "no such format"}


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
                with self.model.lock:
                    self.model.paused = True
                    self.model.abort("")
                self.answer({"status": "ok"})
            case "/continue_generation":
                self.model.paused = False
                self.answer({"status": "ok"})
            case "/update_weights_from_disk":
                self.answer(self.model.update(body))
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
        events = self.model.generate(body)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.close_connection = True
        self.end_headers()
        while (event := events.get()) is not None:
            if event["meta_info"]["completion_tokens"] > self.model.broken.get("dies", LENGTH):
                self.model.abort(body["rid"])
                return
            try:
                self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            except OSError:  # the client has closed the line
                self.model.abort(body["rid"])
                return
        self.wfile.write(b"data: [DONE]\n\n")


class Quiet(ThreadingHTTPServer):
    """A server whose clients may leave in the middle."""

    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """Nothing."""


@contextmanager
def serving(
    network: CausalNetwork, *, temperature: float = 1.0, stops: tuple[int, ...], pause_s: float = 0.0
) -> Iterator[tuple[str, Model]]:
    """The address of a server of this model, and the model."""
    model = Model(network, temperature, stops, pause_s)
    handler = type("Bound", (Handler,), {"model": model})
    server = Quiet(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", model
    finally:
        model.closed = True
        server.shutdown()
        server.server_close()
        model.thread.join(10)
