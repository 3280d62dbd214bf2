"""What does not fit into memory is one sentence, before the policy is built."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, NoReturn

import pytest
from tests.pipeline.runs import config

from polyrhythm.errors import StartError
from polyrhythm.pipeline.build import env_settings
from polyrhythm.pipeline.validation.all_checks import examine
from polyrhythm.pipeline.validation.check import check_form, validate_run
from polyrhythm.pipeline.validation.room import check_room, free_memory
from polyrhythm.policies.categorical import CategoricalSettings
from polyrhythm.policies.form import PolicyForm
from polyrhythm.specs import EnvSpec


class HugeSettings(CategoricalSettings):
    """Declares a petabyte, and must never be built."""

    type: Literal["tests.pipeline.test_room:HugeSettings"] = "tests.pipeline.test_room:HugeSettings"

    def form(self, env_spec: EnvSpec) -> PolicyForm:
        return replace(super().form(env_spec), act_bytes=10**15, train_bytes=10**15, trainable_bytes=10**15)

    def build(self, *_: object, **__: object) -> NoReturn:
        raise AssertionError("it was built")


def test_a_policy_that_does_not_fit_is_not_built() -> None:
    run = config(policy={"type": "tests.pipeline.test_room:HugeSettings"})
    expected = (
        r"at least 5,000,000.0 GB of this machine's memory are wanted \(generator-0 1,.* GB, trainer 4,.* are free"
    )
    with pytest.raises(StartError, match=expected) as caught:
        validate_run(run)
    assert "\n" not in str(caught.value)
    assert "building" not in str(caught.value)
    failed = [found.finding for found in examine(run) if found.finding.state == "failed"]
    assert [finding.name for finding in failed] == ["memory"]


def test_need_and_room_are_compared_to_the_byte() -> None:
    run = config()
    spec = env_settings(run).spec()
    form = check_form(run, spec)
    wanted = form.act_bytes + form.train_bytes + 3 * form.trainable_bytes
    check_room(run, spec, form, free=lambda _: wanted)
    with pytest.raises(StartError):
        check_room(run, spec, form, free=lambda _: wanted - 1)
    check_room(run, spec, form, trainer=False, free=lambda _: max(form.act_bytes, form.train_bytes))
    still = config(training={"versions": 0})
    check_room(still, spec, form, free=lambda _: form.act_bytes + form.train_bytes)


def test_free_memory_is_this_machines() -> None:
    assert 10**6 < free_memory() < 10**15
