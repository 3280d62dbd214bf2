"""A gradient that is not finite changes nothing, is counted, and is blamed on who gave it."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.training.toy import ToyPolicy, algorithm, collect, same, training, weights
from torch import Tensor

from polyrhythm.algorithms.advantages import AdvantageInput
from polyrhythm.algorithms.losses import LossInput
from polyrhythm.policies.base import Evaluation, Observations
from polyrhythm.specs import Trajectory
from polyrhythm.training.learner import Learner
from polyrhythm.training.steps import Metrics, finish

HERE = "tests.training.test_finite"
SKIPPED = "train/actor/skipped_steps"


def infinite_above(entries: LossInput, *, above: float) -> Tensor:
    """Plain policy gradient; infinite for entries of a large advantage."""
    factor = torch.where(entries.advantage > above, torch.inf, 1.0)
    return -factor * entries.advantage * entries.logprob


def nothing_over_nothing(samples: AdvantageInput) -> Tensor:
    return samples.rewards / (samples.rewards * 0)


def square_root(entries: LossInput) -> Tensor:
    """Zero, with an infinite slope: sqrt|x| at x = 0."""
    return (entries.logprob - entries.logprob.detach()).abs().sqrt()


def learner(settings: dict[str, Any] | None = None, **train: Any) -> Learner:
    return Learner(ToyPolicy(), algorithm(**settings or {}), training(**train), total_updates=9, seed=7)


def own_loss(name: str, **settings: float) -> dict[str, Any]:
    return {"loss": {"type": f"{HERE}:{name}", "settings": settings}}


def update(of: Learner, index: int = 0, spoil: Callable[[Trajectory], None] | None = None) -> Metrics:
    data = [copy.deepcopy(t) for t in collect(ToyPolicy())]
    if spoil is not None:
        spoil(data[1])
    return finish(of.update(data, index))


def test_a_step_that_is_skipped_changes_neither_weights_nor_optimizer() -> None:
    broken, before = learner(own_loss("infinite_above", above=-100.0)), weights(ToyPolicy())
    metrics = update(broken)
    assert metrics[SKIPPED] == 1
    assert same(weights(broken.policy), before)  # type: ignore[arg-type]
    assert broken.updates == 1, "the update is over, and its samples are not met again"
    fresh = learner(own_loss("infinite_above", above=100.0))
    again = learner(own_loss("infinite_above", above=100.0))
    again.load_state_dict({**copy.deepcopy(broken.state_dict()), "updates": 0})
    assert update(again) == update(fresh)
    assert same(weights(again.policy), weights(fresh.policy))  # type: ignore[arg-type]


def test_one_bad_step_among_others_is_left_out_of_the_means_too() -> None:
    broken = learner(own_loss("infinite_above", above=1.5), minibatch_steps=3, on_nonfinite_gradient="skip")
    metrics = update(broken)
    assert metrics[SKIPPED] == 1
    assert all(np.isfinite(number) for number in metrics.values())
    assert not same(weights(broken.policy), weights(ToyPolicy()))  # type: ignore[arg-type]
    assert all(x.isfinite().all() for x in weights(broken.policy).values())  # type: ignore[arg-type]
    assert broken.halt == ""


@pytest.mark.parametrize("setting", ["halt", "skip"])
def test_a_bad_step_is_skipped_at_its_own_moment_and_the_next_one_changes_weights(setting: str) -> None:
    broken = learner(own_loss("infinite_above", above=1.5), minibatch_steps=3, on_nonfinite_gradient=setting)
    steps, changed = broken.update([copy.deepcopy(t) for t in collect(ToyPolicy())], 0), []
    while True:
        before = weights(broken.policy)  # type: ignore[arg-type]
        try:
            next(steps)
        except StopIteration:
            break
        assert all(x.isfinite().all() for x in weights(broken.policy).values())  # type: ignore[arg-type]
        changed.append(not same(weights(broken.policy), before))  # type: ignore[arg-type]
    assert len(changed) == 5
    assert changed.count(False) == 1
    assert bool(broken.halt) == (setting == "halt")


def test_halt_is_one_sentence_that_names_setting_update_culprit_and_what_to_do(
    caplog: pytest.LogCaptureFixture,
) -> None:
    broken = learner(own_loss("infinite_above", above=1.5), minibatch_steps=3)
    with caplog.at_level(logging.WARNING):
        update(broken, 4)
    assert broken.halt == (
        "training.on_nonfinite_gradient = halt: 1 of 5 optimizer steps of update 4 had a gradient that is not finite: "
        f"algorithm.loss.type = {HERE}:infinite_above: it gives NaN or infinity; look at {HERE}:infinite_above first, "
        "or lower training.optimizer.lr, value_lr or grad_clip (they changed no weights, and a resumed run goes "
        "on behind this update)"
    )
    assert "1 of 5 optimizer steps of update 4 were skipped" in caplog.text


def test_too_many_in_a_row_halt_also_where_they_are_skipped_and_good_ones_begin_the_count_anew() -> None:
    settings = own_loss("infinite_above", above=1.5)
    broken = learner(settings, minibatch_steps=3, on_nonfinite_gradient="skip", max_skipped_steps=2)
    for index in range(3):
        update(broken, index)
        assert broken.halt == "", "one in five"
    spoil = lambda t: t.rewards.fill(np.nan)  # noqa: E731
    always = learner(on_nonfinite_gradient="skip", max_skipped_steps=2)
    found = []
    for index, wrong in enumerate([spoil, spoil, None, spoil, spoil, spoil]):
        update(always, index, wrong)
        found.append(bool(always.halt))
    assert found == [False] * 5 + [True]
    assert always.halt.startswith("training.max_skipped_steps = 2: 3 optimizer steps in a row, up to update 5, had")


def test_without_a_bad_step_nothing_is_different_but_the_count() -> None:
    halting, skipping = learner(minibatch_steps=3), learner(minibatch_steps=3, on_nonfinite_gradient="skip")
    first, second = update(halting), update(skipping)
    assert second == first | {SKIPPED: 0.0}
    assert same(weights(halting.policy), weights(skipping.policy))  # type: ignore[arg-type]


BLAMED: list[tuple[dict[str, Any], Callable[[Trajectory], None] | None, str]] = [
    ({}, lambda t: t.rewards.fill(np.nan), "the environment gave a reward of NaN or infinity; correct the environment"),
    ({}, lambda t: t.obs["x"][0].fill(np.inf), "the environment gave observation x of NaN"),
    ({}, lambda t: t.obs["x"][-1].fill(np.inf), "the environment gave the last observation x of NaN"),
    ({"loss": "tis"}, lambda t: t.logprob.fill(np.nan), "policy.act gave a log-prob of NaN or infinity; correct"),
    ({}, lambda t: t.value.fill(np.nan), "policy.act gave a value of NaN"),
    (
        {"advantage": f"{HERE}:nothing_over_nothing"},
        None,
        f"algorithm.advantage.type = {HERE}:nothing_over_nothing: it gives NaN or infinity; correct its formula",
    ),
    (own_loss("square_root"), None, "the losses are finite, their gradient is not, in trunk.0.weight and 5 more"),
]


@pytest.mark.parametrize(("settings", "spoil", "words"), BLAMED)
def test_the_first_that_is_not_finite_on_the_way_is_blamed(
    settings: dict[str, Any], spoil: Callable[[Trajectory], None] | None, words: str
) -> None:
    broken = learner(settings)
    update(broken, spoil=spoil)
    assert words in broken.halt


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ("logits", "policy.evaluate gives log-probs that are not finite; lower training.optimizer.lr"),
        ("critic", "policy.value gives NaN or infinity for the last observation of a sample; lower"),
    ],
)
def test_weights_that_have_grown_too_large_are_blamed(part: str, words: str) -> None:
    broken = learner()
    with torch.no_grad():
        getattr(broken.policy, part).weight.fill_(torch.inf)
    update(broken)
    assert words in broken.halt


class LatePolicy(ToyPolicy):
    """Its values are computed by the trainer."""

    values_late = True


def test_a_value_that_is_computed_late_is_blamed_on_the_policy() -> None:
    policy = LatePolicy()
    with torch.no_grad():
        policy.critic.weight.fill_(torch.nan)
    broken = Learner(policy, algorithm(bootstrap="never"), training(), total_updates=9, seed=7)
    update(broken)
    assert "policy.evaluate gives values that are not finite; lower training.optimizer.lr" in broken.halt


class AdapterPerStep(ToyPolicy):
    """Its first two optimizer steps train an adapter each, the others none, as where each task has its own."""

    def __init__(self) -> None:
        super().__init__()
        self.adapters = torch.nn.ParameterList(torch.zeros(()).double() for _ in range(2))
        self.trunk.requires_grad_(requires_grad=False)
        self.logits.requires_grad_(requires_grad=False)
        self.unused = iter(self.adapters)

    def evaluate(self, obs: Observations, forward_inputs: Mapping[str, Tensor]) -> Evaluation:
        given = super().evaluate(obs, forward_inputs)
        return given._replace(logprob=given.logprob + next(self.unused, torch.zeros(())))


def test_the_parameters_that_are_blamed_are_those_of_the_step_that_was_skipped() -> None:
    settings, steps = algorithm(**own_loss("square_root")), training(minibatch_steps=3)
    broken = Learner(AdapterPerStep(), settings, steps, total_updates=9, seed=7)
    update(broken)
    assert "2 of 5 optimizer steps" in broken.halt
    assert "their gradient is not, in adapters.0; look at" in broken.halt


def test_masked_entries_are_blamed_for_nothing() -> None:
    broken = learner(own_loss("square_root"))
    data = [replace(t, logprob=np.where(t.valid[..., None], t.logprob, np.nan)) for t in collect(ToyPolicy())]
    finish(broken.update(data, 0))
    assert "the losses are finite" in broken.halt
