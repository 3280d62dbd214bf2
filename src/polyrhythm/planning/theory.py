"""Bounds on the time of one version, synchronous and asynchronous: ROLL Flash, section 3.1 (propositions 1 and 2).

K equal workers make the N samples of a version and train on them. Synchronous: all K generate, then all K train.
Asynchronous: a share β of them trains while the others generate, at most α versions ahead. Seconds throughout.
Assumed: a worker generates one sample at a time and takes the next at once; training divides over any number of
workers without loss; weights move in no time. The paper's formulas are upper bounds, and a ratio of two is none.

Ours are the two floors, and `paced_bound` for what admission does: docs/design/006-advisor.md has its proof, and says
where each formula fails.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Workload:
    """One version of training, in the paper's terms.

    samples: N; workers: K; rollout_s: μ_gen, mean time of one sample on one worker; longest_s: L_gen, which no sample
    exceeds; train_s: μ_train, training on one sample once, on one worker; passes: E, how often each is trained on.
    """

    samples: int
    workers: int
    rollout_s: float
    longest_s: float
    train_s: float
    passes: int = 1

    def __post_init__(self) -> None:
        checks = (
            ("samples", self.samples, self.samples >= 1, "make it at least 1"),
            ("workers", self.workers, self.workers >= 1, "make it at least 1"),
            ("rollout", self.rollout_s, 0 < self.rollout_s < math.inf, "make it more than 0 seconds"),
            ("longest", self.longest_s, self.longest_s < math.inf, "make it finite"),
            (
                "longest",
                self.longest_s,
                self.longest_s >= self.rollout_s * (1 - 1e-9),
                f"make it at least the mean, {self.rollout_s:g}",
            ),
            ("train", self.train_s, 0 < self.train_s < math.inf, "make it more than 0 seconds"),
            ("passes", self.passes, self.passes >= 1, "make it at least 1"),
        )
        for name, value, good, remedy in checks:
            if not good:
                raise ValueError(f"{name} is {value:g}; {remedy}")

    @property
    def generating_s(self) -> float:
        """N·μ_gen / K: generation on all workers, without its tail."""
        return self.samples * self.rollout_s / self.workers

    @property
    def training_s(self) -> float:
        """E·N·μ_train / K: training on all workers."""
        return self.passes * self.samples * self.train_s / self.workers


def completion_bound(samples: float, workers: float, rollout_s: float, longest_s: float) -> float:
    """Proposition 1, (4): Q samples on K workers that never idle while one waits take at most Q/K·μ + L.

    Holds for the mean of these very samples (for a law's mean in expectation), and with L·(1 - 1/K) for L.
    Example: 10 samples of mean 2 s and at most 5 s on 4 workers: 10 s.
    """
    return samples / workers * rollout_s + longest_s


def synchronous_bound(work: Workload) -> float:
    """Proposition 2, (8): N/K·(μ_gen + E·μ_train) + L_gen. Generation, its tail, then training, on all workers."""
    return work.generating_s + work.training_s + work.longest_s


def synchronous_floor(work: Workload, reached_s: float = 0.0) -> float:
    """What a synchronous version takes at the least: max(N/K·μ_gen, longest) + N/K·E·μ_train. Work does not vanish.

    reached_s: how long the longest of a version's samples takes in the mean, as far as known; 0 if it is not. (8) adds
    what this takes the larger of, so it is up to twice as much; (8) over a T_async therefore promises too much.
    """
    return max(work.generating_s, reached_s) + work.training_s


def asynchronous_bound(work: Workload, max_lag: float, share: float) -> float:
    """Proposition 2, (9): the slower of generation on (1-β)K workers and training on βK, neither waiting for the other.

    max(N·μ_gen / ((1-β)K) + L_gen / ((α+1)(1-β)),  E·N·μ_train / (βK)). Proposition 1 has the tail without its 1/(1-β);
    the paper's form is looser and balances in closed form. It leaves out that rollout waits for the trainer when it
    is α versions ahead: below α = 1 nothing or little overlaps and the bound does not hold (see `paced_bound`).
    """
    _check(max_lag, share)
    tail = work.longest_s / ((max_lag + 1) * (1 - share))
    return max(work.generating_s / (1 - share) + tail, work.training_s / share)


def asynchronous_floor(work: Workload, share: float) -> float:
    """What an asynchronous version takes at the least: max(N·μ_gen / ((1-β)K), E·N·μ_train / (βK)), (9) without a tail.

    It is least where both go at one pace, β = E·μ_train / (μ_gen + E·μ_train): (10) with α → ∞.
    """
    _check(share=share)
    return max(work.generating_s / (1 - share), work.training_s / share)


def best_share(work: Workload, max_lag: float) -> float:
    """Proposition 2, (10): β*, the share of workers that trains when (9) is least; in (0, 1).

    E·N·μ_train / (N·μ_gen + K·L_gen/(α+1) + E·N·μ_train). It counts the tail as work that more workers would shorten.
    """
    _check(max_lag)
    return work.training_s / balanced_bound(work, max_lag)


def balanced_bound(work: Workload, max_lag: float) -> float:
    """Proposition 2, (11): (9) at β*, N/K·(μ_gen + E·μ_train) + L_gen/(α+1). With α = 0 this is (8)."""
    _check(max_lag)
    return work.generating_s + work.training_s + work.longest_s / (max_lag + 1)


def speed_up_limit(work: Workload) -> float:
    """Proposition 2: (8) over (11) as α → ∞, 1 + K·L_gen / (N·(μ_gen + E·μ_train))."""
    return synchronous_bound(work) / (work.generating_s + work.training_s)


def paced_bound(work: Workload, max_lag: float, share: float) -> float:
    """Ours, for what admission does: max(t, g + (t + L_gen) / n), with n = ⌊α⌋ + 1, for any α.

    g = N·μ_gen / ((1-β)K), t = E·N·μ_train / (βK). Rollout runs n versions ahead of what has been trained and then
    waits, so that once in n versions an update stands in its way. With α = 0 it is the sum g + t + L_gen: the
    synchronous time, on workers that are split nevertheless. A bound where any n versions take the mean work; where
    times vary, the mean of the larger of two times exceeds the larger of their means, and g + max(t, (t + L_gen) / n)
    is what is kept for certain.
    """
    _check(max_lag, share)
    training = work.training_s / share
    return max(training, work.generating_s / (1 - share) + (training + work.longest_s) / (math.floor(max_lag) + 1))


def best_split(work: Workload, bound: Callable[[float], float]) -> int:
    """How many whole workers train where `bound`, a function of their share, is least; 1 to K-1."""
    if work.workers < 2:
        raise ValueError("workers is 1; it takes 2 for some to train while others generate")
    return min(range(1, work.workers), key=lambda training: bound(training / work.workers))


def _check(max_lag: float = 0.0, share: float = 0.5) -> None:
    if not 0 <= max_lag < math.inf:
        raise ValueError(f"max_lag is {max_lag:g}; make it 0 or more, and finite")
    if not 0 < share < 1:
        raise ValueError(f"share is {share:g}; the share of workers that train lies between 0 and 1")
