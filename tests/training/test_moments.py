"""Running statistics are those of all numbers at once, whatever the batches and processes that they come in."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.training.toy import algorithm, training
from torch import Tensor, nn

from polyrhythm.config.sections.learning import SupervisedSettings
from polyrhythm.policies.calls import evaluate_act, sample
from polyrhythm.policies.gaussian import GaussianPolicy, GaussianSettings
from polyrhythm.policies.normalizer import EPSILON, LIMIT, ObservationNormalizer
from polyrhythm.specs import INSTRUCTION, PROGRESS, ActionSpec, ArraySpec, EnvSpec, Task, Trajectory
from polyrhythm.training.demonstrations import Demonstrations
from polyrhythm.training.learner import Learner
from polyrhythm.training.moments import Moments, update_normalizers
from polyrhythm.training.sft import SupervisedLearner
from polyrhythm.training.steps import finish

ARRAYS = {"arm": ArraySpec((2, 2), "float32"), "seen": ArraySpec((3,), "uint8"), "base": ArraySpec((3,), "float64")}
SPEC = EnvSpec(ARRAYS, ActionSpec("continuous", 2, low=(-1.0,) * 2, high=(1.0,) * 2), (Task("a", "a"),), 50)
NOTHING = Moments(*(torch.zeros(n, dtype=torch.float64) for n in (1, 7, 7)))


def observations(rows: int, seed: int = 0) -> dict[str, Tensor]:
    """Of unlike scales and places, as (of `base`) sensors in metres, pixels and a constant have."""
    rng = np.random.default_rng(seed)
    base = rng.normal((0.0, 300.0, 7.0), (1e-3, 100.0, 0.0), (rows, 3))
    arrays = {"arm": rng.normal(size=(rows, 2, 2)).astype(np.float32), "base": base}
    arrays["seen"] = rng.integers(0, 256, (rows, 3)).astype(np.uint8)
    arrays[INSTRUCTION], arrays[PROGRESS] = np.zeros(rows, np.int64), np.zeros(rows, np.float32)
    return {name: torch.from_numpy(x) for name, x in arrays.items()}


def entries(obs: dict[str, Tensor]) -> np.ndarray[Any, Any]:
    return np.concatenate([obs["arm"].numpy().reshape(-1, 4).astype(np.float64), obs["base"].numpy()], axis=1)


def learner_of(**settings: Any) -> tuple[GaussianPolicy, Learner]:
    policy = GaussianSettings(normalize_observations=True, **settings).build(SPEC, seed=1, device="cpu", role="train")
    return policy, Learner(policy, algorithm(), training(epochs=2, minibatch_steps=8), total_updates=9, seed=0)


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
    assert found.count == len(x)
    np.testing.assert_allclose(found.mean, x.numpy().mean(0), rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(found.variance, x.numpy().var(0), rtol=1e-10, atol=1e-24)
    assert found.variance[-1] == 0, "of a constant"
    assert found.merged(x[:0].T) is found


def test_normalised_arrays_are_those_of_a_plain_computation() -> None:
    obs = observations(30)
    normalizer = ObservationNormalizer(ARRAYS)
    assert torch.equal(normalizer(obs)["base"], obs["base"].clamp(-LIMIT, LIMIT).float()), "as there are no statistics"
    update_normalizers(nn.ModuleList([normalizer]), obs, torch.arange(30) < 20)
    x = entries(obs)
    wanted = ((x - x[:20].mean(0)) / np.sqrt(x[:20].var(0) + EPSILON)).clip(-LIMIT, LIMIT)
    found = normalizer(obs)
    np.testing.assert_allclose(found["arm"], wanted[:, :4].reshape(-1, 2, 2), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found["base"], wanted[:, 4:], rtol=1e-5, atol=1e-6)
    assert found["arm"].dtype == found["base"].dtype == torch.float32
    assert found["seen"] is obs["seen"]
    assert found[PROGRESS] is obs[PROGRESS]


def test_an_update_adds_the_observations_that_were_acted_on() -> None:
    policy, learner = learner_of()
    samples = collect(policy, (5, 9, 1), seed=1)
    before = policy.flat.normalizer.mean.clone()
    steps = learner.update(samples, 0)
    next(steps)
    assert torch.equal(policy.flat.normalizer.mean, before), "constant as long as it trains"
    finish(steps)
    later = collect(policy, (3, 8), seed=2)
    finish(learner.update(later, 1))
    x = acted_on(samples + later)
    assert policy.flat.normalizer.count == len(x)
    np.testing.assert_allclose(policy.flat.normalizer.mean, x.mean(0), rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(policy.flat.normalizer.variance, x.var(0), rtol=1e-10, atol=1e-20)


def test_log_probs_of_a_version_recompute_exactly_and_evaluation_changes_nothing() -> None:
    policy, learner = learner_of()
    for version in range(3):
        samples = collect(policy, (6, 7), seed=version)
        metrics = finish(learner.update(samples, version, version=version + 1, own_weights=True))
        assert abs(metrics["train/actor/mismatch_kl"]) < 1e-6
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
