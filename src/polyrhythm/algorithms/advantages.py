"""Advantages over packed trajectories: by a value function, or by comparison with the others of a group.

Packed means that the chunk steps of all trajectories stand one after another, without padding: trajectory 0 complete
and in time order, then trajectory 1, and so on.

Every estimate has the form `estimate(samples, *, settings by keyword)` and stands in `ADVANTAGES` under the name that
`algorithm.advantage.type` gives; its keywords are that section's fields, gamma and gae_lambda. It returns `Advantages`,
or a tensor where it has no returns of its own (a value function is then trained on those of `gae`). A new one is one
function and one line in the table, or a user's `module:function`.

Sources: Schulman et al. 2016 (GAE), truncation as in Pardo et al. 2018; Espeholt et al. 2018 (V-trace); Shao et al.
2024 (GRPO); Ahmadian et al. 2024 (RLOO); Tajwar et al. 2026 (MaxRL); Hu 2025 (REINFORCE++). Deviation: masked entries
are skipped instead of zeroed, so that a chunk cut short by the end of its episode never leaves a gap in a recursion.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from polyrhythm.algorithms.divergence import LOG_RATIO_LIMIT
from polyrhythm.algorithms.sums import Total, here, mean_and_variance

Bootstrap = Literal["standard", "always", "never"]
GroupStd = Literal["sample", "population", "none"]
WhiteningStd = Literal["population", "sample"]
Returns = Literal["total", "to_go"]


class AdvantageInput(NamedTuple):
    """N chunk steps of M trajectories.

    rewards, penalty, values, valid (bool), log_ratio: [N] or [N,C]. penalty: −β·KL to the reference policy, included in
    rewards; zeros where it is in the loss or there is none. values: V of the policy that acted (for `v_trace` of the
    proximal one). log_ratio: log π_prox − log π_b, zeros where π_prox was not computed. trajectory [N] int64,
    non-decreasing, in 0..M-1. bootstrap [M]: the value after each trajectory's last valid entry: V(final observation),
    or 0 where `algorithm.bootstrap` adds none. group [M] int64: equal where task and initial state are; any numbers, in
    any order.
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


def gae(samples: AdvantageInput, *, gamma: float, gae_lambda: float) -> Advantages:
    """A_t = δ_t + γλ A_{t+1} with δ_t = r_t + γ V_{t+1} − V_t, and returns A_t + V_t.

    Example: rewards (0, 1), values (0.5, 0.5), bootstrap 0, γ = 1, λ = 1 → advantages (0.5, 0.5), returns (1, 1).
    """
    entries = _Entries(samples.valid, samples.trajectory, len(samples.bootstrap))
    value = entries.take(samples.values)
    delta = entries.take(samples.rewards) + gamma * entries.next(value, samples.bootstrap) - value
    advantage = entries.backward(delta, gamma * gae_lambda)
    return Advantages(entries.put(advantage), entries.put(advantage + value))


def v_trace(
    samples: AdvantageInput, *, gamma: float, gae_lambda: float, rho_cap: float, trace_cap: float
) -> Advantages:
    """Returns v_t = V_t + min(ρ̄, ρ_t)·δ_t + γ c_t (v_{t+1} − V_{t+1}), advantages r_t + γ v_{t+1} − V_t.

    ρ_t = π_prox/π_b over the actions that one reward covers, c_t = λ·min(c̄, ρ_t), δ_t as in `gae`; ρ̄, c̄: the caps.
    The further factor min(ρ̄, ρ_t) of the paper's policy gradient belongs to the loss (tis, decoupled_ppo, …).
    On-policy the returns are those of GAE, and with λ = 1 the advantages too.
    """
    entries = _Entries(samples.valid, samples.trajectory, len(samples.bootstrap))
    value, reward = entries.take(samples.values), entries.take(samples.rewards)
    ratio = entries.take(samples.log_ratio).clamp(max=LOG_RATIO_LIMIT).exp()
    delta = ratio.clamp(max=rho_cap) * (reward + gamma * entries.next(value, samples.bootstrap) - value)
    target = value + entries.backward(delta, gamma * gae_lambda * ratio.clamp(max=trace_cap))
    advantage = reward + gamma * entries.next(target, samples.bootstrap) - value
    return Advantages(entries.put(advantage), entries.put(target))


def grpo(samples: AdvantageInput, *, std: GroupStd = "sample", epsilon: float = 1e-6) -> Tensor:
    """A_i = (R_i − mean_g)/(std_g + epsilon) at all entries of trajectory i: its return, normalised within its group.

    std: divided by the group's size − 1 (sample) or by its size (population), or left out (none, as in Dr. GRPO). A
    group of one, or of equal scores, gives 0. Example: scores (1, 0, 0, 1), one group → mean 0.5, std 0.577 → (0.866,
    -0.866, -0.866, 0.866).
    """
    groups = _Groups(samples)
    centred = groups.centred(_scores(samples.rewards, samples))
    if std != "none":
        freedom = (groups.count - 1).clamp(min=1) if std == "sample" else groups.count
        centred = centred / ((groups.sums(centred.square()) / freedom).sqrt()[groups.place] + epsilon)
    return _at_all_entries(centred, samples)


