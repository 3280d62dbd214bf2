"""`training.require_batches`: R mini-batches of M samples are R optimizer steps an epoch, with targets of the whole
update."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from tests.training.toy import ToyPolicy, algorithm, collect, same, training, weights

from polyrhythm.config.load import load_config, save_config
from polyrhythm.errors import ConfigError
from polyrhythm.pipeline.persistence.resume_rules import saved_config
from polyrhythm.specs import Trajectory
from polyrhythm.training.batch import minibatches
from polyrhythm.training.learner import STEPS, Learner
from polyrhythm.training.steps import Metrics, finish

SIZES = (3, 1, 4, 2, 2, 5, 1, 6, 3, 2, 4, 1, 2, 3, 1, 2)
PPO: dict[str, Any] = {
    "gamma": 0.9,
    "gae_lambda": 0.8,
    "value": {"coef": 0.5},
    "entropy_coef": 0.1,
    "proximal": "recompute",
}


def samples() -> list[Trajectory]:
    """Sixteen of slightly other weights, two to a group."""
    behaviour = ToyPolicy()
    with torch.no_grad():
        behaviour.logits.bias[::2].add_(0.2)
    return [replace(t, group=t.group // 2) for t in collect(behaviour, SIZES)]


def learned(m: int, r: int, **train: Any) -> tuple[ToyPolicy, Metrics]:
    policy = ToyPolicy(detach=False)
    settings = training(mini_batch_samples=m, require_batches=r, **train)
    learner = Learner(policy, algorithm(**PPO), settings, total_updates=10, seed=7)
    return policy, finish(learner.update(samples(), 0, version=1))


def plain_loop(m: int, r: int, epochs: int) -> ToyPolicy:
    """PPO with GAE, advantages whitened over all samples, one step of torch's AdamW for each M samples in order."""
    policy = ToyPolicy(detach=False)
    start, data = copy.deepcopy(policy), samples()
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in policy.parameters() if p.dim() > 1], "weight_decay": 0.01},
            {"params": [p for p in policy.parameters() if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=0.01,
    )
    advantages: list[list[float]] = []
    for t in data:
        last = float(start.value({"x": torch.from_numpy(t.obs["x"][-1:])})[0].detach()) if t.truncated else 0.0
        values, chain, mine = [*t.value.tolist(), last], 0.0, list[float]()
        for k in reversed(range(t.steps)):
            chain = float(t.rewards[k].sum()) + 0.9 * values[k + 1] - values[k] + 0.72 * chain
            mine.insert(0, chain)
        advantages.append(mine)
    every = np.concatenate(advantages)
    for _ in range(epochs):
        for b in range(r):
            own = range(b * m, (b + 1) * m)
            obs = {"x": torch.from_numpy(np.concatenate([data[i].obs["x"][:-1] for i in own]))}
            tokens = {"tokens": torch.from_numpy(np.concatenate([data[i].forward_inputs["tokens"] for i in own]))}
            valid = torch.from_numpy(np.concatenate([data[i].valid for i in own]))
            raw = torch.tensor(np.concatenate([advantages[i] for i in own]))
            target = raw + torch.from_numpy(np.concatenate([data[i].value for i in own])).double()
            a = ((raw - every.mean()) / (every.std() + 1e-8)).reshape(-1, 1, 1)
            e, old = policy.evaluate(obs, tokens), start.evaluate(obs, tokens).logprob.detach()
            mask = valid.unsqueeze(-1).expand_as(old)
            ratio = (e.logprob - old).exp()
            surrogate = torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)
            loss = -surrogate[mask].mean() + 0.25 * ((e.value - target) ** 2).mean() - 0.1 * e.entropy[mask].mean()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
    return policy


@pytest.mark.parametrize(("m", "r"), [(16, 1), (8, 2), (4, 4)])
def test_an_update_is_a_plain_loop_over_mini_batches_of_samples(m: int, r: int) -> None:
    policy, metrics = learned(m, r, epochs=3)
    assert metrics[STEPS] == 3 * r
    plain = plain_loop(m, r, epochs=3)
    for name, x in plain.state_dict().items():
        torch.testing.assert_close(policy.state_dict()[name], x, atol=2e-6, rtol=1e-5)


