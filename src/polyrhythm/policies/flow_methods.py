"""Samples actions by flow matching and computes their log-probs: ode, flow_sde, flow_cps, flow_noise.

All start from N(0,1) noise and take K steps (`flow_matching`); they differ in which steps add noise, which states are
stored (`forward_inputs`), and which steps' log-probs count. A greedy row follows the ode without draws. Its start
depends on the policy: zero for the tiny VLA's head (the mean of the noise; for normal data exactly the mean of the
samples), noise for the published policies (`vla.flow_policy`). Draws depend on a row's key alone (`noise`), with a
separate stream for each purpose.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, Protocol

import torch
from pydantic import BaseModel, Field, model_validator
from torch import Tensor

from polyrhythm.policies import distributions, flow_matching, noise
from polyrhythm.policies.base import SETTINGS
from polyrhythm.specs import ArraySpec

_START, _STEPS, _INDEX = 1, 2, 3
#: Fitted std of a step without residual error, as a multiple of min_std.
_ROOM = 1.2


#: The model for one batch of observations: x [B,C,A], t [B] -> velocity [B,C,A] and, if the method learns its noise,
#: the input [B,C,A] of `squashed`, which makes it a std.
Network = Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]
Kept = dict[str, Tensor]


class Method(Protocol):
    """A sampling method. A sample's log-prob is computed by `evaluate` from the kept tensors, so both are bit-equal."""

    def sample(self, network: Network, start: Tensor, greedy: Tensor, key: Tensor) -> tuple[Tensor, Kept]:
        """Sample from x_1 = start [B,C,A] (`start_noise`), with greedy [B] bool and key [B] int64; returns data
        [B,C,A], unclipped, and the inputs of `evaluate`."""
        ...

    def evaluate(self, network: Network, kept: Mapping[str, Tensor], /) -> tuple[Tensor, Tensor]:
        """Log-prob and entropy of the kept sample, each [B,C,A]."""
        ...


def start_noise(shape: tuple[int, int], key: Tensor) -> Tensor:
    """Standard normal states at time 1: shape (C, A), key [B] int64 -> [B,C,A]."""
    return noise.normal(key, shape[0] * shape[1], _START).view(-1, *shape)


class OdeSettings(BaseModel):
    """No noise in the steps."""

    model_config = SETTINGS

    type: Literal["ode"] = "ode"
    """The method's name."""

    def answers(self, steps: int, shape: tuple[int, int]) -> dict[str, ArraySpec]:  # noqa: ARG002
        """forward_inputs of one row, for actions of this shape (C, A)."""
        return {"start": ArraySpec(shape, "float32")}

    def build(self, steps: int) -> Ode:
        return Ode(steps)


class FlowSdeSettings(BaseModel):
    """Noise in one step, drawn for each row."""

    model_config = SETTINGS

    type: Literal["flow_sde"] = "flow_sde"
    """The method's name."""
    noise: float = Field(0.5, gt=0.0)
    """Strength a: the noisy step from time t has a std of a·√(t/(1 − t)/K), in units of half the action range."""

    def answers(self, steps: int, shape: tuple[int, int]) -> dict[str, ArraySpec]:  # noqa: ARG002
        return {"step": ArraySpec((), "int64"), **dict.fromkeys(("before", "after"), ArraySpec(shape, "float32"))}

    def build(self, steps: int) -> OneNoisyStep:
        return OneNoisyStep(steps, self.noise)


class FlowCpsSettings(BaseModel):
    """Noise in one step, drawn for each row, that replaces a part of the state's noise (coefficients-preserving
    sampling)."""

    model_config = SETTINGS

    type: Literal["flow_cps"] = "flow_cps"
    """The method's name."""
    noise: float = Field(0.5, gt=0.0, le=1.0)
    """Strength a: the noisy step to time s has a std of s·sin(aπ/2), in units of half the action range; with 1 all of
    the noise is new."""

    def answers(self, steps: int, shape: tuple[int, int]) -> dict[str, ArraySpec]:
        return FlowSdeSettings().answers(steps, shape)

    def build(self, steps: int) -> OneNoisyStep:
        return OneNoisyStep(steps, self.noise, "cps")


