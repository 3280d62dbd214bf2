"""What does not fit into memory is one sentence, before the policy is built."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple, NoReturn

import pytest
from tests.pipeline.runs import config

from polyrhythm.errors import StartError
from polyrhythm.pipeline.build import env_settings
from polyrhythm.pipeline.validation.check import check_form, examine, validate_run
from polyrhythm.plugins.memory_estimate import room
from polyrhythm.plugins.memory_estimate.plan import Machine, Planner
from polyrhythm.plugins.memory_estimate.room import check_room, container_limit, free_memory, warn_of_room
from polyrhythm.policies.categorical import CategoricalSettings
from polyrhythm.policies.form import PolicyForm
from polyrhythm.runtime.devices import devices_here
from polyrhythm.specs import EnvSpec


class HugeSettings(CategoricalSettings):
    """Declares a petabyte, and must never be built."""

    type: Literal["tests.plugins.memory_estimate.test_room:HugeSettings"] = (
        "tests.plugins.memory_estimate.test_room:HugeSettings"
    )

    def form(self, env_spec: EnvSpec) -> PolicyForm:
        return replace(super().form(env_spec), act_bytes=10**15, train_bytes=10**15, trainable_bytes=10**15)

    def build(self, *_: object, **__: object) -> NoReturn:
        raise AssertionError("it was built")


def test_a_policy_that_does_not_fit_is_not_built() -> None:
    run = config(policy={"type": "tests.plugins.memory_estimate.test_room:HugeSettings"})
    expected = (
        r"at least 5,000,000.0 GB of this machine's memory are wanted \(generator-0 1,.* GB, trainer 4,.* are free"
    )
    with pytest.raises(StartError, match=expected) as caught:
        validate_run(run)
    assert "\n" not in str(caught.value)
    assert "building" not in str(caught.value)
    failed = [found.finding for found in examine(run) if found.finding.state == "failed"]
    assert [finding.name for finding in failed] == ["memory"]


def test_of_stations_that_are_on_a_device_in_turn_the_largest_counts() -> None:
    run = config(placement={"sharing": "lease"})
    spec = env_settings(run).spec()
    form = check_form(run, spec)
    trainer = form.train_bytes + 3 * form.trainable_bytes
    check_room(run, spec, form, free=lambda _: trainer)
    with pytest.raises(StartError, match=r"wanted \(.*trainer 0.0 GB\)"):
        check_room(run, spec, form, free=lambda _: trainer - 1)


def test_a_row_for_more_devices_is_to_be_scaled_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "find_devices", lambda config: devices_here(1))
    run = config(devices=8)
    spec = env_settings(run).spec()
    with pytest.raises(StartError, match=r"; the row is for 8 devices: add devices=1$"):
        check_room(run, spec, check_form(run, spec), free=lambda _: 1)


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


def test_an_estimate_warns_and_names_settings_that_fit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = config(training={"mini_batch_samples": 100, "minibatch_steps": 0})
    spec = env_settings(run).spec()
    form = check_form(run, spec)
    assert warn_of_room(run, spec, form) == ""
    wanted = Planner(spec, Machine(devices_here(0), lambda _: 0)).plan(run).devices[0].total()
    told = warn_of_room(run, spec, form, free=lambda _: wanted - 1)
    assert told.startswith("policy.type = categorical: by estimate ")
    assert "; it would fit with training.micro_batch_steps=" in told
    assert warn_of_room(run, spec, form, free=lambda _: wanted) == ""
    check_room(run, spec, form, free=lambda _: wanted - 1)

    monkeypatch.setattr("psutil.virtual_memory", lambda: _Free(wanted - 1))
    assert validate_run(run).spec == spec
    assert "by estimate" in caplog.text
    notes = [found.finding for found in examine(run) if found.finding.state == "note"]
    assert any(note.name == "memory while it works" and "it would fit with" in note.fix for note in notes)


class _Free(NamedTuple):
    """What psutil tells of a machine with so little memory."""

    available: int


@pytest.mark.parametrize(
    ("names", "cached"),
    [
        (("memory.max", "memory.current", "memory.stat"), "inactive_file"),
        (("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"), "total_inactive_file"),
    ],
)
def test_cached_files_leave_room_in_a_container(tmp_path: Path, names: tuple[str, ...], cached: str) -> None:
    (tmp_path / "memory").mkdir()
    for name, content in zip(names, ("1000\n", "900\n", f"anon 200\n{cached} 700\n"), strict=True):
        (tmp_path / name).write_text(content)
    assert container_limit(tmp_path) == 800
    (tmp_path / names[0]).write_text("max\n")
    assert container_limit(tmp_path) is None


def test_free_memory_is_this_machines() -> None:
    assert 10**6 < free_memory() < 10**15
