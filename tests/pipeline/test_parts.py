"""Runs of a policy that publishes a part: its files hold that part, and every way to go on from them works."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.long import long
from tests.pipeline.runs import config

from polyrhythm.config.sections.learning import SupervisedSettings
from polyrhythm.errors import RunFolderError
from polyrhythm.pipeline.evaluation.standalone import evaluate
from polyrhythm.pipeline.persistence.checkpoints import STATES, load_policy
from polyrhythm.pipeline.train import train
from polyrhythm.pipeline.trained_policy import load_standalone
from polyrhythm.pipeline.validation.check import validate_run
from polyrhythm.plugins.demonstrations.imitation import Demonstrations, SupervisedLearner
from polyrhythm.training.checkpoint import load_state
from polyrhythm.training.steps import finish

KINDS = [pytest.param("expert", marks=long(5, "the expert alone")), "lora"]


def settings(kind, **changes):
    policy = {"type": "tests.plugins.pretrained.adapted:SmallSettings", "train": kind, "lora": {"rank": 2}}
    usual = {"policy": policy, "seed": 3, "evaluation": {"episodes": 6}, "training": {"versions": 2, "epochs": 1}}
    return config(**{**usual, **changes})


def run(kind, folder, **changes):
    chosen = settings(kind, **changes)
    folder.mkdir(exist_ok=True)
    return chosen, train(validate_run(chosen), folder)


def trained(chosen, seed=None):
    spec = chosen.env.spec()
    policy = chosen.policy.build(spec, seed=chosen.seed if seed is None else seed, device="cpu", role="train")
    return {name for name, p in policy.named_parameters() if p.requires_grad}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module", params=KINDS)
def finished(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    evaluation = {"episodes": 6, "every": 1}
    chosen, summary = run(request.param, folder, evaluation=evaluation, algorithm={"kl": {"coef": 0.1}})
    return request.param, folder, chosen, summary


def test_every_file_of_weights_holds_the_part_alone(finished):
    _, folder, chosen, _ = finished
    names = trained(chosen)
    states = sorted((folder / STATES).glob("trainer-*.pt"))
    runs = sorted((folder / STATES).glob("run-*/trainer.pt"))
    for file in (folder / "policy.pt", folder / "best.pt", states[-1], runs[-1]):
        assert load_state(file)["policy"].keys() == names, file
    kept = load_state(states[-1])["reference"].keys()
    assert kept <= names
    assert not any("lora" in name for name in kept), "fresh adapters are switched off, not kept"


def test_the_run_is_measured_again_from_its_files(finished):
    _, folder, _, summary = finished
    result = evaluate(folder)
    assert {name: result[name] for name in summary["after"]} == summary["after"]
    assert evaluate(folder / "best.pt", 4, 0)["episodes"] == 4


def test_the_policy_acts_by_itself_as_it_was_trained(finished):
    _, folder, chosen, _ = finished
    alone = load_standalone(folder)
    _, weights, _ = load_policy(folder)
    policy = chosen.policy.build(chosen.env.spec(), seed=chosen.seed, device="cpu", role="act").eval()
    policy.load_state_dict(weights, strict=False)
    x = {name: np.full((8, *a.shape), 0.1, a.dtype) for name, a in alone.spec.observation.items()}
    obs = {name: torch.from_numpy(array) for name, array in x.items()}
    greedy, keys = torch.ones(8, dtype=torch.bool), torch.zeros(8, dtype=torch.int64)
    assert np.array_equal(alone.act(x), policy.act(obs, greedy, keys).actions.numpy())


def test_another_run_begins_with_the_part_and_the_frozen_rest_of_the_seed(finished, tmp_path):
    kind, folder, _, summary = finished
    nothing = {"versions": 0}
    _, again = run(kind, tmp_path / "same", init_from=str(folder), training=nothing)
    assert again["before"]["mean_return"] == summary["after"]["mean_return"]
    _, weights, _ = load_policy(tmp_path / "same")
    assert same(weights, load_policy(folder)[1])
    with pytest.raises(RunFolderError, match=r"init_from = .*: seed is 4 here but 3 there, and that file lacks"):
        validate_run(settings(kind, init_from=str(folder), training=nothing, seed=4))
    other = {**settings(kind).policy.model_dump(mode="json"), "train": "head"}
    with pytest.raises(RunFolderError, match=rf"policy.train is head here but {kind} in the policy of those weights"):
        validate_run(settings(kind, init_from=str(folder), training=nothing, policy=other))


def test_a_run_that_is_extended_is_as_if_it_had_not_ended(finished, tmp_path):
    kind = finished[0]
    kl, three = {"kl": {"coef": 0.1}}, {"versions": 3, "epochs": 1}
    run(kind, tmp_path / "through", training=three, algorithm=kl)
    run(kind, tmp_path / "cut", algorithm=kl)
    longer = settings(kind, training=three, algorithm=kl, resume=str(tmp_path / "cut"))
    train(validate_run(longer), tmp_path / "cut")
    assert same(load_policy(tmp_path / "through")[1], load_policy(tmp_path / "cut")[1])


def test_demonstrations_warm_start_the_part_alone(tmp_path):
    """What is frozen is a function of the seed after any start, so a file need not hold it."""
    chosen = settings("expert")
    spec = chosen.env.spec()
    policy = chosen.policy.build(spec, seed=0, device="cpu", role="train")
    before = {name: x.clone() for name, x in policy.state_dict().items()}
    rng = np.random.default_rng(0)
    obs = {name: rng.normal(size=(12, *a.shape)).astype(a.dtype) for name, a in spec.observation.items()}
    shown = Demonstrations(obs, rng.integers(0, 2, (12, 1, 1)))
    learner = SupervisedLearner(policy, SupervisedSettings(steps=3, batch_size=4), seed=0)
    finish(learner.steps(shown))
    moved = {name for name, x in policy.state_dict().items() if not torch.equal(x, before[name])}
    assert moved
    assert moved <= policy.published().keys() == learner.state_dict()["policy"].keys()