class FlowNoiseSettings(BaseModel):
    """Noise in every step, its strength learned."""

    model_config = SETTINGS

    type: Literal["flow_noise"] = "flow_noise"
    """The method's name."""
    min_std: float = Field(0.2, gt=0.0)
    """Smallest standard deviation of a step, in units of half the action range."""
    max_std: float = Field(1.0, gt=0.0)
    """Largest standard deviation of a step. The supervised phase fits it in between, from halfway in the logarithm."""
    logprob: Literal["sum", "mean"] = "sum"
    """Log-prob and entropy: the sum over the start and the K steps, or their mean (RLinf's joint_logprob)."""

    @model_validator(mode="after")
    def _ordered(self) -> FlowNoiseSettings:
        if self.min_std >= self.max_std:
            raise ValueError(f"method.min_std = {self.min_std} is not below max_std = {self.max_std}: lower it")
        return self

    def answers(self, steps: int, shape: tuple[int, int]) -> dict[str, ArraySpec]:
        return {"chain": ArraySpec((steps + 1, *shape), "float32")}

    def build(self, steps: int) -> FlowNoise:
        return FlowNoise(steps, self.min_std, self.max_std, mean=self.logprob == "mean")


def check_steps(method: BaseModel, steps: int) -> None:
    """ValueError: the method has no noisy step among these."""
    if isinstance(method, FlowCpsSettings) and steps < 2:
        raise ValueError(
            f"steps = {steps}: the last step of flow_cps has no noise, so it needs another one; set it to 2 or more, "
            "or method to flow_sde"
        )