def rloo(samples: AdvantageInput) -> Tensor:
    """A_i = R_i − the mean return of the others of its group, at all its entries; a group of one gives 0.

    It is n/(n−1)·(R_i − mean_g). Example: scores (1, 0, 0, 1), one group → (2/3, -2/3, -2/3, 2/3).
    """
    groups = _Groups(samples)
    factor = groups.count / (groups.count - 1).clamp(min=1)
    return _at_all_entries(factor[groups.place] * groups.centred(_scores(samples.rewards, samples)), samples)


def maxrl(samples: AdvantageInput) -> Tensor:
    """A_i = (R_i − mean_g)/mean_g(|R|) at all entries of trajectory i (Tajwar et al. 2026, MaxRL).

    Where no return is negative that divisor is the paper's, the group's mean. With negative ones (a penalty) it is
    still positive, whatever the mean; a group whose returns are all 0 gives 0. For returns of 0 and 1, a success rate p
    and groups of n the expected gradient is that of log p times 1 − (1 − p)^(n−1).
    Example: scores (1, 0, 0, 0), one group → (3, -1, -1, -1).
    """
    groups, scores = _Groups(samples), _scores(samples.rewards, samples)
    size = (groups.sums(scores.abs()) / groups.count)[groups.place]
    return _at_all_entries(groups.centred(scores) / torch.where(size > 0, size, 1.0), samples)


def reinforce_plus_plus(
    samples: AdvantageInput, *, gamma: float = 1.0, returns: Returns = "total", group_baseline: bool = False
) -> Tensor:
    """Returns without a value function, penalties included; the whitening over the update is `normalize`'s, as for all.

    total: A_t = R + Σ_{k≥t} penalty_k, R the trajectory's undiscounted return (its reward comes at the end);
    group_baseline subtracts the group's mean from R. to_go: A_t = Σ_{k≥t} γ^{k−t}·r_k, for rewards within the episode.
    Example: rewards (1, 0, 1) of one trajectory, no penalty → total (2, 2, 2), to_go with γ = ½ (1.25, 0.5, 1).
    """
    entries = _Entries(samples.valid, samples.trajectory, len(samples.bootstrap))
    if returns == "to_go":
        return entries.put(entries.backward(entries.take(samples.rewards), gamma))
    scores = _scores(samples.rewards - samples.penalty, samples)
    if group_baseline:
        scores = _Groups(samples).centred(scores)
    penalty = entries.put(entries.backward(entries.take(samples.penalty), 1.0))
    return _at_all_entries(scores, samples) + penalty


ADVANTAGES: Mapping[str, Estimate] = MappingProxyType(
    {
        "gae": gae,
        "v_trace": v_trace,
        "grpo": grpo,
        "rloo": rloo,
        "maxrl": maxrl,
        "reinforce_plus_plus": reinforce_plus_plus,
    }
)


def needs_bootstrap(terminated: Tensor, truncated: Tensor, bootstrap: Bootstrap) -> Tensor:
    """Which trajectories [M] (bool) get the value of their final observation after their last reward.

    `standard`: those truncated (by the time limit, or by the end of a segment) while the task went on; `always`: all;
    `never`: none, so a truncated episode counts as terminated.
    """
    if bootstrap == "standard":
        return truncated & ~terminated
    return torch.full_like(terminated, bootstrap == "always")


def normalize(
    advantages: Tensor, valid: Tensor, *, std: WhiteningStd = "population", eps: float = 1e-8, total: Total = here
) -> Tensor:
    """(A − mean)/(std + eps) over the valid entries, zero elsewhere; total: sums over all parts of an update.

    std: over the number n of entries (population), or over n − 1 (sample). A single entry becomes 0, as equal ones do.
    The sums are in float64: the rounding error of a mean in float32, divided by the std of equal advantages, would be a
    whole step. Example: (1, 3) → population (-1, 1), sample (-0.707, 0.707).
    """
    entries = advantages[valid].double()
    mean, variance = mean_and_variance(entries, total)
    if std == "sample":
        count = total(entries.new_tensor(len(entries)))
        variance = variance * count / (count - 1).clamp(min=1)
    out = torch.zeros_like(advantages)
    out[valid] = torch.where(variance == 0, 0.0, (entries - mean) / (variance.sqrt() + eps)).to(out.dtype)
    return out


