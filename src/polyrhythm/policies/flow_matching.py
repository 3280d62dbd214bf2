"""Flow matching as a stochastic policy, for any velocity function: its maths, and the methods that sample by it.

Time runs from 1 (noise) to 0 (data) in K equal steps, t_i = (K − i)/K, s = t − 1/K. A state is x_t = t·noise +
(1 − t)·data and moves with the velocity v = noise − data. One step:

    x̂0 = x − v·t,  x̂1 = x + v·(1 − t)            predicted data and predicted noise
    x_s ~ N(w0·x̂0 + w1·x̂1, std²),  w0 = 1 − s
    ode          w1 = s                           std = 0
    flow_sde     w1 = s − σ²/(2tK)                std = σ/√K,  σ = a·√(t/(1 − t)), at t = 1 the denominator is 1 − t_1
    flow_cps     w1 = s·cos(aπ/2)                 std = s·sin(aπ/2), 0 in the last step
    flow_noise   w1 = s                           std from a network (`squashed`)

After Flow-GRPO (Liu et al. 2025) and pi_RL (Chen et al. 2025), flow_noise after ReinFlow (Zhang et al. 2025), flow_cps
after Coefficients-Preserving Sampling (Wang and Yu 2025). flow_sde keeps the ode's distribution of x_t, up to
discretisation error; the first step raises the variance by a⁴/4. flow_cps keeps the squared coefficients of old and new
noise at s² in each step, so none of it is left over at time 0.
Computations use the dtype of the state, float32 in a policy; a velocity is cast to it.

Example, K = 2, a = 0: `step_coefficients(2, 0.0)` is [[1, ½, ½, 0], [½, 1, 0, 0]]: the first step goes half-way to x̂0.

The methods start from N(0,1) noise and differ in which steps add noise, which states are stored (`forward_inputs`), and
which steps' log-probs count. A greedy row follows the ode without draws. Its start depends on the policy: zero for the
tiny VLA's head (the mean of the noise; for normal data exactly the mean of the samples), noise for the published
policies (`vla.flow_policy`). Draws depend on a row's key alone (`noise`), with a separate stream for each purpose.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Literal, NamedTuple, Protocol

import torch
from pydantic import BaseModel, Field, model_validator
from torch import Tensor

from polyrhythm.policies import distributions, noise
from polyrhythm.policies.base import SETTINGS
from polyrhythm.policies.constants import kept
from polyrhythm.specs import ArraySpec

Kind = Literal["sde", "cps"]
_START, _STEPS, _INDEX = 1, 2, 3
#: Fitted std of a step without residual error, as a multiple of min_std.
_ROOM = 1.2


class Normal(NamedTuple):
    """Distribution of a step: mean [B,C,A], std [B,C,A] or broadcast; std 0 for a step without noise."""

    mean: Tensor
    std: Tensor


def step_coefficients(steps: int, noise: float, kind: Kind = "sde") -> list[list[float]]:
    """[K,4]: t, w0, w1 and std of every step of flow_sde or flow_cps with noise a; of the ode for a = 0."""
    rows = []
    for i in range(steps):
        t, s = (steps - i) / steps, (steps - i - 1) / steps
        if kind == "cps":
            angle = noise * math.pi / 2.0
            rows.append([t, 1.0 - s, s * math.cos(angle), s * math.sin(angle)])
            continue
        sigma = noise * math.sqrt(t / (1.0 - min(t, (steps - 1) / steps)))
        rows.append([t, 1.0 - s, s - sigma**2 / (2.0 * t * steps), sigma / math.sqrt(steps)])
    return rows


@kept
def coefficient_table(steps: int, noise: float, kind: Kind, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`step_coefficients` as a tensor [K,4], indexed by each row's step."""
    with torch.inference_mode(False):
        return torch.tensor(step_coefficients(steps, noise, kind), dtype=dtype, device=device)


def step(x: Tensor, v: Tensor, coefficients: Tensor) -> Normal:
    """Distribution of the next state: x, v [B,C,A], coefficients [B,4] (rows of `step_coefficients`)."""
    v = v.to(x.dtype)
    t, w0, w1, std = coefficients.reshape(-1, 4, 1, 1).unbind(1)
    return Normal(w0 * (x - v * t) + w1 * (x + v * (1.0 - t)), std)


def squashed(raw: Tensor, smallest: float, largest: float) -> Tensor:
    """A std within bounds: tanh(raw) interpolates the log-variance between its bounds. Any shape."""
    low, high = 2.0 * math.log(smallest), 2.0 * math.log(largest)
    return torch.exp(0.5 * (low + (high - low) * 0.5 * (torch.tanh(raw) + 1.0)))