def test_two_mini_batches_of_eight_are_not_one_of_sixteen() -> None:
    one, two = weights(learned(16, 1)[0]), weights(learned(8, 2)[0])
    assert max(float((one[name] - two[name]).abs().max()) for name in one) > 1e-3


def test_an_optimizer_step_has_no_samples_of_two_mini_batches() -> None:
    assert [len(x) for x in minibatches([7, 5], 3, (0,))] == [3, 2, 2, 3, 2]
    drawn = minibatches([7, 5], 3, (0,))
    assert sorted(torch.cat(drawn[:3]).tolist()) == list(range(7))
    assert sorted(torch.cat(drawn[3:]).tolist()) == list(range(7, 12))
    first = minibatches([7], 3, (0,))
    assert all(torch.equal(a, b) for a, b in zip(first, drawn, strict=False)), "whatever follows"
    assert learned(8, 2, minibatch_steps=7)[1][STEPS] == -(-sum(SIZES[:8]) // 7) + -(-sum(SIZES[8:]) // 7)


def test_micro_batches_do_not_change_it() -> None:
    whole, cut = learned(4, 4, epochs=2), learned(4, 4, epochs=2, micro_batch_steps=2)
    for name, x in whole[0].state_dict().items():
        torch.testing.assert_close(cut[0].state_dict()[name], x, atol=1e-7, rtol=1e-6)


def test_the_warm_up_of_a_critic_and_the_end_by_max_kl_count_as_before() -> None:
    policy, start = ToyPolicy(), weights(ToyPolicy())
    learner = Learner(
        policy, algorithm(), training(require_batches=4, critic_warmup_updates=1), total_updates=9, seed=0
    )
    finish(learner.update(samples(), 0))
    after = weights(policy)
    assert all(torch.equal(after[name], start[name]) == name.startswith(("logits", "trunk")) for name in start)
    train = {"optimizer": {"lr": 0.3}, "max_kl": 0.01}
    assert learned(4, 4, **train)[1][STEPS] < 4, "an update ends in the middle of its mini-batches"


def test_a_mini_batch_has_whole_groups() -> None:
    changes = ["groups.size=4", "training.mini_batch_samples=6", "training.require_batches=2"]
    with pytest.raises(ConfigError, match=r"mini_batch_samples = 6: .*make it 4 or 8"):
        load_config("cartpole", changes)


def test_a_run_from_before_goes_on_with_one_mini_batch_an_update(tmp_path: Path) -> None:
    config = load_config("cartpole", ["training.mini_batch_samples=6", "training.require_batches=2"])
    file = tmp_path / "config.yaml"
    save_config(config, file)
    assert saved_config(tmp_path) == config
    file.write_text(file.read_text().replace("    warmup_steps: 0\n", ""))
    assert (now := saved_config(tmp_path).training).batch_size == 12
    assert (now.mini_batch_samples, now.require_batches) == (12, 1)


def test_a_warm_up_by_optimizer_steps_goes_over_updates_and_restarts() -> None:
    """Weights after one step of Adam have moved by its rate; skipped steps are none of the warm-up's."""
    train = training(epochs=3, optimizer={"lr": 0.01, "warmup_steps": 5, "weight_decay": 0.0, "grad_clip": None})
    first = Learner(ToyPolicy(), algorithm(), train, total_updates=9, seed=0)
    rates = [finish(first.update(samples(), index))["train/actor/lr"] for index in range(2)]
    assert rates == pytest.approx([0.006, 0.01]), "of an update's last step: the third, and one behind the warm-up"
    once = Learner(ToyPolicy(), algorithm(), train, total_updates=9, seed=0)
    start, steps = weights(once.policy), once.update(samples(), 0)
    next(steps)
    moved = max(float((x - start[name]).abs().max()) for name, x in weights(once.policy).items())
    assert moved == pytest.approx(0.002, rel=1e-3)
    finish(steps)
    again = Learner(ToyPolicy(seed=4), algorithm(), train, total_updates=9, seed=0)
    again.load_state_dict(copy.deepcopy(once.state_dict()))
    finish(again.update(samples(), 1))
    assert same(weights(again.policy), weights(first.policy))


def test_one_warm_up_is_enough() -> None:
    with pytest.raises(ValidationError, match="warmup_updates = 2 is a warm-up already"):
        training(optimizer={"warmup_steps": 3, "warmup_updates": 2})
