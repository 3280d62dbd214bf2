"""Time of one update of the learner, beside the same maths in a plain torch loop.

The maths: GAE, whitened advantages, recomputed proximal log-probs, decoupled PPO at token level with a value loss, some
epochs of shuffled mini-batches, clipped gradients, AdamW. The plain loop has no settings, metrics,
micro-batches or levels, and no masks but the last chunk's; `torch.optim.AdamW`, fused. Both begin with the same weights
and trajectories of different lengths, take turns, and end with the same weights, which is checked.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from polyrhythm.config.sections.algorithm import AlgorithmSettings
from polyrhythm.config.sections.learning import TrainingSettings
from polyrhythm.policies.base import Policy, as_module
from polyrhythm.policies.gaussian import GaussianSettings
from polyrhythm.policies.tiny_vla.policy import TinyVlaSettings
from polyrhythm.specs import INSTRUCTION, PROGRESS, ActionSpec, ArraySpec, EnvSpec, Task, Trajectory
from polyrhythm.training.batch import minibatches
from polyrhythm.training.learner import Learner
from polyrhythm.training.ranks import ONE_RANK, Ranks
from polyrhythm.training.steps import finish

#: Largest ratio to the plain loop that the design allows.
LIMIT_RATIO = 1.1
_GAMMA, _LAMBDA, CLIP, VALUE_COEF, GRAD_CLIP, LR = 0.99, 0.95, 0.2, 0.5, 1.0, 1e-4
_ACTION = ActionSpec("continuous", 4, low=(-1.0,) * 4, high=(1.0,) * 4)
_TASKS = (Task("press", "press the button"), Task("close", "close the door"))


Update = Callable[[Sequence[Trajectory]], None]


class UpdateCase(NamedTuple):
    """A policy, and what an update of it is: trajectories with a random number of chunk steps from shortest to longest,
    passes over them, chunk steps of a mini-batch."""

    policy: GaussianSettings | TinyVlaSettings
    spec: EnvSpec
    trajectories: int
    shortest: int
    longest: int
    epochs: int
    minibatch: int


CASES = {
    "mlp": UpdateCase(
        GaussianSettings(), EnvSpec({"state": ArraySpec((39,), "float32")}, _ACTION, _TASKS, 100), 16, 25, 50, 8, 200
    ),
    "tiny_vla": UpdateCase(
        TinyVlaSettings(),
        EnvSpec(
            {"image": ArraySpec((64, 64, 3), "uint8"), "proprio": ArraySpec((8,), "float32")}, _ACTION, _TASKS, 100
        ),
        *(32, 5, 10, 4, 64),
    ),
}

_SHOWN = CASES["tiny_vla"].spec
#: A policy of which memory can be measured: 27 million parameters.
LARGE = UpdateCase(TinyVlaSettings(width=512, layers=8, heads=8, expansion=4), _SHOWN, 8, 2, 4, 1, 8)


def run(repeats: int = 7) -> dict[str, Any]:
    """Every case `repeats` times after one turn to warm up. Returns `within_limit`, and for each case in `modes`
    ours_ms, plain_ms (medians), ratio (median over the turns), decisions, and difference (largest, of a weight);
    `proximal`: for each case what an update takes without recomputing, as a ratio to the one that recomputes."""
    modes = {name: measure(case, repeats) for name, case in CASES.items()}
    return {
        "limit_ratio": LIMIT_RATIO,
        "within_limit": all(mode["ratio"] <= LIMIT_RATIO for mode in modes.values()),
        "proximal": [{"case": name, **without_recomputing(case, repeats)} for name, case in CASES.items()],
        "modes": modes,
    }


def without_recomputing(case: UpdateCase, repeats: int) -> dict[str, float]:
    """interpolate, none (an objective that looks at no proximal policy): seconds over those of recompute, medians of
    the ratios turn by turn; epochs, of which each costs a forward and a backward pass."""
    policy, trajectories = case.policy.build(case.spec, seed=0, device="cpu", role="train"), collect(case)
    ways: dict[str, dict[str, Any]] = {"recompute": {}, "none": {"loss": "tis"}}
    ways["interpolate"] = {"proximal": "interpolate"}
    turns: list[dict[str, float]] = []
    for _ in range(repeats + 1):
        prepared = {way: ours(copy.deepcopy(policy), case, **changes) for way, changes in ways.items()}
        turns.append({way: _seconds(update, trajectories) for way, update in prepared.items()})
    return {"epochs": case.epochs} | {
        way: statistics.median(turn[way] / turn["recompute"] for turn in turns[1:]) for way in ("interpolate", "none")
    }


def _seconds(update: Update, trajectories: Sequence[Trajectory]) -> float:
    begin = time.perf_counter()
    update(trajectories)
    return time.perf_counter() - begin


def measure(case: UpdateCase, repeats: int) -> dict[str, Any]:
    """One case, turn by turn."""
    policy = case.policy.build(case.spec, seed=0, device="cpu", role="train")
    trajectories = collect(case)
    turns = []
    for turn in range(repeats + 1):
        order = [ours, by_hand] if turn % 2 else [by_hand, ours]
        seconds = {}
        for update in order:
            own = copy.deepcopy(policy)
            seconds[update] = _seconds(update(own, case), trajectories), own
        turns.append((seconds[ours][0], seconds[by_hand][0]))
    weights = [as_module(own).state_dict() for _, own in seconds.values()]
    difference = max(float((weights[0][name] - weights[1][name]).abs().max()) for name in weights[0])
    assert difference < 0.1 * LR, f"not the same maths: weights differ by {difference}"
    return {
        "ours_ms": 1e3 * statistics.median(own for own, _ in turns[1:]),
        "plain_ms": 1e3 * statistics.median(plain for _, plain in turns[1:]),
        "ratio": statistics.median(own / plain for own, plain in turns[1:]),
        "decisions": sum(t.steps for t in trajectories),
        "difference": difference,
    }


def ours(policy: Policy, case: UpdateCase, ranks: Ranks = ONE_RANK, **changes: Any) -> Update:
    """An update by the learner, with changes to `algorithm`; on several ranks if these are given."""
    algorithm = AlgorithmSettings.model_validate(
        {
            "gamma": _GAMMA,
            "gae_lambda": _LAMBDA,
            "normalize_rewards": False,
            "loss": "decoupled_ppo",
            "value": {"coef": VALUE_COEF},
            **changes,
        }
    )
    training = TrainingSettings.model_validate(
        {
            "versions": 10,
            "mini_batch_samples": case.trajectories,
            "epochs": case.epochs,
            "minibatch_steps": case.minibatch,
            "max_kl": None,
            "optimizer": {"lr": LR, "grad_clip": GRAD_CLIP},
        }
    )
    learner = Learner(policy, algorithm, training, total_updates=10, seed=0, ranks=ranks)

    def update(trajectories: Sequence[Trajectory]) -> None:
        finish(learner.update(trajectories, 0))

    return update


def by_hand(policy: Policy, case: UpdateCase) -> Update:
    """The same update, written out."""
    parameters = list(as_module(policy).parameters())
    optimizer = torch.optim.AdamW(parameters, lr=LR, weight_decay=0.0, fused=True)

    def update(trajectories: Sequence[Trajectory]) -> None:
        first = trajectories[0]
        obs = {n: torch.from_numpy(np.concatenate([t.obs[n][:-1] for t in trajectories])) for n in first.obs}
        last = {n: torch.from_numpy(np.stack([t.obs[n][-1] for t in trajectories])) for n in first.obs}
        inputs = {
            n: torch.from_numpy(np.concatenate([t.forward_inputs[n] for t in trajectories]))
            for n in first.forward_inputs
        }
        behavior = torch.from_numpy(np.concatenate([t.logprob for t in trajectories]))
        mask = torch.from_numpy(np.concatenate([t.valid for t in trajectories])).float().unsqueeze(-1)
        mask = mask.expand_as(behavior)
        with torch.no_grad():
            ends = policy.value(last) * torch.tensor([t.truncated for t in trajectories])
            proximal = in_pieces(policy, obs, inputs, case.minibatch)
        advantage, returns = gae(trajectories, ends.tolist())
        advantage = (advantage - advantage.mean()) / (advantage.std(correction=0) + 1e-8)
        weight = (proximal - behavior).exp()
        for incarnation in range(case.epochs):
            for index in minibatches([len(advantage)], case.minibatch, (0, 0, incarnation)):
                seen = mask[index]
                evaluation = policy.evaluate(
                    {n: x[index] for n, x in obs.items()}, {n: x[index] for n, x in inputs.items()}
                )
                ratio, a = (evaluation.logprob - proximal[index]).exp(), advantage[index].view(-1, 1, 1)
                loss = torch.maximum(-a * ratio, -a * ratio.clamp(1 - CLIP, 1 + CLIP))
                total = (seen * weight[index] * loss).sum() / seen.sum()
                total = total + VALUE_COEF * 0.5 * (evaluation.value - returns[index]).square().mean()
                optimizer.zero_grad()
                total.backward()
                torch.nn.utils.clip_grad_norm_(parameters, GRAD_CLIP)
                optimizer.step()

    return update


def in_pieces(policy: Policy, obs: dict[str, Tensor], inputs: dict[str, Tensor], size: int) -> Tensor:
    """Log-probs [N,C,A]. As many rows at a time as a mini-batch has: larger passes would need more memory than training
    does."""
    count = len(next(iter(obs.values())))
    pieces = []
    for start in range(0, count, size):
        rows = slice(start, start + size)
        part = policy.evaluate({n: x[rows] for n, x in obs.items()}, {n: x[rows] for n, x in inputs.items()})
        pieces.append(part.logprob)
    return torch.cat(pieces)


def gae(trajectories: Sequence[Trajectory], ends: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Advantages and returns of all chunk steps [N], trajectory by trajectory. ends: the value after each."""
    advantages, returns = [], []
    for trajectory, end in zip(trajectories, ends, strict=True):
        rewards = (trajectory.rewards * trajectory.valid).sum(1)
        after = np.append(trajectory.value[1:], np.float32(end))
        advantage, chain = np.zeros_like(rewards), 0.0
        for t in range(len(rewards) - 1, -1, -1):
            chain = rewards[t] + _GAMMA * after[t] - trajectory.value[t] + _GAMMA * _LAMBDA * chain
            advantage[t] = chain
        advantages.append(advantage)
        returns.append(advantage + trajectory.value)
    return torch.from_numpy(np.concatenate(advantages)), torch.from_numpy(np.concatenate(returns))


