"""Running statistics are those of all numbers at once, whatever the batches and processes that they come in."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from tests.training import toy
from tests.training.toy import algorithm, training
from torch import Tensor, nn

from polyrhythm.algorithms.sums import here
from polyrhythm.config.sections.learning import SupervisedSettings
from polyrhythm.plugins.demonstrations.imitation import Demonstrations, SupervisedLearner
from polyrhythm.plugins.trial.policy_calls import evaluate_act, sample
from polyrhythm.policies.gaussian import GaussianPolicy, GaussianSettings
from polyrhythm.policies.normalizer import EPSILON, LIMIT, ObservationNormalizer
from polyrhythm.specs import INSTRUCTION, PROGRESS, ActionSpec, ArraySpec, EnvSpec, Task, Trajectory
from polyrhythm.training.batch import collate
from polyrhythm.training.learner import Learner
from polyrhythm.training.moments import Moments, UpdateStatistics, update_normalizers
from polyrhythm.training.ranks import ONE_RANK, Ranks
from polyrhythm.training.steps import finish
from polyrhythm.training.targets import TargetInputs, compute_targets

ARRAYS = {
    "arm": ArraySpec((2, 2), "float32"),
    "seen": ArraySpec((3,), "uint8"),
    "sensors.base": ArraySpec((3,), "float64"),
}
SPEC = EnvSpec(ARRAYS, ActionSpec("continuous", 2, low=(-1.0,) * 2, high=(1.0,) * 2), (Task("a", "a"),), 50)
NOTHING = Moments(*(torch.zeros(n, dtype=torch.float64) for n in (1, 7, 7)))


def observations(rows: int, seed: int = 0) -> dict[str, Tensor]:
    """Of unlike scales and places, as (of `sensors.base`) sensors in metres, pixels and a constant have."""
    rng = np.random.default_rng(seed)
    base = rng.normal((0.0, 300.0, 7.0), (1e-3, 100.0, 0.0), (rows, 3))
    arrays = {"arm": rng.normal(size=(rows, 2, 2)).astype(np.float32), "sensors.base": base}
    arrays["seen"] = rng.integers(0, 256, (rows, 3)).astype(np.uint8)
    arrays[INSTRUCTION], arrays[PROGRESS] = np.zeros(rows, np.int64), np.zeros(rows, np.float32)
    return {name: torch.from_numpy(x) for name, x in arrays.items()}


def entries(obs: dict[str, Tensor]) -> np.ndarray[Any, Any]:
    return np.concatenate([obs["arm"].numpy().reshape(-1, 4).astype(np.float64), obs["sensors.base"].numpy()], axis=1)


def learner_of(ranks: Ranks = ONE_RANK, **changes: Any) -> tuple[GaussianPolicy, Learner]:
    policy = GaussianSettings(normalize_observations=True).build(SPEC, seed=1, device="cpu", role="train")
    settings = algorithm(normalize_rewards=True), training(**{"epochs": 2, "minibatch_steps": 8} | changes)
    return policy, Learner(policy, *settings, total_updates=9, seed=0, ranks=ranks)


def collect(policy: GaussianPolicy, lengths: tuple[int, ...], seed: int) -> list[Trajectory]:
    """Trajectories that the policy acted; the last chunk step of every second one was not executed."""
    found = []
    for number, steps in enumerate(lengths):
        obs = observations(steps + 1, seed * 100 + number)
        act = sample(policy, {name: x[:-1] for name, x in obs.items()}, first_key=1000 * seed + 50 * number)
        valid = np.ones((steps, 1), bool)
        valid[-1] = number % 2 == 0
        found.append(
            Trajectory(
                obs={name: x.numpy() for name, x in obs.items()},
                actions=act.actions.numpy(),
                logprob=act.logprob.numpy(),
                value=act.value.numpy(),
                forward_inputs={name: x.numpy() for name, x in act.forward_inputs.items()},
                rewards=np.ones((steps, 1), np.float32),
                valid=valid,
                version=np.full(steps, seed),
                terminated=True,
                truncated=False,
                success=True,
                env_steps=steps,
                ticket=number,
                group=number,
                task=0,
            )
        )
    return found


def acted_on(samples: list[Trajectory]) -> np.ndarray[Any, Any]:
    """Entries of the observations that an executed action was chosen from."""
    return np.concatenate(
        [entries({n: torch.from_numpy(x[:-1][s.valid[:, 0]]) for n, x in s.obs.items()}) for s in samples]
    )


@pytest.mark.parametrize("batches", [(40,), (1, 39), (13, 13, 14), (1,) * 40])
def test_moments_are_those_of_all_numbers_at_once(batches: tuple[int, ...]) -> None:
    x = torch.from_numpy(entries(observations(sum(batches))))
    found = NOTHING
    for batch in x.split(batches):
        found = found.merged(batch.T)
    assert found.seen == len(x)
    np.testing.assert_allclose(found.mean, x.numpy().mean(0), rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(found.variance, x.numpy().var(0), rtol=1e-10, atol=1e-24)
    assert found.variance[-1] == 0, "of a constant"
    assert found.merged(x[:0].T) is found


def test_normalised_arrays_are_those_of_a_plain_computation() -> None:
    obs = observations(30)
    normalizer = ObservationNormalizer(ARRAYS)
    raw = obs["sensors.base"].clamp(-LIMIT, LIMIT).float()
    assert torch.equal(normalizer(obs)["sensors.base"], raw), "there are no statistics yet"
    update_normalizers(nn.ModuleList([normalizer]), obs, torch.arange(30) < 20)
    x = entries(obs)
    wanted = ((x - x[:20].mean(0)) / np.sqrt(x[:20].var(0) + EPSILON)).clip(-LIMIT, LIMIT)
    found = normalizer(obs)
    np.testing.assert_allclose(found["arm"], wanted[:, :4].reshape(-1, 2, 2), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found["sensors.base"], wanted[:, 4:], rtol=1e-5, atol=1e-6)
    assert found["arm"].dtype == found["sensors.base"].dtype == torch.float32
    assert found["seen"] is obs["seen"]
    assert found[PROGRESS] is obs[PROGRESS]


def test_an_update_adds_the_observations_that_were_acted_on() -> None:
    policy, learner = learner_of()
    samples = collect(policy, (5, 9, 1), seed=1)
    finish(learner.update(samples, 0))
    before = policy.flat.normalizer.mean.clone()
    later = collect(policy, (3, 8), seed=2)
    steps = learner.update(later, 1)
    next(steps)
    assert torch.equal(policy.flat.normalizer.mean, before), "constant as long as it trains"
    finish(steps)
    x = acted_on(samples + later)
    assert policy.flat.normalizer.count == len(x)
    np.testing.assert_allclose(policy.flat.normalizer.mean, x.mean(0), rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(policy.flat.normalizer.variance, x.var(0), rtol=1e-10, atol=1e-20)


def test_log_probs_of_a_version_recompute_exactly_and_evaluation_changes_nothing() -> None:
    policy, learner = learner_of()
    for version in range(3):
        samples = collect(policy, (6, 7), seed=version)
        metrics = finish(learner.update(samples, version, version=version + 1, own_weights=True))
        if version:
            assert abs(metrics["train/actor/mismatch_kl"]) < 1e-6
        else:
            assert "train/actor/mismatch_kl" not in metrics, "its samples were made without statistics"
    state = {name: x.clone() for name, x in policy.state_dict().items()}
    obs = observations(8, seed=77)
    act = sample(policy, obs)
    assert torch.equal(evaluate_act(policy, obs, act).logprob, act.logprob)
    assert all(torch.equal(state[name], x) for name, x in policy.state_dict().items())


def test_supervised_learning_takes_statistics_from_the_demonstrations_once() -> None:
    policy, _ = learner_of()
    obs = observations(40)
    shown = Demonstrations({name: x.numpy() for name, x in obs.items()}, np.zeros((40, 1, 2), np.float32))
    settings = SupervisedSettings(steps=6, batch_size=8)
    first = SupervisedLearner(policy, settings, seed=0)
    steps = first.steps(shown)
    next(steps)
    steps.close()
    again, _ = learner_of()
    second = SupervisedLearner(again, settings, seed=0)
    second.load_state_dict(first.state_dict())
    finish(second.steps(shown))
    x = entries(obs)
    assert again.flat.normalizer.count == 40
    np.testing.assert_allclose(again.flat.normalizer.mean, x.mean(0), rtol=1e-12, atol=1e-15)


def test_the_first_update_trains_with_the_statistics_of_its_own_samples() -> None:
    """Its log-probs are recomputed with them, so the first step's ratio to the proximal policy is 1."""
    policy, learner = learner_of(epochs=1, minibatch_steps=0)
    waits: list[float] = []
    samples, count = collect(policy, (6, 7), seed=0), policy.flat.normalizer.count
    steps = learner.update(samples, 0, before_step=lambda: waits.append(count.item()))
    next(steps)
    assert waits[0] == 0, "a publication has read the weights before the statistics change"
    assert policy.flat.normalizer.count == 12
    metrics = finish(steps)
    assert policy.flat.normalizer.count == 12, "they are added once"
    assert metrics["train/actor/ratio"] == 1.0


