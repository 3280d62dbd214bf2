from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.training.toy import CHUNK, DIM, FEATURES, ToyPolicy, same, weights

from polyrhythm.config.sections.learning import OptimizerSettings, SupervisedSettings
from polyrhythm.errors import RunFolderError, RunHalted
from polyrhythm.plugins.demonstrations.imitation import Demonstrations, SupervisedLearner, rows_of_step
from polyrhythm.specs import INSTRUCTION
from polyrhythm.training.optim import adamw, linear_decay, warmup_cosine
from polyrhythm.training.steps import finish

SETTINGS = SupervisedSettings(steps=60, batch_size=16, lr=0.03, warmup_steps=5, weight_decay=0.01)


def expert(count: int = 50) -> Demonstrations:
    """The action is told by the sign of the first feature."""
    x = np.random.default_rng(0).normal(size=(count, FEATURES)).astype(np.float32)
    token = np.where(x[:, 0] > 0, 1, 2).astype(np.float32)
    return Demonstrations({"x": x}, np.broadcast_to(token.reshape(-1, 1, 1), (count, CHUNK, DIM)).copy())


def test_imitates_the_expert() -> None:
    policy, shown = ToyPolicy(), expert()
    learner = SupervisedLearner(policy, SETTINGS, seed=0)
    before = policy.sft_loss({"x": torch.from_numpy(shown.obs["x"])}, torch.from_numpy(shown.actions)).item()
    metrics = finish(learner.steps(shown))
    assert metrics["train/sft/loss"] < 0.2 * before
    assert not policy.training
    assert learner.step == 60


def test_stopped_and_resumed_is_the_same_run() -> None:
    whole, first, second = ToyPolicy(), ToyPolicy(), ToyPolicy(seed=5)
    finish(SupervisedLearner(whole, SETTINGS, seed=1).steps(expert()))
    half = SupervisedLearner(first, SETTINGS, seed=1)
    steps = half.steps(expert())
    for _ in range(20):
        next(steps)
    state = copy.deepcopy(half.state_dict())
    steps.close()
    assert not first.training
    rest = SupervisedLearner(second, SETTINGS, seed=1)
    rest.load_state_dict(state)
    finish(rest.steps(expert()))
    assert same(weights(whole), weights(second))


@pytest.mark.parametrize(
    ("shown", "weight", "words"),
    [
        (np.nan, 0.1, "the demonstrations hold x of NaN or infinity; correct the environment or its expert"),
        (1.0, np.inf, "supervised.lr: 50 optimizer steps had a loss or gradient of NaN or infinity; lower it"),
    ],
)
def test_a_gradient_that_is_not_finite_halts_and_changes_no_weights(shown: float, weight: float, words: str) -> None:
    policy, data = ToyPolicy(), expert(1)
    data.obs["x"][0] *= shown
    with torch.no_grad():
        policy.logits.weight.fill_(weight)
    before = weights(policy)
    learner = SupervisedLearner(policy, SETTINGS, seed=0)
    with pytest.raises(RunHalted, match=words):
        finish(learner.steps(data))
    assert same(weights(policy), before)
    assert learner.step == 50, "and does not go on to the end first"


@pytest.mark.parametrize("name", ["x", "actions"])
def test_demonstrations_that_are_not_finite_are_not_read(name: str, tmp_path: Path) -> None:
    found = expert()
    instructions = np.arange(len(found)) % 2
    given = Demonstrations({**found.obs, INSTRUCTION: instructions}, found.actions, ("a", "b"), 1)
    {**given.obs, "actions": given.actions}[name][7] = np.inf
    given.save(tmp_path / "d.npz")
    words = rf"d.npz: {name} of chunk step 7 of task b is not finite; record them again"
    with pytest.raises(RunFolderError, match=words):
        Demonstrations.load(tmp_path / "d.npz")


def test_rows_are_an_endless_row_of_shuffles() -> None:
    row = np.concatenate([rows_of_step(step, 7, 5, seed=3) for step in range(10)])
    for epoch in range(14):
        assert sorted(row[5 * epoch : 5 * epoch + 5]) == [0, 1, 2, 3, 4]
    assert len({tuple(row[5 * e : 5 * e + 5]) for e in range(14)}) > 5


def test_schedules() -> None:
    assert [warmup_cosine(s, 4, 2) for s in range(5)] == pytest.approx([0.5, 1.0, 1.0, 0.5, 0.0])
    assert warmup_cosine(0, 10, 0) == 1.0
    assert [linear_decay(u, 3, 0.4) for u in range(4)] == pytest.approx([1.0, 0.7, 0.4, 0.4])
    assert linear_decay(0, 1, 0.4) == 1.0


def test_only_matrices_decay() -> None:
    policy = ToyPolicy()
    optimizer = adamw(policy, OptimizerSettings(lr=0.1, weight_decay=0.5))
    for p in policy.parameters():
        p.grad = torch.zeros_like(p)
    start = weights(policy)
    optimizer.step()
    moved = {name for name, x in weights(policy).items() if not torch.equal(x, start[name])}
    assert moved == {name for name in start if name.endswith("weight")}


def test_demonstrations_survive_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "demonstrations.npz"
    shown = expert(6)
    shown.save(path)
    back = Demonstrations.load(path)
    assert len(back) == 6
    assert np.array_equal(back.actions, shown.actions)
    assert back.actions.dtype == np.float32
    assert (back.tasks, back.action_repeat) == ((), 0)
    assert set(back.obs) == {"x"}
    assert np.array_equal(back.obs["x"], shown.obs["x"])
    assert [p.name for p in tmp_path.iterdir()] == ["demonstrations.npz"]


def test_demonstrations_refuse_what_does_not_fit(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="as many observations as actions"):
        Demonstrations({"x": np.zeros((3, 2))}, np.zeros((4, 1, 1)))
    with pytest.raises(ValueError, match="pickle"):
        Demonstrations({"x": np.array([None])}, np.zeros((1, 1, 1))).save(tmp_path / "d.npz")
    np.savez(tmp_path / "other.npz", a=np.zeros(1))
    with pytest.raises(RunFolderError, match="no demonstrations"):
        Demonstrations.load(tmp_path / "other.npz")
