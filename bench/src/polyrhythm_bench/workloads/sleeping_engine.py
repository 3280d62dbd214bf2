"""An engine that sleeps instead of decoding, and a policy around any other that answers by it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, Field, field_validator
from torch import Tensor

from polyrhythm.plugins.virtual.clustersim.costs import Cost, Count, parse_cost, parse_count
from polyrhythm.policies.base import SETTINGS, Act, Evaluation, Observations, Policy, as_settings
from polyrhythm.policies.engine import EngineRequest, Generated, Progress, refuse_unfit
from polyrhythm.policies.form import PolicyForm, Role
from polyrhythm.specs import EnvSpec
from polyrhythm_bench.workloads.wrapped_policy import InnerPolicy, WrappedPolicy, wrapped_form

#: Longest answer.
LONGEST = 1_000_000


@dataclass(frozen=True, slots=True)
class DecodingCosts:
    """tokens: length of an answer, a function of its noise key, cut at `longest`; prefill: of reading prompts; decode:
    of a step, by the answers under way."""

    tokens: Count
    prefill: Cost
    decode: Cost
    longest: int = LONGEST

    def length(self, noise_key: int) -> int:
        return min(self.longest, self.tokens.draw(random.Random(noise_key)))


class Sleeper:
    """Sleeps until as long after the end of its last sleep as it is told, if it was busy all the time. `sleep` and
    `clock` are parameters so that tests need no real time."""

    def __init__(
        self, sleep: Callable[[float], None] = time.sleep, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._sleep, self._clock, self._until = sleep, clock, 0.0

    def begin(self) -> None:
        """Work begins now."""
        self._until = self._clock()

    def pass_s(self, seconds: float) -> None:
        """Let so many seconds of work pass."""
        self._until += seconds
        self._sleep(max(0.0, self._until - self._clock()))


class SleepingEngine:
    """An engine whose decode steps take as long as the costs say, whatever else this process does meanwhile."""

    def __init__(self, costs: DecodingCosts, capacity: int, sleeper: Sleeper | None = None) -> None:
        self.capacity = capacity
        self._costs, self._sleeper, self._rng = costs, sleeper or Sleeper(), random.Random(0)
        self._running: dict[int, Progress] = {}
        self._lengths: dict[int, int] = {}
        self._new = 0
        self._version = -1

    def add(self, request: EngineRequest) -> None:
        refuse_unfit(request, self._running, self.capacity, LONGEST + 1)
        if not self._running:
            self._sleeper.begin()
        self._running[request.request_id] = Progress.of(request)
        self._lengths[request.request_id] = self._costs.length(request.noise_key)
        self._new += 1

    def abort(self, request_id: int) -> Generated:
        """KeyError: there is no such request."""
        del self._lengths[request_id]
        return self._running.pop(request_id).generated(finished=False)

    def statistics(self) -> dict[str, int | float]:
        return {}  # it has no prompts

    def weights_changed(self, version: int) -> None:
        self._version = version
        self._sleeper.begin()

    def step(self) -> list[Generated]:
        if not self._running:
            return []
        seconds = self._costs.decode.draw(self._rng, len(self._running))
        if self._new:
            seconds += self._costs.prefill.draw(self._rng, self._new)
            self._new = 0
        self._sleeper.pass_s(seconds)
        finished = []
        for request_id, row in list(self._running.items()):
            row.tokens.append(0)
            row.logprobs.append(0.0)
            row.versions.append(self._version)
            if len(row.tokens) >= self._lengths[request_id]:
                del self._running[request_id], self._lengths[request_id]
                finished.append(row.generated(finished=True))
        return finished


class SleepingLmSettings(BaseModel):
    """The policy `policy`, whose actions are answers of `tokens` tokens by an engine that sleeps; and `evaluate`, what
    an update takes."""

    model_config = SETTINGS

    type: str
    """This class as module:Class."""
    policy: InnerPolicy
    """The policy's own settings, by type."""
    tokens: str
    """Distribution of an answer's length, such as lognormal:60steps:1.0."""
    longest: Annotated[int, Field(ge=1, le=LONGEST)] = LONGEST
    """Tokens at which an answer is cut."""
    prefill: str = "0ms"
    """What reading prompts takes, by their number."""
    decode: str = "0ms"
    """What a decode step takes, by the answers under way."""
    evaluate: str = "0ms"
    """What an evaluation for the loss takes."""

    @field_validator("prefill", "decode", "evaluate")
    @classmethod
    def _parses(cls, cost: str) -> str:
        parse_cost(cost)
        return cost

    def form(self, env_spec: EnvSpec) -> PolicyForm:
        return wrapped_form(self.policy, env_spec)

    def build(self, env_spec: EnvSpec, *, seed: int, device: str, role: Role) -> SleepingLm:
        inner = as_settings(self.policy).build(env_spec, seed=seed, device=device, role=role)
        costs = DecodingCosts(parse_count(self.tokens), parse_cost(self.prefill), parse_cost(self.decode), self.longest)
        return SleepingLm(inner, costs, parse_cost(self.evaluate))


class SleepingLm(WrappedPolicy):
    """The policy; its answers are the inner policy's actions, later."""

    def __init__(self, policy: Policy, costs: DecodingCosts, evaluate: Cost) -> None:
        super().__init__(policy)
        self._costs, self._evaluate, self._rng = costs, evaluate, random.Random(0)

    def act(self, obs: Observations, greedy: Tensor, noise_key: Tensor) -> Act:
        """One pass, which lasts until its longest answer ends."""
        engine = self.make_engine(len(greedy))
        for row, key in enumerate(noise_key.tolist()):
            engine.add(EngineRequest(row, np.zeros(1, np.int32), LONGEST, False, key))
        left = len(greedy)
        while left:
            left -= len(engine.step())
        return self._policy.act(obs, greedy, noise_key)

    def evaluate(self, obs: Observations, forward_inputs: Mapping[str, Tensor]) -> Evaluation:
        begin = time.monotonic()
        evaluation = self._policy.evaluate(obs, forward_inputs)
        time.sleep(max(0.0, begin + self._evaluate.draw(self._rng) - time.monotonic()))
        return evaluation

    def make_engine(self, capacity: int) -> SleepingEngine:
        return SleepingEngine(self._costs, capacity)

    def prompt_of(self, obs: Observations) -> tuple[NDArray[np.int32], int]:  # noqa: ARG002 (the contract's)
        return np.zeros(1, np.int32), LONGEST

    def act_of(self, obs: Observations, generated: Generated) -> Act:
        return self._policy.act(obs, torch.zeros(1, dtype=torch.bool), torch.tensor([generated.request_id]))