@pytest.mark.parametrize("level", ["chunk", "action"])
def test_rewards_are_divided_by_the_deviation_of_discounted_sums(level: str) -> None:
    """A plain loop over one trajectory after another, the sum begun anew in each."""
    per_action = level == "action"
    settings = algorithm(normalize_rewards=True, gamma=0.9, reward_level=level)
    statistics = UpdateStatistics(nn.Identity(), settings, here)
    samples = toy.collect(toy.ToyPolicy(per_action=per_action), (4, 7, 1, 9))
    sums: list[float] = []
    for batch in (samples[:3], samples[3:]):
        packed = collate(batch)
        statistics.begin(packed, None)
        for played in batch:
            running = 0.0
            steps = played.rewards[played.valid] if per_action else (played.rewards * played.valid).sum(1)
            for reward in steps.astype(np.float64):
                running = 0.9 * running + reward
                sums.append(running)
        assert statistics.reward_scale == pytest.approx(1 / np.sqrt(np.var(sums) + EPSILON), rel=1e-6)
        statistics.finish(packed)


def test_scaled_rewards_have_scaled_returns_and_equal_whitened_advantages() -> None:
    """Of a policy whose value is 0; rewards as they are logged stay as they are."""
    policy = toy.ToyPolicy()
    with torch.no_grad():
        for p in policy.critic.parameters():
            p.zero_()
    packed = collate(samples := toy.collect(policy))
    rewards = packed.rewards.clone()
    inputs = TargetInputs(policy, None, 1, 0, torch.device("cpu"))
    plain, _ = compute_targets(packed, algorithm(), inputs)
    scaled, metrics = compute_targets(packed, algorithm(normalize_rewards=True), inputs._replace(reward_scale=0.01))
    torch.testing.assert_close(scaled.returns, 0.01 * plain.returns)
    torch.testing.assert_close(scaled.advantage, plain.advantage, rtol=1e-3, atol=1e-4)
    assert metrics["train/critic/reward_scale"] == 0.01
    assert torch.equal(packed.rewards, rewards)
    assert samples[0].episode_return == float(samples[0].rewards[samples[0].valid].sum())


