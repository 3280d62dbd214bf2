"""A loss that does not fit the lag of its samples is warned of, with the overrides that mend it; all others are not."""

from __future__ import annotations

import json
import logging
import shlex
from pathlib import Path

import pytest
from tests.pipeline.runs import config

from polyrhythm.cli.main import main
from polyrhythm.config.load import load_config
from polyrhythm.config.presets import OBJECTIVE_PRESETS
from polyrhythm.config.recipes import examples_folder, recipe_names
from polyrhythm.pipeline.validation.check import validate_run
from polyrhythm.plugins.trial.advice import staleness_findings

#: Objective -> the lag of the systems that have it: their own setting where they are asynchronous, else 0.
NATURAL_LAG = {
    "rlinf_libero": 0,
    "rlinf_libero_async": 2,  # staleness_threshold 1 or 2
    "rlinf_libero_grpo": 0,
    "rlinf_libero_grpo_async": 2,
    "rlinf_maniskill": 0,
    "verl_ppo": 0,
    "verl_grpo": 0,
    "areal": 2,  # max_head_offpolicyness
    "roll": 2,  # async_generation_ratio
    "trl_grpo": 0,
}
#: Of these the policy that acted is the one that is clipped around.
SYNCHRONOUS = ("rlinf_libero", "rlinf_libero_grpo", "rlinf_maniskill")
EXAMPLES = sorted(path for path in examples_folder().glob("*/*.yaml") if path.parent.name not in ("clusters", "ray"))


def notes(recipe: str | Path, *overrides: str) -> list[tuple[str, str]]:
    return [(found.detail, found.fix) for found in staleness_findings(load_config(recipe, overrides))]


@pytest.mark.parametrize("recipe", [*recipe_names(), *EXAMPLES], ids=lambda recipe: Path(recipe).stem)
def test_the_loss_of_every_recipe_fits_its_lag(recipe: str | Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if isinstance(recipe, Path):
        monkeypatch.syspath_prepend(recipe.parent)
    assert notes(recipe) == []


@pytest.mark.parametrize("name", OBJECTIVE_PRESETS)
def test_every_objective_fits_the_lag_of_its_system(name: str) -> None:
    fitting = [f"objective={name}", "groups.size=2", "rollout.segment_steps=0"]
    at = [f"freshness.max_lag={NATURAL_LAG[name]}", "freshness.on_update=drain"]
    assert notes("cartpole", *fitting, *at) == []
    stale = notes("cartpole", *fitting, "freshness.max_lag=1")
    several = notes("cartpole", *fitting, "freshness.max_lag=0", "freshness.sync_interval=4")
    assert len(stale) == len(several) == (name in SYNCHRONOUS)


GSPO = "algorithm.proximal=recompute algorithm.loss.ratio_to=proximal"
CASES = [
    (("algorithm.loss=ppo", "algorithm.proximal=behavior"), "algorithm.proximal=recompute"),
    (("objective=rlinf_libero", "rollout.segment_steps=0"), "objective=rlinf_libero_async"),
    (
        ("objective=rlinf_libero_grpo", "rollout.segment_steps=0", "groups.size=2"),
        "objective=rlinf_libero_grpo_async",
    ),
    (("algorithm.loss=clip_cov", "algorithm.proximal=behavior"), "algorithm.proximal=recompute"),
    (("algorithm.loss=gspo",), "algorithm.loss.ratio_to=proximal"),
    (("algorithm.loss={type: sapo, ratio_to: behavior}",), "algorithm.loss.ratio_to=proximal"),
    (("algorithm.loss=vanilla",), "algorithm.loss=decoupled_ppo"),
    (("freshness.max_lag=4",), "'algorithm.loss={type: ppo, clip_high: 0.28}'"),
    (
        ("freshness.max_lag=8", "algorithm.proximal=interpolate"),
        "'algorithm.loss={type: ppo, clip_high: 0.28}' algorithm.proximal=recompute",
    ),
    (("objective=rlinf_libero", "rollout.segment_steps=0", "algorithm.loss=gspo"), GSPO),
    (
        ("objective=rlinf_libero", "rollout.segment_steps=0", "algorithm.gamma=0.9"),
        "algorithm.proximal=recompute",
    ),
    (("algorithm.loss=vanilla", "freshness.max_lag=0"), "algorithm.loss=ppo"),
    (("algorithm.loss=vanilla", "freshness.max_lag=0", "training.epochs=1"), "algorithm.loss=ppo"),
]


@pytest.mark.parametrize(("overrides", "fix"), CASES)
@pytest.mark.parametrize("recipe", ["reach", "cartpole"])
def test_a_loss_that_does_not_fit_warns_with_its_remedy(recipe: str, overrides: tuple[str, ...], fix: str) -> None:
    overrides = ("training.minibatch_steps=8", *overrides)
    ((_, told),) = notes(recipe, *overrides)
    assert told == f"add {fix}"
    assert notes(recipe, *overrides, *shlex.split(fix)) == []


@pytest.mark.parametrize(
    "overrides",
    [
        ("algorithm.loss=ppo", "algorithm.proximal=behavior", "preset=lockstep"),
        ("algorithm.loss=vanilla", "preset=lockstep", "training.epochs=1", "training.minibatch_steps=0"),
        ("algorithm.loss=vanilla", "training.versions=0"),
        (
            "algorithm.loss={type: vanilla}",
            "algorithm.mismatch_cap=2.0",
            "training.epochs=1",
            "training.minibatch_steps=0",
        ),
        ("algorithm.loss=tis",),
        ("algorithm.loss={type: ppo, clip_high: 0.28}", "freshness.max_lag=8"),
    ],
)
def test_a_loss_that_fits_is_silent(overrides: tuple[str, ...]) -> None:
    assert notes("reach", *overrides) == []


def test_the_age_is_that_of_updates() -> None:
    ((told, _),) = notes("metaworld_pi0", "objective=rlinf_libero")
    assert told == (
        "algorithm.proximal = behavior: ppo clips around the policy that acted, which may be 7 updates old "
        "(freshness.max_lag = 1, sync_interval = 4)"
    )


def test_both_checks_and_the_start_of_training_warn(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    overrides = ["algorithm.loss=ppo", "algorithm.proximal=behavior", "launcher=inline"]
    for words in (["train", "cartpole", "--check"], ["check", "cartpole"]):
        assert main([*words, *overrides, "--json"]) == 0
        checks = json.loads(capsys.readouterr().out)["checks"]
        assert [check["fix"] for check in checks if check["name"] == "loss and lag"] == [
            "add algorithm.proximal=recompute"
        ]
    with caplog.at_level(logging.WARNING):
        validate_run(config(algorithm={"proximal": "behavior"}, freshness={"max_lag": 1, "on_update": "continue"}))
    told = [record.getMessage() for record in caplog.records if "clips around" in record.getMessage()]
    assert len(told) == 1
    assert told[0].endswith("; add algorithm.proximal=recompute")
