"""Traits: declared by our policies, read once of those that declare none, and checked."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace

import pytest
import torch
from tests.plugins.trial.test_policy_contract import CASES
from torch import nn

from polyrhythm.cli.main import main
from polyrhythm.conformance import ContractViolation
from polyrhythm.plugins.language.causal_lm.policy import CausalLmSettings
from polyrhythm.plugins.trial.policy_calls import check_traits
from polyrhythm.policies.gaussian import GaussianPolicy
from polyrhythm.policies.traits import PolicyTraits, SettingsTraits, plain_traits, policy_traits, settings_traits

CASE = CASES["gaussian"]


class Declares(nn.Module):
    traits = PolicyTraits(value=False)

    def precompute(self, obs):
        return {}


class Own(GaussianPolicy):
    has_value = False
    values_late = True

    def published(self):
        return {"log_std": self.state_dict()["log_std"]}

    def blocks(self):
        return [self.actor]

    def precompute(self, obs):
        return {}


@dataclass
class OwnSettings:
    preload = ("json",)

    def outline(self, env_spec, *, role):
        raise NotImplementedError


def test_an_own_policy_that_declares_nothing_has_the_traits_of_its_methods():
    traits = policy_traits(Own(CASE.settings, CASE.spec))
    names = ("critic", "values_late", "publishes_part", "precomputes", "names_blocks")
    assert plain_traits(traits) == {"value": False, **dict.fromkeys(names, True)}
    assert settings_traits(OwnSettings()) == SettingsTraits(preload=("json",), outlines=True)


def test_declared_traits_are_taken_as_they_are():
    assert policy_traits(Declares()) == PolicyTraits(value=False)


def test_a_form_has_the_traits_of_the_policy_that_it_describes():
    for name in ("gaussian", "pi0"):
        case = CASES[name]
        assert case.settings.form(case.spec).traits == policy_traits(case.build()) != PolicyTraits()


@pytest.mark.parametrize(
    ("traits", "said"),
    [
        ({"precomputes": True}, r"declare precompute\(\), which it lacks"),
        ({"counts_tokens": True}, r"declare row_tokens\(\), which it lacks"),
        ({"value": False}, "value is not 0, and the policy's traits.value is False"),
        ({"values_late": True}, "value is not 0, and the policy's traits.values_late is True"),
    ],
)
def test_a_trait_that_is_not_true_is_named(traits, said):
    policy = CASE.build()
    policy.traits = replace(policy_traits(policy), **traits)
    with pytest.raises(ContractViolation, match=said):
        check_traits(policy.traits, "form().traits", policy, CASE.observations())


def test_traits_that_differ_from_the_policys_are_named():
    with pytest.raises(ContractViolation, match=r"form\(\)\.traits\.critic is False, the policy's is True"):
        check_traits(PolicyTraits(), "form().traits", CASE.build(), CASE.observations())


def test_a_precomputation_that_changes_log_probs_is_named():
    class Changes(GaussianPolicy):
        def precompute(self, obs):
            return {"offset": torch.ones(len(obs["hand"]))}

        def evaluate(self, obs, forward_inputs):
            found = super().evaluate(obs, forward_inputs)
            return found._replace(logprob=found.logprob + ("offset" in obs))

    policy = Changes(CASE.settings, CASE.spec)
    with pytest.raises(ContractViolation, match=r"with precompute\(\) differs from without by up to 1"):
        check_traits(policy_traits(policy), "form().traits", policy, CASE.observations())


@pytest.mark.parametrize("declared", [(), None])
def test_an_observation_that_is_read_beside_precomputed_arrays_is_declared(declared):
    class Offset(GaussianPolicy):
        def precompute(self, obs):
            return {"offset": torch.ones(len(obs["hand"]))}

    policy = Offset(CASE.settings, CASE.spec)
    policy.traits = replace(policy_traits(policy), beside_precomputed=declared)
    with pytest.raises(ContractViolation, match="KeyError") if declared == () else nullcontext():
        check_traits(policy.traits, "form().traits", policy, CASE.observations())


def test_an_engine_names_the_settings_that_restrict_a_run():
    server = {"type": "openai", "url": "http://host:1", "weights": {"load": ""}}
    engine = settings_traits(CausalLmSettings(engine=server)).engine
    assert plain_traits(engine) == {
        "streams_only": "policy.engine.type = openai",
        "single": "policy.engine.url = http://host:1",
        "fixed_weights": "policy.engine.weights.load is empty",
    }
    assert plain_traits(settings_traits(CausalLmSettings(refresh_cache=True)).engine) == {"fresh_cache": True}


def test_policies_prints_the_traits_of_a_type(capsys):
    assert main(["policies", "pi0"]) == 0
    said = capsys.readouterr().out
    assert "\ntraits\n" in said
    assert "  policy.precomputes: true\n" in said
