"""Defaults of training: those of the schema, those that a policy declares, and what a recipe sets."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest

from polyrhythm.config.base import Section
from polyrhythm.config.load import load_config, save_config
from polyrhythm.config.sections.learning import OptimizerSettings, TrainingSettings
from polyrhythm.errors import ConfigError

CARTPOLE = {"env": "gymnasium:CartPole-v1", "training": {"versions": 1, "mini_batch_samples": 2}}
PI0 = {"type": "pi0", "checkpoint": "folder"}


class DeclaringSettings(Section):
    """A policy that declares what it learns with."""

    training_defaults: ClassVar = {"epochs": 3, "optimizer": {"lr": 0.5, "value_lr": 0.25}}
    type: str = f"{__name__}:DeclaringSettings"


class MisspeltSettings(Section):
    """A policy that declares a setting that is not there."""

    training_defaults: ClassVar = {"epoch": 3}
    type: str = f"{__name__}:MisspeltSettings"


def training(policy: Any, *overrides: str) -> TrainingSettings:
    return load_config(CARTPOLE | {"policy": policy}, overrides).training


def test_a_policy_that_declares_nothing_has_many_optimizer_steps() -> None:
    found = training("categorical")
    assert (found.epochs, found.minibatch_steps, found.optimizer.lr) == (8, 64, 1e-3)


def test_what_is_declared_lies_over_the_schema_and_below_the_recipe() -> None:
    policy = DeclaringSettings()
    found = training(policy)
    assert (found.epochs, found.minibatch_steps) == (3, 64)
    assert found.optimizer == OptimizerSettings(lr=0.5, value_lr=0.25)
    found = training(policy, "training.optimizer.lr=0.1", "training.epochs=1")
    assert (found.epochs, found.optimizer.lr, found.optimizer.value_lr) == (1, 0.1, 0.25)
    assert training(policy, "training.optimizer.value_lr=null").optimizer.value_lr is None, "null is set"


@pytest.mark.parametrize("policy", [PI0, PI0 | {"type": "groot_n1d5"}, PI0 | {"type": "openvla_oft"}])
def test_released_weights_move_in_small_steps(policy: dict[str, str]) -> None:
    found = training(policy)
    assert (found.optimizer.lr, found.optimizer.value_lr, found.epochs) == (5e-6, 1e-4, 2)
    assert training(policy | {"checkpoint": ""}).optimizer.lr == 3e-4


def test_language_models_take_one_pass() -> None:
    assert training("causal_lm").epochs == training({"type": "causal_lm", "checkpoint": "folder"}).epochs == 1
    assert training({"type": "causal_lm", "checkpoint": "folder"}).optimizer.lr == 1e-6
    assert training({"type": "causal_lm", "checkpoint": "folder", "train": "lora"}).optimizer.lr == 1e-5


def test_a_value_that_nothing_trains_has_no_declared_rate() -> None:
    without = ("algorithm.advantage=grpo", "algorithm.value.coef=0.0", "groups.size=2")
    assert training(PI0, *without).optimizer.value_lr is None
    with pytest.raises(ConfigError, match="nothing trains the value"):
        training(PI0, *without, "training.optimizer.value_lr=1e-3")
    assert training(PI0, "objective=rlinf_libero_grpo", "groups.size=2").optimizer.value_lr is None


def test_the_saved_configuration_has_plain_numbers_that_stay(tmp_path: Path) -> None:
    config = load_config(CARTPOLE | {"policy": PI0})
    save_config(config, tmp_path / "config.yaml")
    assert "lr: 5.0e-06" in (tmp_path / "config.yaml").read_text()
    assert load_config(tmp_path / "config.yaml") == config
    other = load_config(tmp_path / "config.yaml", ["policy=categorical"])
    assert other.training == config.training, "a run keeps its numbers"


def test_a_misspelt_declaration_is_named() -> None:
    with pytest.raises(ConfigError, match=r"training\.epoch = 3: no such key; did you mean epochs"):
        training(MisspeltSettings())


def test_a_policy_that_cannot_be_read_is_named_once() -> None:
    with pytest.raises(ConfigError) as caught:
        training({"type": "categorical", "hiden": 3})
    assert len(caught.value.problems) == 1
    assert "policy.hiden" in str(caught.value)