def collect(case: UpdateCase) -> list[Trajectory]:
    """Trajectories of random observations and rewards, acted by slightly other weights; every second one is cut."""
    rng, policy = np.random.default_rng(0), case.policy.build(case.spec, seed=1, device="cpu", role="train")
    return [_trajectory(rng, policy, case, number) for number in range(case.trajectories)]


def _trajectory(rng: np.random.Generator, policy: Policy, case: UpdateCase, number: int) -> Trajectory:
    steps = int(rng.integers(case.shortest, case.longest + 1))
    obs: dict[str, Any] = {
        name: rng.integers(0, 256, (steps + 1, *array.shape), np.uint8)
        if array.dtype == "uint8"
        else rng.normal(size=(steps + 1, *array.shape)).astype(np.float32)
        for name, array in case.spec.observation.items()
    }
    obs[INSTRUCTION] = np.full(steps + 1, number % len(_TASKS))
    obs[PROGRESS] = np.linspace(0, 1, steps + 1, dtype=np.float32)
    seen = {name: torch.from_numpy(array[:-1]) for name, array in obs.items()}
    keys = torch.from_numpy(rng.integers(0, 2**62, steps))
    act = policy.act(seen, torch.zeros(steps, dtype=torch.bool), keys)
    cut = number % 2 == 1
    valid = np.ones((steps, policy.chunk), bool)
    valid[-1, 1:] = cut
    return Trajectory(
        obs=obs,
        actions=act.actions.numpy(),
        logprob=act.logprob.numpy(),
        value=act.value.numpy(),
        forward_inputs={name: x.numpy() for name, x in act.forward_inputs.items()},
        rewards=rng.normal(size=valid.shape).astype(np.float32),
        valid=valid,
        version=np.zeros(steps, np.int64),
        terminated=not cut,
        truncated=cut,
        success=not cut,
        env_steps=int(valid.sum()),
        ticket=number,
        group=number,
        task=number % len(_TASKS),
    )
