"""Interface of an engine, which generates tokens for many requests, one decode step of all of them at a time.

A streaming policy (`Streams`) makes its generator's engine and translates between rows of observations and requests.
Requests join and leave between two decode steps; weights change there too, in place. Sampling noise is counter-based,
keyed by (noise_key, index of the token in the answer): a token depends neither on the other requests nor on where its
generation was cut.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, Self, cast

import numpy as np
from numpy.typing import NDArray

from polyrhythm.policies.base import Act, Observations, Policy


class Generated(NamedTuple):
    """Tokens generated for one request so far, including the prefix that it resumed from.

    tokens [T] int32; logprobs [T] float32: behaviour log-probs, after temperature, top-k and top-p as in training;
    versions [T] int32: of the weights that sampled each token. finished: it ended by itself or at the length limit.
    """

    request_id: int
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    finished: bool


class EngineRequest(NamedTuple):
    """A prompt [P] int32, to be continued by 1 to `max_new_tokens` tokens, including those of the prefix. prefix:
    tokens generated before the request was aborted; they are kept unchanged."""

    request_id: int
    prompt: NDArray[np.int32]
    max_new_tokens: int
    greedy: bool
    noise_key: int
    prefix: Generated | None = None


@dataclass(slots=True)
class Progress:
    """A running request and its sampled tokens so far, including the prefix."""

    request: EngineRequest
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, request: EngineRequest) -> Self:
        progress, prefix = cls(request), request.prefix
        if prefix is not None:
            progress.tokens, progress.logprobs = prefix.tokens.tolist(), prefix.logprobs.tolist()
            progress.versions = prefix.versions.tolist()
        return progress

    def generated(self, *, finished: bool) -> Generated:
        return Generated(
            self.request.request_id,
            np.array(self.tokens, np.int32),
            np.array(self.logprobs, np.float32),
            np.array(self.versions, np.int32),
            finished,
        )


def refuse_unfit(request: EngineRequest, running: Collection[int], capacity: int, length: int) -> None:
    """ValueError: the engine has no free row, the request exceeds its length, or there is nothing to generate."""
    prompt, most = len(request.prompt), request.max_new_tokens
    done = 0 if request.prefix is None else len(request.prefix.tokens)
    if prompt < 1 or prompt + most > length or done >= most:
        raise ValueError(
            f"a request of {prompt} + {most} tokens, {done} of them done; the engine takes 1 to {length} in all, with "
            "one or more to do"
        )
    if len(running) >= capacity:
        raise ValueError(f"the engine has {capacity} requests; wait until one has finished")
    if request.request_id in running:
        raise ValueError(f"the engine has a request {request.request_id}; give each its own id")


class Engine(Protocol):
    """Continuous batching over the weights of one policy. capacity: maximum number of concurrent requests."""

    capacity: int

    def add(self, request: EngineRequest) -> None:
        """Run the request from the next step on. There must be fewer than `capacity` requests, and none with its id."""

    def abort(self, request_id: int) -> Generated:
        """Remove a request and return its tokens so far."""

    def step(self) -> list[Generated]:
        """Run one decode step of all requests; return the finished ones, which are removed."""

    def weights_changed(self, version: int) -> None:
        """Called between two steps, after the policy's weights were written in place. Later tokens carry this version;
        caches of the old weights may be kept or rebuilt (`Streams.make_engine`)."""

    def statistics(self) -> dict[str, int | float]:
        """Counts since its start.

        prompt_tokens: of prompts; shared_tokens: those whose keys and values were cached. checks, check_difference:
        number of comparisons of its log-probs with the module's, and the sum of their largest differences; missing for
        an engine that runs the module itself.
        """


class Streams(Protocol):
    """Methods of a policy with the trait streams, in addition to `Policy`, whose `act` gives the same in one pass."""

    def make_engine(self, capacity: int) -> Engine:
        """An engine over this module's own weights, on its device."""

    def prompt_of(self, obs: Observations) -> tuple[NDArray[np.int32], int]:
        """Prompt and maximum number of new tokens for one row of observations (arrays [1, ...])."""

    def act_of(self, obs: Observations, generated: Generated) -> Act:
        """The result of `act` for this row (arrays [1, ...]) had it sampled these tokens. Each step of the action has
        the version of its token; if there are more tokens than steps, the last step has the last token's."""

    def ask_server(self) -> None:
        """For a policy with the trait asks_server. RunHalted: the server does not answer, or is not the required
        one."""


def streaming(policy: Policy) -> Streams:
    """The policy, typed with the methods of `Streams`; it must have the trait streams."""
    return cast(Streams, policy)
