"""A wrapper that makes any policy slow: acting and evaluating take configured times."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from pydantic import BaseModel, field_validator
from torch import Tensor

from polyrhythm.plugins.virtual.clustersim.costs import Cost, parse_cost
from polyrhythm.policies.base import SETTINGS, Act, Evaluation, Observations, Policy, as_settings
from polyrhythm.policies.form import PolicyForm, Role
from polyrhythm.specs import EnvSpec
from polyrhythm_bench.workloads.wrapped_policy import InnerPolicy, WrappedPolicy, wrapped_form


class SlowPolicySettings(BaseModel):
    """The policy `policy`, which takes `act` to act on rows, and `evaluate` to evaluate chunk steps: costs as in
    `plugins.virtual.clustersim.costs`, `10ms+0.1ms` being 10 ms and 0.1 ms for each of them."""

    model_config = SETTINGS

    type: str
    """This class as module:Class."""
    policy: InnerPolicy
    """The policy's own settings, by type."""
    act: str = "0ms"
    """What a forward pass takes, by its rows."""
    evaluate: str = "0ms"
    """What an evaluation for the loss takes, by its chunk steps."""
    factor_file: str = ""
    """File with a number that multiplies `act`, read at each pass, so that the cost can change during a run."""

    @field_validator("act", "evaluate")
    @classmethod
    def _parses(cls, cost: str) -> str:
        parse_cost(cost)
        return cost

    def form(self, env_spec: EnvSpec) -> PolicyForm:
        return wrapped_form(self.policy, env_spec)

    def build(self, env_spec: EnvSpec, *, seed: int, device: str, role: Role) -> SlowPolicy:
        inner = as_settings(self.policy).build(env_spec, seed=seed, device=device, role=role)
        factor = Path(self.factor_file) if self.factor_file else None
        return SlowPolicy(inner, parse_cost(self.act), parse_cost(self.evaluate), factor=factor)


class SlowPolicy(WrappedPolicy):
    """A policy whose calls take as long as the costs say: it sleeps for the rest of that time after its own work.

    `sleep` and `clock` are parameters so that tests need no real time.
    """

    def __init__(
        self,
        policy: Policy,
        act: Cost,
        evaluate: Cost,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
        factor: Path | None = None,
    ) -> None:
        super().__init__(policy)
        self._act, self._evaluate, self._sleep, self._clock = act, evaluate, sleep, clock
        self._rng, self._factor = random.Random(), factor

    def act(self, obs: Observations, greedy: Tensor, noise_key: Tensor) -> Act:
        begin = self._clock()
        act = self._policy.act(obs, greedy, noise_key)
        factor = 1.0 if self._factor is None else float(self._factor.read_text(encoding="utf-8"))
        self._last(begin, factor * self._act.draw(self._rng, len(greedy)))
        return act

    def evaluate(self, obs: Observations, forward_inputs: Mapping[str, Tensor]) -> Evaluation:
        begin = self._clock()
        evaluation = self._policy.evaluate(obs, forward_inputs)
        self._last(begin, self._evaluate.draw(self._rng, len(next(iter(obs.values())))))
        return evaluation

    def _last(self, begin: float, seconds: float) -> None:
        """Sleep until so many seconds after the beginning."""
        self._sleep(max(0.0, begin + seconds - self._clock()))
