"""Settings of every policy: strictly typed, finite, closed, and documented field by field."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from polyrhythm.policies.base import PolicySettings
from polyrhythm.policies.categorical import CategoricalSettings
from polyrhythm.policies.gaussian import GaussianSettings
from polyrhythm.policies.tiny_vla import TinyVlaSettings
from polyrhythm.policies.tiny_vla_bins import BinsSettings

ALL = (CategoricalSettings, GaussianSettings, TinyVlaSettings)


@pytest.mark.parametrize("settings", ALL)
def test_settings_are_what_the_contract_says(settings):
    assert isinstance(settings(), PolicySettings)
    assert all(field.description for field in settings.model_fields.values())
    for wrong in ({"layers": "2"}, {"layers": 2.0}, {"layers": True}, {"no_such": 1}):
        with pytest.raises(ValidationError):
            settings(**wrong)


@pytest.mark.parametrize(("settings", "field"), [(GaussianSettings, "init_log_std"), (BinsSettings, "label_sigma")])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_are_finite(settings, field, value):
    with pytest.raises(ValidationError):
        settings(**{field: value})
