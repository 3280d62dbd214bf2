"""Defines the interface of an engine: it generates tokens for many requests, one decode step of all of them at a time.

A policy that generates by streams (`Streams`) makes the engine of its generator and translates between rows of
observations and requests. Requests join and leave between two decode steps, and so do weights, in place.

Sampling noise is counter-based, keyed by (noise_key, index of the token in the answer): a token depends neither on who
else is in the batch nor on where its generation was cut.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, Self, cast

import numpy as np
from numpy.typing import NDArray

from polyrhythm.policies.base import Act, Observations, Policy


class Generated(NamedTuple):
    """What an engine has generated for one request so far, including the prefix that it resumed from.

    tokens [T] int32; logprobs [T] float32: behaviour log-probs, after temperature, top-k and top-p as in training;
    versions [T] int32: of the weights that sampled each token. finished: it ended by itself or at the length limit.
    """

    request_id: int
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    finished: bool


class EngineRequest(NamedTuple):
    """A prompt [P] int32, to be continued by 1 to `max_new_tokens` tokens, the prefix's included.

    prefix: what was generated before the request was aborted; those tokens are kept as they are.
    """

    request_id: int
    prompt: NDArray[np.int32]
    max_new_tokens: int
    greedy: bool
    noise_key: int
    prefix: Generated | None = None


@dataclass(slots=True)
class Progress:
    """A request under way, and what was sampled for it so far, the prefix included."""

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
    """ValueError: an engine that runs these has no room for it, in rows or in length, or it would generate nothing."""
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
    """Continuous batching over the weights of one policy. capacity: the most requests at a time."""

    capacity: int

    def add(self, request: EngineRequest) -> None:
        """The request runs from the next step on. There are fewer than `capacity`, and none of its id."""
        ...

    def abort(self, request_id: int) -> Generated:
        """What was generated; the request is gone."""
        ...

    def step(self) -> list[Generated]:
        """One decode step of all running requests; those that finished, which are gone."""
        ...

    def weights_changed(self, version: int) -> None:
        """Called between two steps, after the policy's weights were written in place: tokens from here on carry this
        version, and what was cached of the old weights may be kept or made anew (`Streams.make_engine`)."""
        ...

    def statistics(self) -> dict[str, int | float]:
        """Counts since its start. prompt_tokens: of prompts; shared_tokens: those of them whose keys and values were
        there already. checks, check_difference: comparisons of its log-probs with the module's, and the sum of the
        largest difference of each; an engine that runs the module itself has none."""
        ...


class Streams(Protocol):
    """A policy with the trait streams: beside the methods of `Policy`, where `act` is the same in one pass."""

    def make_engine(self, capacity: int) -> Engine:
        """An engine over this module's own weights, on its device."""
        ...

    def prompt_of(self, obs: Observations) -> tuple[NDArray[np.int32], int]:
        """Prompt and the most new tokens for one row of observations (arrays [1, ...])."""
        ...

    def act_of(self, obs: Observations, generated: Generated) -> Act:
        """What `act` would have returned for this row (arrays [1, ...]) had it sampled these tokens. Each step
        of the action has the version of its token; where tokens are more than steps, the last step has the last's."""
        ...

    def ask_server(self) -> None:
        """Of a policy with the trait asks_server: RunHalted if the server is not there, or not the one it needs."""
        ...


def streaming(policy: Policy) -> Streams:
    """The policy, which has the trait streams, by the methods of `Streams`."""
    return cast(Streams, policy)
