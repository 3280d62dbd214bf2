"""The trainer station: an update in units, weights between updates, figures past the conductor."""

from __future__ import annotations

import pytest
import torch
from tests.training.toy import ToyPolicy, algorithm, collect, training

from polyrhythm.flow.records import LendSamples, Published, PublishWeights, Serve, UpdateDone
from polyrhythm.policies.base import as_module
from polyrhythm.runtime.payloads import InlinePayloads
from polyrhythm.runtime.weights import InlineWeights
from polyrhythm.stations.trainer import Trainer
from polyrhythm.training.learner import Learner


def stand():
    policy = ToyPolicy()
    payloads, weights, said = InlinePayloads(), InlineWeights(), []
    handles = tuple(payloads.put("slot", sample) for sample in collect(policy, lengths=(3, 4, 2)))
    learner = Learner(policy, algorithm(), training(epochs=2, minibatch_steps=3), total_updates=4, seed=0)
    trainer = Trainer("t", 0, learner, payloads, weights, said.append, said.append)
    return trainer, LendSamples("t", 0, 2, (7, 8, 9), handles, (0, 0, 0)), weights, said


def test_an_update_is_several_units_and_ends_with_a_report_and_an_event():
    trainer, lend, _, said = stand()
    assert not trainer.work()
    trainer.handle(lend)
    units = 0
    while trainer.work():
        units += 1
        assert bool(said) == (units == 7)  # 2 epochs of 3 mini-batches, and the unit that finds the end
    report, done = said
    assert done == UpdateDone("t", 0, 0)
    assert (report.topic, report.step) == ("update", 0)
    assert report.values["staleness/lag_max"] == 2
    assert report.values["env/sample_chunk_steps"] == 3
    assert "train/actor/policy_loss" in report.values


def test_weights_are_published_after_the_update_before_them_and_do_not_move_on():
    trainer, lend, weights, said = stand()
    before = {name: x.clone() for name, x in as_module(trainer._learner.policy).state_dict().items()}
    trainer.handle(PublishWeights("t", 0))
    trainer.handle(lend)
    trainer.handle(PublishWeights("t", 1))
    while trainer.work():
        pass
    assert said[0] == Published("t", 0, 0)
    assert said[-1] == Published("t", 0, 1)
    _, first = weights.fetch(0)
    _, second = weights.fetch(1)
    after = as_module(trainer._learner.policy).state_dict()
    assert all(torch.equal(first[name], x) for name, x in before.items())
    assert all(torch.equal(second[name], x) for name, x in after.items())
    assert any(not torch.equal(first[name], second[name]) for name in first)


def test_what_a_trainer_does_not_do_is_refused():
    trainer, *_ = stand()
    with pytest.raises(TypeError, match="Serve"):
        trainer.handle(Serve("t", None))
