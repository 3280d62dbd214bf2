"""The learner with a policy of which a part is frozen: the prefix once per sample, the reference without a copy."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from tests.training.adapted_run import collect, plain, small
from tests.training.toy import algorithm, training

from polyrhythm.policies.base import as_module
from polyrhythm.training.batch import collate
from polyrhythm.training.learner import Learner
from polyrhythm.training.moments import SharedReference
from polyrhythm.training.precomputed import with_precomputed
from polyrhythm.training.steps import finish
from polyrhythm.training.targets import TargetInputs

CPU = torch.device("cpu")
KL = {"kl": {"coef": 0.1}, "proximal": "recompute", "loss": "decoupled_ppo", "bootstrap": "always"}
STEPS = 14
SHORT = {"epochs": 2, "minibatch_steps": 7, "micro_batch_steps": 4}


def updated(policy, *, updates=2, changes=None, **train):
    settings = training(**{**SHORT, **train})
    learner = Learner(policy, algorithm(**(KL if changes is None else changes)), settings, total_updates=4, seed=1)
    data = collect(policy)
    return learner, [finish(learner.update(data, index)) for index in range(updates)]


def close(policy, other):
    for name, x in policy.state_dict().items():
        torch.testing.assert_close(x, other.state_dict()[name], atol=1e-6, rtol=1e-6, msg=name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_update_is_the_same_with_and_without_a_precomputed_prefix(dtype):
    ours, theirs = small(train="expert", dtype=dtype), plain(small(train="expert", dtype=dtype))
    (_, a), (_, b) = updated(ours), updated(theirs)
    close(ours, theirs)
    assert not torch.equal(ours.network.queries, small(train="expert", dtype=dtype).network.queries)
    assert [set(metrics) for metrics in a] == [set(metrics) for metrics in b]
    for first, second in zip(a, b, strict=True):
        assert first == pytest.approx(second, rel=1e-4, abs=1e-6)


def test_the_prefix_of_a_sample_is_computed_once_in_an_update():
    policy, without = small(train="expert"), plain(small(train="expert"))
    data = collect(policy)
    for one in (policy, without):
        learner = Learner(one, algorithm(**KL), training(epochs=3), total_updates=4, seed=1)
        one.network.prefixes = 0
        finish(learner.update(data, 0))
    last = 4  # trajectories, whose last observations are evaluated for the bootstrap
    assert policy.network.prefixes == STEPS + last
    assert without.network.prefixes == (3 + 1) * STEPS + last, "epochs and recomputation"


def test_a_prefix_that_is_trained_is_not_precomputed():
    for train in ("all", "lora"):
        policy = small(train=train)
        packed = collate(collect(policy))
        assert with_precomputed(packed, TargetInputs(policy, None, 0, 3, CPU), limit_mib=1) is packed


@pytest.mark.parametrize(("read", "beside"), [((), set()), (("hand",), {"hand"}), (None, {"hand", "joints"})])
def test_precomputed_rows_are_those_of_one_pass_beside_what_is_still_read(read, beside):
    policy = small(train="expert")
    policy.traits = replace(policy.traits, beside_precomputed=read)
    packed = collate(collect(policy))
    found = with_precomputed(packed, TargetInputs(policy, None, 0, 3, CPU), limit_mib=0)
    with torch.no_grad():
        expected = policy.precompute(packed.obs)
    assert found.obs.keys() == beside | expected.keys()
    for name, x in expected.items():
        torch.testing.assert_close(found.obs[name], x, atol=1e-6, rtol=1e-6)
        assert not found.obs[name].requires_grad
    assert "prefix.features" not in packed.obs


def test_names_that_are_taken_and_missing_rows_are_refused():
    policy = small(train="expert")
    packed = collate(collect(policy))
    taken = next(iter(packed.obs))
    policy.precompute = lambda obs: {taken: torch.zeros(STEPS, 1)}
    with pytest.raises(ValueError, match=rf"policy.precompute gives '{taken}', which the observation has"):
        with_precomputed(packed, TargetInputs(policy, None, 0, 0, CPU), limit_mib=1)
    policy.precompute = lambda obs: {"found": torch.zeros(3, 2)}
    with pytest.raises(ValueError, match=r"policy.precompute gives 'found' \[3, 2\] for 14 rows; put the rows first"):
        with_precomputed(packed, TargetInputs(policy, None, 0, 0, CPU), limit_mib=1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: on a CPU there is one memory")
@pytest.mark.parametrize("limit", [0, 4096])
def test_prefixes_stay_on_the_gpu_only_up_to_the_limit(limit):
    policy = small(train="expert").cuda()
    packed = collate(collect(small(train="expert")))
    found = with_precomputed(packed, TargetInputs(policy, None, 0, 3, torch.device("cuda")), limit_mib=limit)
    kept = [x for name, x in found.obs.items() if name not in packed.obs]
    assert all(x.is_cuda == bool(limit) and (x.is_cuda or x.is_pinned()) for x in kept)


# The reference policy.


@pytest.mark.parametrize("train", ["expert", "lora", "all"])
def test_updates_with_a_shared_reference_are_those_with_a_copy(train):
    ours, theirs = small(train=train), plain(small(train=train))
    (learner, a), (other, b) = updated(ours), updated(theirs)
    assert isinstance(learner.reference, SharedReference)
    assert not isinstance(other.reference, SharedReference)
    close(ours, theirs)
    assert a[-1]["train/actor/reference_kl"] > 1e-6
    for first, second in zip(a, b, strict=True):
        assert first == pytest.approx(second, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("train", ["expert", "lora"])
def test_no_second_copy_of_frozen_weights_in_memory_or_in_states(train):
    policy = small(train=train)
    learner, _ = updated(policy, updates=1)
    state = learner.state_dict()
    trained = {name for name, p in policy.named_parameters() if p.requires_grad}
    assert state["policy"].keys() == trained
    assert state["reference"].keys() <= trained
    if train == "lora":
        assert state["reference"].keys() == {"critic.weight", "critic.bias"}
    own = {p.data_ptr() for p in as_module(policy).parameters()}
    assert not own & {x.data_ptr() for x in state["reference"].values()}, "what is kept does not move with training"


@pytest.mark.parametrize("warm", [False, True])
def test_a_restart_goes_on_with_the_same_reference(warm):
    def start():
        policy = small(train="lora")
        if warm:
            with torch.no_grad():
                for name, p in policy.named_parameters():
                    if ".lora_B." in name:
                        p.add_(0.01)
        return policy

    through, _ = updated(start(), updates=2)
    cut, _ = updated(start(), updates=1)
    state = copy.deepcopy(cut.state_dict())
    again = Learner(start(), algorithm(**KL), training(**SHORT), total_updates=4, seed=1)
    again.load_state_dict(state)
    finish(again.update(collect(start()), 1))
    for name, x in as_module(through.policy).state_dict().items():
        assert torch.equal(x, as_module(again.policy).state_dict()[name]), name


def test_a_publication_has_read_the_weights_before_the_reference_stands_in_their_place():
    policy = small(train="expert")
    calls: list[str] = []
    learner = Learner(policy, algorithm(**KL), training(), total_updates=4, seed=1)
    data = collect(policy)
    finish(learner.update(data, 0))
    taken = policy.as_reference
    policy.as_reference = lambda state: calls.append("reference") or taken(state)
    steps = learner.update(data, 1, before_step=lambda: calls.append("settled"))
    next(steps)
    assert calls[:2] == ["settled", "reference"]
    steps.close()
