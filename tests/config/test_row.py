"""`devices=N` scales a row to N devices, in every number that the devices have together and in no other."""

from __future__ import annotations

import logging
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from polyrhythm.config.load import load_config, save_config
from polyrhythm.config.presets import scale
from polyrhythm.config.schema import RunConfig
from polyrhythm.errors import ConfigError
from polyrhythm.pipeline.persistence.resume_rules import config_to_resume

#: Row -> environments, samples of a version, chunk steps of an optimizer step, and of an episode: tables 2 to 5 of
#: RL-VLA³, and RLinf's file for OpenVLA-OFT.
ROWS = {
    "metaworld_pi0": (512, 4 * 512, 2048, 100 // 5),
    "libero_groot": (256, 4 * 256, 1024, 480 // 5),
    "robocasa_pi0": (160, 4 * 160, 1024, 320 // 10),
    "maniskill_pi05": (3264, 4 * 3264, 2048, 80 // 5),
    "libero_oft": (64, 16 * 64, 16384, 512 // 8),
}


def numbers(config: RunConfig) -> tuple[int, int, int]:
    rollout, training = config.rollout, config.training
    environments = rollout.simulators * rollout.env_batches * rollout.rows
    return environments, training.batch_size * config.freshness.sync_interval, training.minibatch_steps


def epoch(config: RunConfig, chunk_steps: int) -> int:
    """Optimizer steps of one pass over a version's samples."""
    steps = config.training.batch_size * chunk_steps
    return config.freshness.sync_interval * -(-steps // config.training.minibatch_steps)


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("devices", [8, 1, 4, 16])
def test_a_share_of_a_row_is_that_share_in_every_number(name: str, devices: int) -> None:
    *whole, chunk_steps = ROWS[name]
    row, scaled = load_config(name), load_config(name, [f"devices={devices}"])
    assert [*numbers(row)] == whole
    assert [*numbers(scaled)] == [number * Fraction(devices, 8) for number in whole]
    assert epoch(scaled, chunk_steps) == epoch(row, chunk_steps)
    both = (scaled.rollout.simulators + scaled.rollout.generators) / (row.rollout.simulators + row.rollout.generators)
    assert both == devices / 8 or (name, devices) == ("maniskill_pi05", 1), "one device simulates and generates"
    kept = ("policy", "env", "algorithm", "freshness", "evaluation", "batching")
    assert all(getattr(scaled, section) == getattr(row, section) for section in kept)
    assert scaled.training.optimizer == row.training.optimizer
    assert scaled.training.micro_batch_steps == row.training.micro_batch_steps


def test_a_divided_row_on_one_device_is_colocated() -> None:
    one = load_config("maniskill_pi05", ["devices=1"])
    assert (one.placement.preset, one.rollout.simulators, one.rollout.generators) == ("colocated", 1, 1)
    assert (one.rollout.env_batches, one.rollout.rows) == (2, 204)


def test_scaling_is_logged_and_overrides_apply_after_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    config = load_config("metaworld_pi0", ["training.mini_batch_samples=32", "devices=1", "seed=3"])
    assert (config.training.mini_batch_samples, config.training.minibatch_steps, config.seed) == (32, 256, 3)
    (message,) = [record.getMessage() for record in caplog.records]
    assert message == (
        "devices = 1 of a row for 8: rollout.simulators 8 → 1, rollout.generators 8 → 1, training.mini_batch_samples "
        "512 → 64, training.minibatch_steps 2048 → 256"
    )
    assert load_config("metaworld_pi0", ["devices=2", "devices=1"]) == load_config("metaworld_pi0", ["devices=1"])
    caplog.clear()
    load_config("metaworld_pi0", ["devices=8"])
    assert caplog.records == []


def test_a_recipe_may_extend_a_row_for_other_devices() -> None:
    mine = {"extends": "metaworld_pi0", "devices": 2, "rollout": {"rows": 8}}
    assert numbers(load_config(mine)) == (64, 512, 512)
    assert numbers(load_config(mine, ["devices=1"])) == (32, 256, 256)
    assert load_config({"extends": "cartpole", "devices": 2}).devices == 2, "a row of its own"


def test_a_run_goes_on_with_its_numbers(tmp_path: Path) -> None:
    config = load_config("metaworld_pi0", ["devices=1", "policy.checkpoint=''", "policy.tokenizer=''"])
    save_config(config, tmp_path / "config.yaml")
    again = config_to_resume(tmp_path, [])
    assert again.model_copy(update={"resume": "never"}) == config
    assert load_config(tmp_path / "config.yaml", ["devices=8"]).training.mini_batch_samples == 512


SMALL: dict[str, Any] = {
    "devices": 4,
    "rollout": {"simulators": 4, "generators": 4, "rows": 2},
    "training": {"mini_batch_samples": 8, "minibatch_steps": 64, "micro_batch_steps": 32},
}


@pytest.mark.parametrize(
    ("change", "devices", "problem"),
    [
        ({}, 3, None),
        ({"training": {"mini_batch_samples": 6}}, 1, "training.mini_batch_samples 6 cannot .*; use 2, 4, 8$"),
        (
            {"rollout": {"simulators": 3, "generators": 2}},
            2,
            "rollout.simulators 3 cannot be scaled to 2 of .*; use 4, 8$",
        ),
        (
            {"rollout": {"simulators": 3, "generators": 1}, "placement": "hybrid"},
            2,
            "rollout.simulators 3, rollout.generators 1 cannot be scaled",
        ),
        ({"groups": {"size": 8}}, 1, r"groups.size 8 \(an update would have 2 samples\) cannot be scaled"),
        ({"placement": {"trainer": {"devices": "0-3"}}}, 1, "placement.trainer.devices 0-3 cannot .*; use 4$"),
        ({"placement": {"trainer": {"ranks": 2}}}, 1, "placement.trainer.ranks 2 cannot be scaled"),
    ],
)
def test_numbers_that_do_not_divide_are_named_together(
    change: dict[str, Any], devices: int, problem: str | None
) -> None:
    row = {key: {**SMALL[key], **change.get(key, {})} if isinstance(SMALL[key], dict) else SMALL[key] for key in SMALL}
    row |= {key: value for key, value in change.items() if key not in SMALL}
    if problem is None:
        assert scale(row, devices)[0]["rollout"]["simulators"] == devices
        return
    with pytest.raises(ConfigError, match=f"devices = {devices}: {problem}"):
        scale(row, devices)


def test_a_micro_batch_is_at_most_its_optimizer_step() -> None:
    assert scale(SMALL, 1)[0]["training"] == {"mini_batch_samples": 2, "minibatch_steps": 16, "micro_batch_steps": 16}


@pytest.mark.parametrize(
    ("recipe", "overrides", "problem"),
    [
        ("metaworld_pi0", ["devices=0"], "devices = 0: it must be at least 1"),
        ("metaworld_pi0", ["devices=one"], "devices = 'one': it must be a whole number"),
        ("maniskill_pi05", ["devices=3"], "rollout.simulators 6, rollout.generators 2 cannot .*; use 1, 4, 8, 16$"),
        ("cartpole", ["devices=1"], "devices = 1: this recipe is not a row"),
        ("metaworld_pi0_tiny", ["devices=1"], "devices = 1: this recipe is not a row"),
    ],
)
def test_devices_that_cannot_be_are_refused(recipe: str, overrides: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load_config(recipe, overrides)