def chain(step_at: Callable[[int, Tensor], Normal], start: Tensor, draws: Sequence[Tensor]) -> Tensor:
    """All states from the start to the data: start [B,C,A], one draw [B,C,A] of standard normal noise per step
    -> [B,K+1,C,A]. step_at: number of the step and state -> distribution of the next one.
    """
    states = [start]
    for i, draw in enumerate(draws):
        mean, std = step_at(i, states[-1])
        states.append(mean + std * draw)
    return torch.stack(states, dim=1)


def between(data: Tensor, noise: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """Input and target of supervised training: the state x_t and its velocity. t broadcasts against the others."""
    return t * noise + (1.0 - t) * data, noise - data


#: The model for one batch of observations: x [B,C,A], t [B] -> velocity [B,C,A] and, if the method learns its noise,
#: the input [B,C,A] of `squashed`, which makes it a std.
Network = Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]
Kept = dict[str, Tensor]


def start_noise(shape: tuple[int, int], key: Tensor) -> Tensor:
    """Standard normal states at time 1: shape (C, A), key [B] int64 -> [B,C,A]."""
    return noise.normal(key, shape[0] * shape[1], _START).view(-1, *shape)


class Method(Protocol):
    """A sampling method. A sample's log-prob is computed by `evaluate` from the kept tensors, so both are bit-equal.
    steps: K."""

    def answers(self, steps: int, shape: tuple[int, int]) -> dict[str, ArraySpec]:
        """forward_inputs of one row, for actions of this shape (C, A)."""

    def sample(self, network: Network, steps: int, start: Tensor, greedy: Tensor, key: Tensor) -> tuple[Tensor, Kept]:
        """Sample from x_1 = start [B,C,A] (`start_noise`), with greedy [B] bool and key [B] int64; returns data
        [B,C,A], unclipped, and the inputs of `evaluate`."""

    def evaluate(self, network: Network, steps: int, kept: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Log-prob and entropy of the kept sample, each [B,C,A]."""


class Ode(BaseModel):
    """No noise in the steps. kept = {"start": x_1 [B,C,A]}; only the start's log-prob counts, without gradient: RL
    cannot train it."""

    model_config = SETTINGS

    type: Literal["ode"] = "ode"
    """The method's name."""

    def answers(self, steps: int, shape: tuple[int, int]) -> dict[str, ArraySpec]:  # noqa: ARG002
        return {"start": ArraySpec(shape, "float32")}

    def sample(self, network: Network, steps: int, start: Tensor, greedy: Tensor, key: Tensor) -> tuple[Tensor, Kept]:  # noqa: ARG002
        coefficients = _table(steps, 0.0, start)

        def step(i: int, x: Tensor) -> Normal:
            return _step(network, x, coefficients[i].expand(len(x), -1))

        return chain(step, start, [torch.zeros_like(start)] * steps)[:, -1], {"start": start}

    def evaluate(self, network: Network, steps: int, kept: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        return _logprob_and_entropy(kept["start"], _standard(kept["start"]))


class FlowSde(BaseModel):
    """Noise in one step, drawn for each row.

    kept = {"step": k int64 [B], "before": x_k, "after": x_k+1 [B,C,A]}; the log-prob is that of step k. Each row draws
    k uniformly, so that every batch trains all steps; the other steps follow the ode.
    """

    model_config = SETTINGS
    kind: ClassVar[Kind] = "sde"

    type: Literal["flow_sde"] = "flow_sde"
    """The method's name."""
    noise: float = Field(0.5, gt=0.0)
    """Strength a: the noisy step from time t has a std of a·√(t/(1 − t)/K), in units of half the action range."""

    def answers(self, steps: int, shape: tuple[int, int]) -> dict[str, ArraySpec]:  # noqa: ARG002
        return {"step": ArraySpec((), "int64"), **dict.fromkeys(("before", "after"), ArraySpec(shape, "float32"))}

    def sample(self, network: Network, steps: int, start: Tensor, greedy: Tensor, key: Tensor) -> tuple[Tensor, Kept]:
        noisy_steps = steps - (self.kind == "cps")
        chosen = (noise.uniform(key, 1, _INDEX).squeeze(1) * noisy_steps).long()
        numbers = torch.arange(steps, device=chosen.device)
        noisy = (chosen.unsqueeze(1) == numbers) & ~greedy.unsqueeze(1)  # one_hot would read its input on the host
        quiet, loud = _table(steps, 0.0, start), _table(steps, self.noise, start, self.kind)
        coefficients = torch.where(noisy.unsqueeze(-1), loud, quiet)  # [B,K,4]
        draw = noise.normal(key, start[0].numel(), _STEPS).view_as(start)
        states = chain(lambda i, x: _step(network, x, coefficients[:, i]), start, [draw] * steps)
        row = torch.arange(len(start), device=start.device)
        return states[:, -1], {"step": chosen, "before": states[row, chosen], "after": states[row, chosen + 1]}

    def evaluate(self, network: Network, steps: int, kept: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        coefficients = _table(steps, self.noise, kept["before"], self.kind)[kept["step"]]
        return _logprob_and_entropy(kept["after"], _step(network, kept["before"], coefficients))


class FlowCps(FlowSde):
    """Noise in one step, drawn for each row, that replaces a part of the state's noise (coefficients-preserving
    sampling). The last step, which has no noise, is never drawn."""

    kind: ClassVar[Kind] = "cps"

    type: Literal["flow_cps"] = "flow_cps"  # type: ignore[assignment]
    """The method's name."""
    noise: float = Field(0.5, gt=0.0, le=1.0)
    """Strength a: the noisy step to time s has a std of s·sin(aπ/2), in units of half the action range; with 1 all of
    the noise is new."""


class FlowNoise(BaseModel):
    """Noise in every step, its strength learned. kept = {"chain": x_1 … x_0 [B,K+1,C,A]}. The start's term counts
    although it has no gradient, so with the mean a ratio is the (K+1)-th root of the product."""

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
    def _ordered(self) -> FlowNoise:
        if self.min_std >= self.max_std:
            raise ValueError(f"method.min_std = {self.min_std} is not below max_std = {self.max_std}: lower it")
        return self

    def answers(self, steps: int, shape: tuple[int, int]) -> dict[str, ArraySpec]:
        return {"chain": ArraySpec((steps + 1, *shape), "float32")}

    def sample(self, network: Network, steps: int, start: Tensor, greedy: Tensor, key: Tensor) -> tuple[Tensor, Kept]:
        draws = noise.normal(key, steps * start[0].numel(), _STEPS).view(len(key), steps, *start.shape[1:])
        draws = torch.where(greedy.view(-1, 1, 1, 1), 0.0, draws)
        states = chain(self.step(network, steps), start, draws.unbind(1))
        return states[:, -1], {"chain": states}

    def evaluate(self, network: Network, steps: int, kept: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        before, *rest = kept["chain"].unbind(1)
        logprob, entropy = _logprob_and_entropy(before, _standard(before))
        step = self.step(network, steps)
        for i, after in enumerate(rest):
            of_step = _logprob_and_entropy(after, step(i, before))
            logprob, entropy, before = logprob + of_step[0], entropy + of_step[1], after
        terms = steps + 1 if self.logprob == "mean" else 1
        return logprob / terms, entropy / terms

    def times(self, steps: int, like: Tensor) -> Tensor:
        """Start times of the steps [K]; the first is 1."""
        return _table(steps, 0.0, like)[:, 0]

    def misfit(self, steps: int, error: Tensor, t: Tensor, raw: Tensor) -> Tensor:
        """Negative log-likelihood, averaged over entries, of a step's residual, which is error / (tK). error: of the
        predicted data; t broadcasts against the others. Without error the minimum is at 1.2 min_std: at the bound
        itself the gradient would vanish."""
        residual = error / (t * steps)
        variance = residual.square() + (_ROOM * self.min_std) ** 2
        std = squashed(raw.to(error.dtype), self.min_std, self.max_std)
        return (0.5 * variance / std.square() + std.log()).mean()

    def step(self, network: Network, steps: int) -> Callable[[int, Tensor], Normal]:
        """Number of a step and state -> distribution of the next one."""

        def distribution(i: int, x: Tensor) -> Normal:
            coefficients = _table(steps, 0.0, x)[i].expand(len(x), -1)
            v, raw = network(x, coefficients[:, 0])
            assert raw is not None
            mean, _ = step(x, v, coefficients)
            return Normal(mean, squashed(raw.to(x.dtype), self.min_std, self.max_std))

        return distribution


#: A method's settings by their `type`.
FlowMethod = Ode | FlowSde | FlowCps | FlowNoise


def check_steps(method: object, steps: int) -> None:
    """ValueError: the method has no noisy step among these."""
    if isinstance(method, FlowCps) and steps < 2:
        raise ValueError(
            f"steps = {steps}: the last step of flow_cps has no noise, so it needs another one; set it to 2 or more, "
            "or method to flow_sde"
        )


def _step(network: Network, x: Tensor, coefficients: Tensor) -> Normal:
    return step(x, network(x, coefficients[:, 0])[0], coefficients)


def _table(steps: int, strength: float, like: Tensor, kind: Kind = "sde") -> Tensor:
    return coefficient_table(steps, strength, kind, like.dtype, like.device)


def _standard(like: Tensor) -> Normal:
    return Normal(torch.zeros_like(like), torch.ones_like(like))


def _logprob_and_entropy(x: Tensor, normal: Normal) -> tuple[Tensor, Tensor]:
    log_std = normal.std.log()
    return distributions.normal_logprob(x, normal.mean, log_std), distributions.normal_entropy(log_std).expand_as(x)