class Ode:
    """The ode. kept = {"start": x_1 [B,C,A]}; only the start's log-prob counts, without gradient: RL cannot train
    it."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def sample(self, network: Network, start: Tensor, greedy: Tensor, key: Tensor) -> tuple[Tensor, Kept]:  # noqa: ARG002
        coefficients = _table(self.steps, 0.0, start)

        def step(i: int, x: Tensor) -> flow_matching.Normal:
            return _step(network, x, coefficients[i].expand(len(x), -1))

        states = flow_matching.chain(step, start, [torch.zeros_like(start)] * self.steps)
        return states[:, -1], {"start": start}

    def evaluate(self, _network: Network, kept: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        return _logprob_and_entropy(kept["start"], _standard(kept["start"]))


class OneNoisyStep:
    """One noisy step per row: flow_sde and flow_cps.

    kept = {"step": k int64 [B], "before": x_k, "after": x_k+1 [B,C,A]}; the log-prob is that of step k. Each row draws
    k uniformly, so that every batch trains all steps; the other steps follow the ode. flow_cps never draws the last
    step, which has no noise.
    """

    def __init__(self, steps: int, noise: float, kind: flow_matching.Kind = "sde") -> None:
        self.steps, self.noise, self.kind = steps, noise, kind
        self.noisy_steps = steps - (kind == "cps")

    def sample(self, network: Network, start: Tensor, greedy: Tensor, key: Tensor) -> tuple[Tensor, Kept]:
        chosen = (noise.uniform(key, 1, _INDEX).squeeze(1) * self.noisy_steps).long()
        steps = torch.arange(self.steps, device=chosen.device)
        noisy = (chosen.unsqueeze(1) == steps) & ~greedy.unsqueeze(1)  # one_hot would read its input on the host
        quiet, loud = _table(self.steps, 0.0, start), _table(self.steps, self.noise, start, self.kind)
        coefficients = torch.where(noisy.unsqueeze(-1), loud, quiet)  # [B,K,4]

        def step(i: int, x: Tensor) -> flow_matching.Normal:
            return _step(network, x, coefficients[:, i])

        draw = noise.normal(key, start[0].numel(), _STEPS).view_as(start)
        states = flow_matching.chain(step, start, [draw] * self.steps)
        row = torch.arange(len(start), device=start.device)
        kept = {"step": chosen, "before": states[row, chosen], "after": states[row, chosen + 1]}
        return states[:, -1], kept

    def evaluate(self, network: Network, kept: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        before, after = kept["before"], kept["after"]
        coefficients = _table(self.steps, self.noise, before, self.kind)[kept["step"]]
        return _logprob_and_entropy(after, _step(network, before, coefficients))


class FlowNoise:
    """Learned noise in all steps. kept = {"chain": x_1 … x_0 [B,K+1,C,A]}; log-prob: sum over the start and K steps.

    mean: the mean of these K+1 terms instead, for the entropy too. The start's term counts although it has no gradient,
    so a ratio is the (K+1)-th root of the product.
    """

    def __init__(self, steps: int, min_std: float, max_std: float, *, mean: bool = False) -> None:
        self.steps, self.min_std, self.max_std, self.mean = steps, min_std, max_std, mean

    def sample(self, network: Network, start: Tensor, greedy: Tensor, key: Tensor) -> tuple[Tensor, Kept]:
        count = self.steps * start[0].numel()
        draws = noise.normal(key, count, _STEPS).view(len(key), self.steps, *start.shape[1:])
        draws = torch.where(greedy.view(-1, 1, 1, 1), 0.0, draws)
        states = flow_matching.chain(lambda i, x: self._step(network, i, x), start, draws.unbind(1))
        return states[:, -1], {"chain": states}

    def evaluate(self, network: Network, kept: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        start, *rest = kept["chain"].unbind(1)
        logprob, entropy = _logprob_and_entropy(start, _standard(start))
        before = start
        for i, after in enumerate(rest):
            of_step = _logprob_and_entropy(after, self._step(network, i, before))
            logprob, entropy, before = logprob + of_step[0], entropy + of_step[1], after
        if self.mean:
            return logprob / (self.steps + 1), entropy / (self.steps + 1)
        return logprob, entropy

    def times(self, like: Tensor) -> Tensor:
        """Start times of the steps [K]; the first is 1."""
        return _table(self.steps, 0.0, like)[:, 0]

    def misfit(self, error: Tensor, t: Tensor, raw: Tensor) -> Tensor:
        """Negative log-likelihood, averaged over entries, of a step's residual, which is error / (tK).

        error: of the predicted data; t broadcasts against the others. Without error the minimum is at 1.2 min_std: at
        the bound itself the gradient would vanish.
        """
        residual = error / (t * self.steps)
        variance = residual.square() + (_ROOM * self.min_std) ** 2
        std = self._std(raw.to(error.dtype))
        return (0.5 * variance / std.square() + std.log()).mean()

    def _step(self, network: Network, i: int, x: Tensor) -> flow_matching.Normal:
        coefficients = _table(self.steps, 0.0, x)[i].expand(len(x), -1)
        v, raw = network(x, coefficients[:, 0])
        assert raw is not None
        mean, _ = flow_matching.step(x, v, coefficients)
        return flow_matching.Normal(mean, self._std(raw.to(x.dtype)))

    def _std(self, raw: Tensor) -> Tensor:
        return flow_matching.squashed(raw, self.min_std, self.max_std)


def _step(network: Network, x: Tensor, coefficients: Tensor) -> flow_matching.Normal:
    return flow_matching.step(x, network(x, coefficients[:, 0])[0], coefficients)


def _table(steps: int, strength: float, like: Tensor, kind: flow_matching.Kind = "sde") -> Tensor:
    return flow_matching.coefficient_table(steps, strength, kind, like.dtype, like.device)


def _standard(like: Tensor) -> flow_matching.Normal:
    return flow_matching.Normal(torch.zeros_like(like), torch.ones_like(like))


def _logprob_and_entropy(x: Tensor, normal: flow_matching.Normal) -> tuple[Tensor, Tensor]:
    log_std = normal.std.log()
    return distributions.normal_logprob(x, normal.mean, log_std), distributions.normal_entropy(log_std).expand_as(x)
