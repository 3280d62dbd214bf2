"""Settings of every policy: strictly typed, finite, closed, and documented field by field."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from polyrhythm.config.registry import NestedRefusal, resolve
from polyrhythm.policies.base import as_settings
from polyrhythm.policies.categorical import CategoricalSettings
from polyrhythm.policies.flow_matching import FlowCps, FlowNoise, FlowSde, Ode
from polyrhythm.policies.gaussian import GaussianSettings
from polyrhythm.policies.tiny_vla.heads import BinsSettings, FlowMatchingSettings
from polyrhythm.policies.tiny_vla.policy import TinyVlaSettings

HEADS = (BinsSettings, FlowMatchingSettings, Ode, FlowSde, FlowCps, FlowNoise)
ALL = (CategoricalSettings, GaussianSettings, TinyVlaSettings)


@pytest.mark.parametrize("settings", ALL)
def test_settings_are_what_the_contract_says(settings):
    assert as_settings(settings()) == settings()
    assert all(field.description for field in settings.model_fields.values())
    for wrong in ({"layers": "2"}, {"layers": 2.0}, {"layers": True}, {"no_such": 1}):
        with pytest.raises(ValidationError):
            settings(**wrong)


@pytest.mark.parametrize(("settings", "field"), [(GaussianSettings, "init_log_std"), (BinsSettings, "label_sigma")])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_are_finite(settings, field, value):
    with pytest.raises(ValidationError):
        settings(**{field: value})


@pytest.mark.parametrize("settings", HEADS)
def test_settings_of_heads_are_closed_and_documented(settings):
    assert all(field.description for field in settings.model_fields.values())
    with pytest.raises(ValidationError):
        settings(no_such=1)


def test_heads_and_methods_go_by_type_and_have_defaults():
    assert TinyVlaSettings().head == BinsSettings()
    assert TinyVlaSettings.model_validate({"head": {"bins": 16}}).head == BinsSettings(bins=16)
    flow = TinyVlaSettings.model_validate({"head": {"type": "flow_matching", "steps": 3}}).head
    assert flow == FlowMatchingSettings(steps=3, method=FlowNoise())
    noisy = {"type": "flow_noise", "max_std": 0.4, "logprob": "mean"}
    flow = TinyVlaSettings.model_validate({"head": {"type": "flow_matching", "method": noisy}}).head
    assert flow.method == FlowNoise(max_std=0.4, logprob="mean")
    again = TinyVlaSettings.model_validate(TinyVlaSettings(head=flow).model_dump(mode="json"))
    assert again.head == flow
    with pytest.raises(ValidationError, match="bins"):
        TinyVlaSettings.model_validate({"head": {"type": "tokens"}})


@pytest.mark.parametrize("section", [{"type": "pi0"}, {"type": "tiny_vla", "head": {"type": "flow_matching"}}])
def test_flow_cps_needs_a_step_before_the_last(section):
    inner = section.get("head", section)
    for steps in (2, 1):
        inner.update(method="flow_cps", steps=steps)
        if steps > 1:
            assert resolve("policy", section)
    with pytest.raises(NestedRefusal, match=r"steps = 1: the last step of flow_cps has no noise.* set it to 2 or more"):
        resolve("policy", section)


def test_the_bounds_of_learned_noise_are_in_order():
    with pytest.raises(ValidationError, match="is not below max_std"):
        FlowNoise(min_std=1.0)
