"""What is trained of a network, adapters, the reference without a copy, and what is published."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from tests.plugins.pretrained.adapted import SMALL, SmallNetwork, SmallSettings
from tests.plugins.trial.test_policy_contract import FLAT, TASKS

from polyrhythm.conformance import ContractViolation, run_checks
from polyrhythm.plugins.pretrained.adapting import (
    Adaptation,
    LoraSettings,
    adapted_layers,
    released_name,
    set_checkpointing,
    trained_names,
)
from polyrhythm.plugins.pretrained.precision import Precision
from polyrhythm.plugins.trial import policy_contract as conformance
from polyrhythm.plugins.trial.policy_calls import check_form
from polyrhythm.policies.form import load_published, published_state
from polyrhythm.specs import ActionSpec, EnvSpec

DISCRETE = ActionSpec(kind="discrete", dim=2, choices=3)
SPEC = EnvSpec(FLAT, DISCRETE, TASKS, 50)
MODES = ("all", "expert", "head", "lora")
LORA = {"train": "lora", "lora": {"rank": 4, "alpha": 8.0}}


def settings(**changes):
    return SmallSettings.model_validate(changes)


def build(role="train", seed=0, **changes):
    return settings(**changes).build(SPEC, seed=seed, device="cpu", role=role).eval()


def observations(rows=4, seed=0):
    rng = np.random.default_rng(seed)
    return {name: torch.from_numpy(rng.normal(size=(rows, *a.shape)).astype(a.dtype)) for name, a in FLAT.items()}


def logprob(policy, obs, tokens):
    return policy.evaluate(obs, {"tokens": tokens}).logprob


def tokens(rows=4):
    return torch.arange(rows * 2).view(rows, 1, 2) % 3


def train(policy, steps=2):
    """Optimizer steps on what is trained, such that all of it moves."""
    for _ in range(steps):
        policy.zero_grad()
        found = policy.evaluate(observations(8), {"tokens": tokens(8)})
        (found.logprob.square().sum() + found.value.sum()).backward()
        with torch.no_grad():
            for p in policy.parameters():
                if p.grad is not None:
                    p.sub_(0.05 * p.grad + 0.01)


def trained(policy):
    return {name for name, p in policy.named_parameters() if p.requires_grad}


def test_each_mode_trains_its_patterns_and_what_is_not_the_networks():
    critic = {"critic.weight", "critic.bias"}
    own = {f"network.{name}" for name, _ in SmallNetwork(6).named_parameters()}
    assert trained(build(train="all")) == critic | {n for n in own if "spare" not in n}
    assert trained(build(train="head")) == critic | {"network.head.weight", "network.head.bias"}
    expert = {n for n in own if n.startswith(("network.expert.", "network.head.", "network.queries"))}
    assert trained(build(train="expert")) == critic | expert
    adapters = trained(build(**LORA)) - critic
    assert len(adapters) == 2 * 2 * 2 * 7, "A and B, in 2 decoders of 2 layers, of 7 matrices each"
    assert all(released_name(name) is None for name in adapters)


def test_lora_may_train_more_in_full():
    more = build(train="lora", lora={"rank": 4, "also": ["head.*"]})
    assert {"network.head.weight", "network.head.bias"} <= trained(more)
    assert {"network.head.weight", "network.head.bias"} <= published_state(more).keys()
    assert "network.head.weight" not in published_state(build(**LORA))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"train": "lora", "lora": {"targets": ["nothing.*"]}}, r"policy.lora.targets = nothing.\*: matches the wei"),
        ({"train": "lora", "lora": {"targets": ["spare.*"]}}, r"policy.lora.targets = spare.\*: matches the weight"),
        ({"train": "lora", "lora": {"also": ["haed.*"]}}, r"policy.lora.also = haed.\*: matches no tensor of the net"),
    ],
)
def test_patterns_that_select_nothing_are_one_sentence(changes, said):
    with pytest.raises(ValueError, match=said):
        build(**changes)


def test_a_mode_that_selects_nothing_is_one_sentence():
    names = ["a.weight", "spare.weight"]
    with pytest.raises(ValueError, match=r"policy.train = head: its patterns \(b.\*\) match no tensor.*all, head"):
        trained_names(names, "head", {"head": ("b.*",)})
    with pytest.raises(ValueError, match=r"policy.train = head: its patterns \(spare.\*\) match no tensor"):
        trained_names(names, "head", {"head": ("spare.*",)}, dead=("spare.*",))
    with pytest.raises(ValueError, match=r"policy.train = expert: the network has no such part; use one of all, head"):
        trained_names(names, "expert", {"head": ("a.*",)})


def test_adapters_change_nothing_at_first_and_are_a_function_of_the_seed():
    plain, adapted, again, other = build(), build(**LORA), build(**LORA), build(seed=1, **LORA)
    obs, chosen = observations(), tokens()
    assert torch.equal(logprob(plain, obs, chosen), logprob(adapted, obs, chosen))
    name = "network.backbone.layers.0.mlp.up_proj.lora_A.default.weight"
    first, second, third = (policy.state_dict()[name] for policy in (adapted, again, other))
    assert torch.equal(first, second)
    assert not torch.equal(first, third)
    bound = 32**-0.5
    assert 0.8 * bound < first.abs().max() <= bound
    fewer = build(train="lora", lora={"rank": 4, "targets": ["backbone.layers.0.mlp.up_proj.weight"]})
    assert torch.equal(fewer.state_dict()[name], first), "whatever else is adapted"


def test_building_leaves_random_numbers_alone():
    before = torch.get_rng_state()
    build(**LORA)
    settings(**LORA).form(SPEC)
    assert torch.equal(torch.get_rng_state(), before)


def test_released_names_can_be_read_from_those_with_adapters():
    released = dict(SmallNetwork(6).state_dict())
    found = {released_name(name) for name in build(**LORA).network.state_dict()} - {None}
    assert found == released.keys()
    assert released_name("a.b.base_layer.bias") == "a.b.bias"
    assert released_name("a.b.lora_B.default.weight") is None
    assert released_name("queries") == "queries"


def test_an_adapter_adds_its_product_scaled():
    policy = build(train="lora", lora={"rank": 2, "alpha": 6.0, "targets": ["head.weight"]})
    layer, x = policy.network.head, torch.randn(3, 16, generator=torch.Generator().manual_seed(0))
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    with torch.no_grad():
        b.copy_(torch.arange(2.0).view(1, 2) + 1.0)
        expected = layer.base_layer(x) + 3.0 * x @ a.T @ b.T
    torch.testing.assert_close(layer(x), expected)


def test_adapters_of_the_default_are_those_of_the_architecture_and_never_dead():
    network = SmallNetwork(6)
    assert len(adapted_layers(network, LoraSettings(), SMALL.parts, SMALL.dead)) == 28
    everything = adapted_layers(network, LoraSettings(), {}, SMALL.dead)
    assert {"embed", "head"} < set(everything)
    assert "spare" not in everything


# What is published.


@pytest.mark.parametrize("train_mode", MODES)
def test_only_what_is_trained_is_published(train_mode):
    policy = build(train=train_mode)
    assert published_state(policy).keys() == trained(policy)
    form = settings(train=train_mode).form(SPEC)
    assert form.published.keys() == trained(policy)
    assert form.trainable == sum(p.numel() for p in policy.parameters() if p.requires_grad)
    check_form(form, lambda seed, role: build(role, seed, train=train_mode), observations())


@pytest.mark.parametrize("train_mode", MODES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_published_part_makes_a_generator_of_the_same_seed_equal(train_mode, dtype):
    learner = build(train=train_mode, dtype=dtype)
    train(learner)
    acting = build("act", train=train_mode, dtype=dtype)
    obs, chosen = observations(), tokens()
    assert not torch.equal(logprob(acting, obs, chosen), logprob(learner, obs, chosen))
    own = acting.state_dict()
    with torch.no_grad():
        for name, tensor in published_state(learner).items():
            own[name].copy_(tensor)
    torch.testing.assert_close(logprob(acting, obs, chosen), logprob(learner, obs, chosen), atol=1e-6, rtol=0)


def test_a_part_that_lacks_what_is_trained_is_a_finding():
    form = settings(train="expert").form(SPEC)
    with pytest.raises(ContractViolation, match=r"form\(\).published lacks network.embed.weight, which is trained"):
        check_form(
            copy_with(form, settings(train="all").form(SPEC)), lambda seed, role: build(role, seed), observations()
        )


def copy_with(part, whole):
    """The form `whole`, but for what is published."""
    return type(whole)(**{name: getattr(whole, name) for name in whole.__slots__} | {"published": part.published})


@pytest.mark.parametrize("train_mode", MODES)
def test_the_contract_of_all_policies_holds(train_mode):
    checks = conformance.policy_checks(settings(train=train_mode), observations(), SPEC, imitates=True)
    failed = [finding for finding in run_checks(checks) if finding.state == "failed"]
    assert not failed, failed


def test_a_state_of_another_part_is_refused():
    expert, head = build(train="expert"), build(train="head")
    with pytest.raises(ValueError, match=r"do not fit .* network.expert.* \(and \d+ more\) is on one side only"):
        load_published(head, published_state(expert))
    before = copy.deepcopy(published_state(expert))
    train(expert)
    load_published(expert, before)
    assert all(torch.equal(x, before[name]) for name, x in published_state(expert).items())


# The reference policy.


@pytest.mark.parametrize("train_mode", MODES)
@pytest.mark.parametrize("warm", [False, True])
def test_the_reference_is_the_policy_as_it_was(train_mode, warm):
    policy = build(train=train_mode)
    if warm:
        train(policy, 1)
    before, state = copy.deepcopy(policy), policy.reference_state()
    obs, chosen = observations(), tokens()
    train(policy)
    after = logprob(policy, obs, chosen)
    next(p for p in policy.network.parameters() if p.requires_grad).requires_grad_(requires_grad=False)
    flags = trained(policy)
    with policy.as_reference(state):
        assert torch.equal(logprob(policy, obs, chosen), logprob(before, obs, chosen))
        assert not torch.equal(logprob(policy, obs, chosen), after)
    assert torch.equal(logprob(policy, obs, chosen), after)
    assert trained(policy) == flags
    policy.zero_grad()
    after.sum().backward()
    assert any(p.grad is not None for p in policy.network.parameters())


def test_the_reference_of_fresh_adapters_keeps_no_matrix():
    policy = build(**LORA)
    assert policy.reference_state().keys() == {"critic.weight", "critic.bias"}
    train(policy, 1)
    assert policy.reference_state().keys() == trained(policy), "adapters that were warm-started, never the base"


def test_an_error_within_the_reference_restores_the_policy():
    policy = build(train="expert")
    before, state = copy.deepcopy(policy.state_dict()), policy.reference_state()
    train(policy)
    after = copy.deepcopy(policy.state_dict())
    with pytest.raises(RuntimeError, match="stop"), policy.as_reference(state):
        raise RuntimeError("stop")
    assert all(torch.equal(x, after[name]) for name, x in policy.state_dict().items())
    assert not all(torch.equal(x, before[name]) for name, x in policy.state_dict().items())


# Gradient checkpointing.


@contextmanager
def counted(module) -> Iterator[list[int]]:
    calls: list[int] = []
    hook = module.register_forward_pre_hook(lambda *_: calls.append(1))
    yield calls
    hook.remove()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_are_equal_with_and_without_checkpointing(dtype):
    found = []
    for checkpointing in (False, True):
        policy = build(dtype=dtype, gradient_checkpointing=checkpointing)
        assert not policy.training
        with counted(policy.network.backbone.layers[0]) as calls:
            logprob(policy, observations(), tokens()).sum().backward()
        assert len(calls) == 1 + checkpointing
        found.append({name: p.grad for name, p in policy.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[1][name], gradient) for name, gradient in found[0].items())


def test_a_network_that_cannot_recompute_is_told_so():
    with pytest.raises(ValueError, match=r"policy.gradient_checkpointing = true: no part of the network has"):
        set_checkpointing(torch.nn.Linear(2, 2))


def test_preparing_works_without_memory():
    adaptation = Adaptation("lora", SMALL.parts, Precision(torch.bfloat16, float32=SMALL.float32), SMALL.dead)
    with torch.device("meta"):
        network = SmallNetwork(6)
    adaptation.prepare(network, "act")
    adaptation.finish(network, "act", 0)
    dtypes = {name: p.dtype for name, p in network.named_parameters()}
    assert dtypes["backbone.layers.0.mlp.up_proj.lora_A.default.weight"] is torch.bfloat16
    assert dtypes["head.weight"] is dtypes["backbone.norm.weight"] is dtypes["queries"] is torch.float32
    assert all(p.is_meta for p in network.parameters())