def overlong_penalty(valid: Tensor, *, tokens: int, penalty: float) -> Tensor:
    """penalty·min(0, (C − tokens − L)/tokens) of each message of L tokens: [N] ≤ 0 (Yu 2025, DAPO's soft overlong
    punishment). valid [N,C]: the L tokens of a message that may have C.

    Example: C = 100, tokens = 20, penalty = 1: L = 80 → 0, L = 90 → −0.5, L = 100 → −1.
    """
    room = valid.shape[1] - tokens - valid.sum(1)
    return penalty * (room / tokens).clamp(max=0.0)


def discounted_sums(rewards: Tensor, valid: Tensor, trajectory: Tensor, trajectories: int, *, gamma: float) -> Tensor:
    """R_t = r_t + γ·R_{t−1} from the start of each trajectory: [valid entries]. Shapes as in `AdvantageInput`.

    Example: rewards (1, 0, 2), one trajectory, γ = ½ → (1, 0.5, 2.25).
    """
    entries = _Entries(valid, trajectory, trajectories)
    return entries.forward(entries.take(rewards), gamma)


class _Entries:
    """The valid entries of all trajectories, one after another, and recursions along each trajectory."""

    def __init__(self, valid: Tensor, trajectory: Tensor, trajectories: int) -> None:
        self._valid = valid
        trailing = (1,) * (valid.dim() - 1)
        self._owner = trajectory.reshape(-1, *trailing).expand_as(valid)[valid]
        self._count = torch.bincount(self._owner, minlength=trajectories)
        first = self._count.cumsum(0) - self._count
        self._last, self._nonempty = first + self._count - 1, self._count > 0
        self._step = torch.arange(self._owner.shape[0], device=valid.device) - first[self._owner]

    def take(self, x: Tensor) -> Tensor:
        """x, shaped like the rewards, at the valid entries: [entries]."""
        return x[self._valid]

    def put(self, entries: Tensor) -> Tensor:
        """Shaped like the rewards again, zero where masked."""
        out = torch.zeros(self._valid.shape, dtype=entries.dtype, device=entries.device)
        out[self._valid] = entries
        return out

    def next(self, entries: Tensor, bootstrap: Tensor) -> Tensor:
        """Each entry's successor; after a trajectory's last entry its `bootstrap` [M]."""
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

    def forward(self, entries: Tensor, decay: float) -> Tensor:
        """x_t = entry_t + decay·x_{t−1}, from the start of each trajectory."""
        table = self._table(entries)
        for t in range(1, table.shape[0]):
            table[t].add_(table[t - 1], alpha=decay)
        return table[self._step, self._owner]

    def _table(self, entries: Tensor) -> Tensor:
        """One column per trajectory, zeros after its end."""
        table = entries.new_zeros(int(self._count.max()), len(self._count))
        table[self._step, self._owner] = entries
        return table


class _Groups:
    """Statistics by group, in float64: the difference of equal scores must be 0, not their rounding error."""

    def __init__(self, samples: AdvantageInput) -> None:
        _, self.place = torch.unique(samples.group, return_inverse=True)
        self.count = torch.bincount(self.place).double()
        largest = torch.zeros_like(self.count).scatter_reduce_(
            0, self.place, _scores(samples.rewards.abs(), samples), "amax"
        )
        #: [groups]: by how much two scores may differ because rewards are rounded (0.1 + 0.9 is not 1 in float32).
        self._rounding = torch.finfo(samples.rewards.dtype).eps * largest

    def sums(self, x: Tensor) -> Tensor:
        """x [M] summed by group."""
        return torch.zeros_like(self.count).index_add_(0, self.place, x)

    def centred(self, scores: Tensor) -> Tensor:
        """scores [M] minus the mean of their group; exactly 0 where all scores of a group are equal."""
        first = torch.zeros_like(self.count).index_copy_(0, self.place, scores)  # one score of each group
        shifted = scores - first[self.place]
        shifted = torch.where(shifted.abs() > self._rounding[self.place], shifted, 0.0)
        return shifted - (self.sums(shifted) / self.count)[self.place]


def _scores(rewards: Tensor, samples: AdvantageInput) -> Tensor:
    """The sum of the valid rewards of each trajectory: [M] float64."""
    earned = torch.where(samples.valid, rewards, 0.0).double().reshape(len(rewards), -1).sum(1)
    return earned.new_zeros(samples.bootstrap.shape).index_add_(0, samples.trajectory, earned)


def _at_all_entries(x: Tensor, samples: AdvantageInput) -> Tensor:
    """x [M] at every valid entry of its trajectory, in the dtype of the rewards."""
    trailing = (1,) * (samples.valid.dim() - 1)
    return torch.where(samples.valid, x[samples.trajectory].reshape(-1, *trailing), 0.0).to(samples.rewards.dtype)
