"""Objectives of other systems by name: what they set, and what lies over and under them."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyrhythm.config.load import load_config, save_config
from polyrhythm.config.presets import OBJECTIVE_PRESETS
from polyrhythm.config.schema import RunConfig
from polyrhythm.errors import ConfigError


def loaded(name: str, *more: str) -> RunConfig:
    return load_config("cartpole", [f"objective={name}", "groups.size=2", "rollout.segment_steps=0", *more])


@pytest.mark.parametrize("name", OBJECTIVE_PRESETS)
def test_the_resolved_configuration_has_the_name_and_the_settings(name: str, tmp_path: Path) -> None:
    config = loaded(name, "algorithm.value.clip=null", "algorithm.gamma=0.5")
    save_config(config, tmp_path / "config.yaml")
    assert f"\nobjective: {name}\n" in (tmp_path / "config.yaml").read_text()
    again = load_config(tmp_path / "config.yaml")
    assert again == config
    assert (again.objective, again.algorithm.gamma, again.algorithm.value.clip) == (name, 0.5, None)


def test_a_recipe_without_an_objective_keeps_its_section(tmp_path: Path) -> None:
    config = load_config("cartpole", ["algorithm.entropy_coef=0.3"])
    save_config(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == config
    assert config.objective == ""


@pytest.mark.parametrize(
    ("name", "changes", "fixes"),
    [
        ("rlinf_libero", [], "rollout.segment_steps=0"),
        ("roll", [], "rollout.segment_steps=0"),
        ("areal", [], "groups.size=2 rollout.segment_steps=0"),
        ("trl_grpo", ["rollout.segment_steps=0"], "groups.size=2"),
        ("verl_grpo", ["groups.size=2"], "rollout.segment_steps=0"),
        (
            "roll",
            ["training.critic_warmup_updates=2", "training.optimizer.value_lr=0.1"],
            "rollout.segment_steps=0 training.critic_warmup_updates=0 training.optimizer.value_lr=null",
        ),
    ],
)
def test_an_objective_that_a_recipe_cannot_have_says_all_that_it_needs(
    name: str, changes: list[str], fixes: str
) -> None:
    with pytest.raises(ConfigError, match=f"objective = '{name}': it needs ") as caught:
        load_config("cartpole", [f"objective={name}", *changes])
    assert f"; add {fixes}, or choose another objective" in str(caught.value)
    load_config("cartpole", [f"objective={name}", *changes, *fixes.split()])


def test_what_the_recipe_sets_itself_is_not_blamed_on_the_objective() -> None:
    with pytest.raises(ConfigError, match=r"groups.size = 1: rloo compares the samples of a group"):
        load_config("cartpole", ["objective=rlinf_libero", "algorithm.advantage=rloo", "rollout.segment_steps=0"])


@pytest.mark.parametrize("name", OBJECTIVE_PRESETS)
def test_every_setting_arrives(name: str) -> None:
    dumped = loaded(name).algorithm.model_dump(mode="json")
    for key, value in OBJECTIVE_PRESETS[name][1].items():
        wanted = {"type": value} if key == "advantage" and isinstance(value, str) else value
        assert dumped[key] == wanted or wanted.items() <= dumped[key].items()


def test_an_objective_takes_the_place_of_the_inherited_section() -> None:
    inherited = load_config("cartpole", ["algorithm.entropy_coef=0.3"]).algorithm
    assert inherited.entropy_coef == 0.3
    recipe = {
        "extends": "cartpole",
        "objective": "rlinf_libero",
        "algorithm": {"loss": {"clip_high": 0.28}},
        "rollout": {"segment_steps": 0},
    }
    algorithm = load_config(recipe).algorithm
    assert (algorithm.loss.clip_low, algorithm.loss.clip_high) == (0.2, 0.28), "what the recipe says wins"
    assert (algorithm.bootstrap, algorithm.aggregation, algorithm.value.aggregation) == (
        "never",
        "episode_mean",
        "policy",
    )
    over = load_config(recipe, ["objective=verl_ppo", "algorithm.gamma=0.9"]).algorithm
    assert (over.loss.clip_high, over.loss.dual_clip, over.gamma, over.gae_lambda) == (0.2, 3.0, 0.9, 1.0)


def test_an_unknown_objective_names_the_nearest() -> None:
    with pytest.raises(
        ConfigError, match=r"objective = rlinf_libera: did you mean rlinf_libero\? objectives are areal"
    ):
        load_config({"extends": "cartpole", "objective": "rlinf_libera"})
    with pytest.raises(ConfigError, match="objective = 3: objectives are"):
        load_config("cartpole", ["objective=3"])
