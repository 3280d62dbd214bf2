"""Implements the maths of flow matching as a stochastic policy, for any velocity function.

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
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from polyrhythm.policies.constants import kept

#: x [B,C,A], t [B] -> velocity noise − data [B,C,A], at time 1 = noise.
Velocity = Callable[[Tensor, Tensor], Tensor]

Kind = Literal["sde", "cps"]


class Normal(NamedTuple):
    """Distribution of a step: mean [B,C,A], std [B,C,A] or broadcast; std 0 for a step without noise."""

    mean: Tensor
    std: Tensor


def from_data(velocity: Velocity) -> Velocity:
    """Convert the velocity of a model whose time runs from 0 = noise to 1 = data (GR00T) to our time.

    Such a model predicts u = data − noise at its time 1 − t.
    """
    return lambda x, t: -velocity(x, 1.0 - t)


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
