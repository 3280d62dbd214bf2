"""How much better was an action than expected, over packed trajectories: by a value function, or by a group's others.

Packed means that the decisions of all trajectories stand one after another, without padding: trajectory 0
complete and in time order, then trajectory 1, and so on.

Every estimate has the same form: `estimate(samples, *, settings by keyword)`, and stands in `ADVANTAGES` under the name
that `algorithm.advantage.type` gives; its keywords are that section's fields, gamma and gae_lambda. It gives
`Advantages`, or a tensor where it has no returns of its own (a value function is then trained on those of `gae`). A new
one is one function and one line in the table, or a user's `module:function`.

Sources: Schulman et al. 2016 (GAE), truncation as in Pardo et al. 2018; Espeholt et al. 2018 (V-trace); Shao et al.
2024 (GRPO); Ahmadian et al. 2024 (RLOO); Hu 2025 (REINFORCE++). Deviation: masked entries are skipped instead of
zeroed, so that a chunk cut short by the end of its episode never puts a gap into a recursion.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from polyrhythm.algorithms.divergence import LOG_RATIO_LIMIT

Bootstrap = Literal["standard", "always"]
GroupStd = Literal["sample", "population", "none"]


class Samples(NamedTuple):
    """What an estimate sees of N decisions of M trajectories.

    rewards, penalty, values, valid (bool), log_ratio: [N] or [N,C]. penalty: −β·KL to the reference policy, contained
    in rewards; zeros where it is in the loss or nowhere. values: V of the policy that acted (for `v_trace` of the
    proximal one). log_ratio: log of the proximal over the behaviour policy, zeros where the former was not computed.
    trajectory [N] int64, non-decreasing, in 0..M-1. bootstrap [M]: the value after each trajectory's last valid entry:
    V(final observation), or 0 where the task ended there. group [M] int64: equal where task and initial state are; any
    numbers, in any order.
    """

    rewards: Tensor
    penalty: Tensor
    values: Tensor
    valid: Tensor
    log_ratio: Tensor
    trajectory: Tensor
    bootstrap: Tensor
    group: Tensor


class Advantages(NamedTuple):
    """advantages and returns (targets of the value function), shaped like the rewards; zero where masked."""

    advantages: Tensor
    returns: Tensor


Estimate = Callable[..., Advantages | Tensor]


def gae(samples: Samples, *, gamma: float, gae_lambda: float) -> Advantages:
    """A_t = δ_t + γλ A_{t+1} with δ_t = r_t + γ V_{t+1} − V_t, and returns A_t + V_t.

    Example: rewards (0, 1), values (0.5, 0.5), bootstrap 0, γ = 1, λ = 1 → advantages (0.5, 0.5), returns (1, 1).
    """
    entries = _Entries(samples)
    value = entries.take(samples.values)
    delta = entries.take(samples.rewards) + gamma * entries.next(value, samples.bootstrap) - value
    advantage = entries.backward(delta, gamma * gae_lambda)
    return Advantages(entries.put(advantage), entries.put(advantage + value))


def v_trace(samples: Samples, *, gamma: float, gae_lambda: float, rho_cap: float, trace_cap: float) -> Advantages:
    """Returns v_t = V_t + min(ρ̄, ρ_t)·δ_t + γ c_t (v_{t+1} − V_{t+1}), advantages r_t + γ v_{t+1} − V_t.

    ρ_t = π_prox/π_b over the actions that one reward covers, c_t = λ·min(c̄, ρ_t), δ_t as in `gae`; ρ̄, c̄: the caps.
    The further factor min(ρ̄, ρ_t) of the paper's policy gradient is the loss's (tis, decoupled_ppo, …), not the
    advantage's. On-policy the returns are GAE's, and with λ = 1 the advantages too.
    """
    entries = _Entries(samples)
    value, reward = entries.take(samples.values), entries.take(samples.rewards)
    ratio = entries.take(samples.log_ratio).clamp(max=LOG_RATIO_LIMIT).exp()
    delta = ratio.clamp(max=rho_cap) * (reward + gamma * entries.next(value, samples.bootstrap) - value)
    target = value + entries.backward(delta, gamma * gae_lambda * ratio.clamp(max=trace_cap))
    advantage = reward + gamma * entries.next(target, samples.bootstrap) - value
    return Advantages(entries.put(advantage), entries.put(target))


def grpo(samples: Samples, *, std: GroupStd = "sample") -> Tensor:
    """A_i = (R_i − mean_g)/(std_g + 1e-6): a trajectory's whole reward against its group's, at all its entries.

    std divides by the group's size − 1 (sample) or by its size (population), or is left out (none, as in Dr. GRPO). A
    group of one, or of equal scores, gives 0.
    Example: scores (1, 0, 0, 1), one group → mean 0.5, std 0.577 → (0.866, -0.866, -0.866, 0.866).
    """
    groups = _Groups(samples)
    centred = groups.centred(_scores(samples.rewards, samples))
    if std != "none":
        freedom = (groups.count - 1).clamp(min=1) if std == "sample" else groups.count
        centred = centred / ((groups.sums(centred.square()) / freedom).sqrt()[groups.place] + 1e-6)
    return _at_all_entries(centred, samples)


def rloo(samples: Samples) -> Tensor:
    """A_i = R_i − the mean score of the others of its group, at all its entries; a group of one gives 0.

    It is n/(n−1)·(R_i − mean_g). Example: scores (1, 0, 0, 1), one group → (2/3, -2/3, -2/3, 2/3).
    """
    groups = _Groups(samples)
    factor = groups.count / (groups.count - 1).clamp(min=1)
    return _at_all_entries(factor[groups.place] * groups.centred(_scores(samples.rewards, samples)), samples)


def reinforce_plus_plus(samples: Samples, *, group_baseline: bool = False) -> Tensor:
    """A_t = R + Σ_{k≥t} penalty_k: the trajectory's score at its last entry, −β·KL at each, summed from the back.

    group_baseline takes the mean score of the group from R. The whitening over the whole update that belongs to it is
    `normalize`, as for all of them.
    Example: scores (1, 0), no penalty, two entries each → (1, 1, 0, 0) before whitening.
    """
    entries = _Entries(samples)
    scores = _scores(samples.rewards - samples.penalty, samples)
    if group_baseline:
        scores = _Groups(samples).centred(scores)
    penalty = entries.put(entries.backward(entries.take(samples.penalty), 1.0))
    return _at_all_entries(scores, samples) + penalty


ADVANTAGES: Mapping[str, Estimate] = MappingProxyType(
    {"gae": gae, "v_trace": v_trace, "grpo": grpo, "rloo": rloo, "reinforce_plus_plus": reinforce_plus_plus}
)


def bootstrapped(terminated: Tensor, truncated: Tensor, bootstrap: Bootstrap) -> Tensor:
    """Which trajectories [M] (bool) continue in value behind their end.

    `standard`: those cut (by the time limit or a segment's end) while the task went on; `always`: every one.
    """
    if bootstrap == "always":
        return torch.ones_like(terminated)
    return truncated & ~terminated


def normalize(advantages: Tensor, valid: Tensor, *, eps: float = 1e-8) -> Tensor:
    """(A − mean)/(std + eps) over the valid entries, zero elsewhere.

    std divides by the number of entries (ddof 0), so that a single entry is defined, too: it becomes 0.
    """
    entries = advantages[valid]
    if entries.numel() == 0:
        return torch.zeros_like(advantages)
    centred = entries - entries.mean()
    out = torch.zeros_like(advantages)
    out[valid] = centred / (centred.square().mean().sqrt() + eps)
    return out


class _Entries:
    """The valid entries of all trajectories, one after another, and recursions from each trajectory's end."""

    def __init__(self, samples: Samples) -> None:
        self._valid = valid = samples.valid
        trailing = (1,) * (valid.dim() - 1)
        self._owner = samples.trajectory.reshape(-1, *trailing).expand_as(valid)[valid]
        self._count = torch.bincount(self._owner, minlength=samples.bootstrap.shape[0])
        first = self._count.cumsum(0) - self._count
        self._last, self._nonempty = first + self._count - 1, self._count > 0
        self._step = torch.arange(self._owner.shape[0], device=valid.device) - first[self._owner]

    def take(self, x: Tensor) -> Tensor:
        """[entries] of what is shaped like the rewards."""
        return x[self._valid]

    def put(self, entries: Tensor) -> Tensor:
        """Shaped like the rewards again, zero where masked."""
        out = torch.zeros(self._valid.shape, dtype=entries.dtype, device=entries.device)
        out[self._valid] = entries
        return out

    def next(self, entries: Tensor, bootstrap: Tensor) -> Tensor:
        """Each entry's successor; behind a trajectory's last one its `bootstrap` [M]."""
        after = torch.roll(entries, -1)
        after[self._last[self._nonempty]] = bootstrap[self._nonempty].to(after.dtype)
        return after

    def backward(self, entries: Tensor, decay: float | Tensor) -> Tensor:
        """x_t = entry_t + decay_t·x_{t+1}, from the end of each trajectory. decay: a number, or [entries]."""
        table = self._table(entries)
        decays = self._table(decay) if isinstance(decay, Tensor) else None
        for t in range(table.shape[0] - 2, -1, -1):
            if decays is None:
                table[t].add_(table[t + 1], alpha=decay)  # type: ignore[arg-type]
            else:
                table[t].addcmul_(decays[t], table[t + 1])
        return table[self._step, self._owner]

    def _table(self, entries: Tensor) -> Tensor:
        """One column per trajectory, zeros behind its end."""
        table = entries.new_zeros(int(self._count.max()), len(self._count))
        table[self._step, self._owner] = entries
        return table


class _Groups:
    """Which trajectories are compared. In float64: equal scores are to differ by nothing, not by their rounding."""

    def __init__(self, samples: Samples) -> None:
        _, self.place = torch.unique(samples.group, return_inverse=True)
        self.count = torch.bincount(self.place).double()

    def sums(self, x: Tensor) -> Tensor:
        """x [M] summed by group."""
        return torch.zeros_like(self.count).index_add_(0, self.place, x)

    def centred(self, scores: Tensor) -> Tensor:
        """scores [M] less the mean of their group; exactly 0 where all of a group are equal."""
        first = torch.zeros_like(self.count).index_copy_(0, self.place, scores)  # one of each group
        shifted = scores - first[self.place]
        return shifted - (self.sums(shifted) / self.count)[self.place]


def _scores(rewards: Tensor, samples: Samples) -> Tensor:
    """The valid rewards of each trajectory in all: [M] float64."""
    earned = torch.where(samples.valid, rewards, 0.0).double().reshape(len(rewards), -1).sum(1)
    return earned.new_zeros(samples.bootstrap.shape).index_add_(0, samples.trajectory, earned)


def _at_all_entries(x: Tensor, samples: Samples) -> Tensor:
    """x [M] at every valid entry of its trajectory, in the dtype of the rewards."""
    trailing = (1,) * (samples.valid.dim() - 1)
    return torch.where(samples.valid, x[samples.trajectory].reshape(-1, *trailing), 0.0).to(samples.rewards.dtype)