def test_rewards_without_spread_keep_their_scale() -> None:
    """One step to an episode, all rewards equal: their deviation is 0."""
    settings = algorithm(normalize_rewards=True, reward_level="action")
    statistics = UpdateStatistics(nn.Identity(), settings, here)
    for lengths in ((1,), (1,) * 7, (1,) * 3):
        samples = toy.collect(toy.ToyPolicy(per_action=True), lengths)
        alike = [replace(x, rewards=np.full_like(x.rewards, 0.1), valid=x.valid & [True, False]) for x in samples]
        statistics.begin(packed := collate(alike), None)
        assert statistics.reward_scale == 1.0
        statistics.finish(packed)


@pytest.mark.parametrize("advantage", ["grpo", "rloo", "maxrl", "reinforce_plus_plus"])
def test_comparing_returns_needs_no_scale(advantage: str) -> None:
    with pytest.raises(ValidationError, match=f"{advantage} compares returns, whatever their scale; leave it out"):
        algorithm(normalize_rewards=True, advantage=advantage)


def test_a_learner_that_is_saved_and_loaded_goes_on_bit_for_bit(tmp_path: Path) -> None:
    policy, learner = learner_of()
    for index in range(2):
        finish(learner.update(collect(policy, (6, 7, 4), seed=index), index))
    learner.save(tmp_path / "state.pt").wait()
    other, resumed = learner_of()
    resumed.load(tmp_path / "state.pt")
    samples = collect(policy, (9, 2), seed=2)
    assert finish(resumed.update(samples, 2)) == finish(learner.update(samples, 2))
    assert toy.same(policy.state_dict(), other.state_dict())
