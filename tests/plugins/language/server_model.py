"""A model that answers requests as they come, over the native engine, so that its log-probs are real; the local servers
of tests speak a protocol over it.

As at a server: sampling noise is keyed by seed, and by the position in the sequence (`positioned`) or in the answer; a
bias is added to logits; a paused model starts nothing; log-probs are those after the temperature and the cuts, of
greedy answers those without; weights have a name. It can be told to misbehave.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from polyrhythm.plugins.language.causal_lm.engine import NativeEngine, Sampling, draw, process_logits
from polyrhythm.plugins.language.causal_lm.network import CausalNetwork, loaded_network
from polyrhythm.policies.engine import EngineRequest

LENGTH = 64


class BiasedEngine(NativeEngine):
    """The native engine, which tells what runs. bias: by token; positioned: noise is keyed by the position in the
    sequence."""

    def __init__(self, *args: Any, positioned: bool, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.bias: dict[str, float] = {}
        self.positioned = positioned

    def _sample(self, features: Tensor) -> None:
        logits = self._network.logits(features)
        logits[:, [int(token) for token in self.bias]] += torch.tensor(list(self.bias.values()))
        log_p = process_logits(logits, self._sampling)
        uniform = torch.tensor(
            [row.uniform.at(row.length if self.positioned else len(row.tokens)) for row in self._running]
        )
        greedy = torch.tensor([row.request.greedy for row in self._running])
        tokens, logprobs = draw(log_p, uniform, greedy)
        plain = logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
        logprobs = torch.where(greedy, plain, logprobs)
        for row, token, logprob in zip(self._running, tokens.tolist(), logprobs.tolist(), strict=True):
            row.tokens.append(token)
            row.logprobs.append(logprob)
            row.versions.append(0)

    def progress(self) -> dict[int, list[tuple[float, int]]]:
        """By request, log-prob and token of what it has so far."""
        return {row.request.request_id: list(zip(row.logprobs, row.tokens, strict=True)) for row in self._running}


class Told(NamedTuple):
    """What a request has so far, log-probs and tokens; reason: why it ended, None while it goes on."""

    name: str
    pairs: list[tuple[float, int]]
    reason: str | None


Events = queue.SimpleQueue[Told | None]


class Asked(NamedTuple):
    """A request as a server understands it."""

    name: str
    prompt: list[int]
    most: int
    greedy: bool
    seed: int
    bias: Mapping[str, float]


class Model:
    """The server's engine and a thread that decodes. pause_s: between two tokens."""

    def __init__(
        self,
        network: CausalNetwork,
        sampling: Sampling,
        stops: tuple[int, ...],
        pause_s: float = 0.0,
        *,
        positioned: bool = True,
    ) -> None:
        self.lock = threading.RLock()
        self.sampling, self.stops, self.pause_s, self.positioned = sampling, stops, pause_s, positioned
        self.names: dict[int, tuple[str, Events]] = {}
        self.paused, self.closed, self.count = False, False, 0
        self.said: list[str] = []
        self.asked: list[Asked] = []
        self.ends: tuple[int, ...] = ()  # of the server's tokenizer
        self.version = "default"
        self.broken: dict[str, Any] = {}
        self.load(network)
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def start_anew(self, network: CausalNetwork) -> None:
        """As a server that was started again with this model."""
        with self.lock:
            self.load(network)
            self.version = "default"

    def load(self, network: CausalNetwork) -> None:
        choices = network.model.config.vocab_size  # type: ignore[union-attr]
        self.network = network
        self.engine = BiasedEngine(
            network,
            self.sampling._replace(choices=choices),
            (*self.stops, *self.ends),
            capacity=64,
            length=LENGTH,
            positioned=self.positioned,
        )
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
        shift, scale = self.broken.get("token", 0), self.broken.get("scale", 1.0)
        events.put(Told(name, [(logprob * scale, token + shift) for logprob, token in pairs], reason))
        if reason is not None:
            events.put(None)
            del self.names[number]

    def generate(self, asked: Asked) -> Events:
        while True:
            with self.lock:  # a paused server keeps requests waiting: looked at under the lock that pausing takes
                if not self.paused:
                    return self.start(asked)
            time.sleep(0.002)

    def start(self, asked: Asked) -> Events:
        self.count += 1
        self.asked.append(asked)
        self.names[self.count] = (asked.name, queue.SimpleQueue())
        self.engine.bias = dict(asked.bias)
        prompt = np.array(asked.prompt, np.int32)
        self.engine.add(EngineRequest(self.count, prompt, asked.most, asked.greedy, asked.seed))
        return self.names[self.count][1]

    def abort(self, name: str) -> None:
        """All requests whose names begin so."""
        with self.lock:
            for number, (own, _) in list(self.names.items()):
                if own.startswith(name):
                    one = self.engine.abort(number)
                    pairs = list(zip(one.logprobs.tolist(), one.tokens.tolist(), strict=True))
                    self.tell(number, pairs, "abort")

    def pause(self) -> None:
        with self.lock:
            self.paused = True
            self.abort("")

    def update(self, folder: str) -> str:
        """What went wrong, "" for nothing."""
        with self.lock:
            assert self.paused
            assert not self.names
            time.sleep(self.broken.get("load_s", 0.0))
            try:
                self.load(loaded_network(folder))
            except Exception as error:  # noqa: BLE001 - the client is told
                return str(error)
            return "no such format" if self.broken.get("update") else ""

    def dies(self, told: Told) -> bool:
        """Whether the server ends before it has sent this."""
        return len(told.pairs) > self.broken.get("dies", LENGTH)


class Quiet(ThreadingHTTPServer):
    """A server whose clients may leave in the middle."""

    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """Nothing."""


@contextmanager
def at_address(model: Model, handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """The address of a server whose handlers have this model."""
    server = Quiet(("127.0.0.1", 0), type("Bound", (handler,), {"model": model}))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        model.closed = True
        server.shutdown()
        server.server_close()
        model.thread.join(10)
