"""`placement.moves` in a real run: accepted, shown in metrics and summary; refused where nothing can be moved."""

from __future__ import annotations

import json
import logging
import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.long import long
from tests.pipeline.runs import LOCKSTEP
from tests.plugins.moves.scenes import TableSimulation
from tests.plugins.planning.profiles import RECIPE, profile, recipe

import polyrhythm as pr
from polyrhythm.cli.main import main
from polyrhythm.config.load import merge, save_config, validate
from polyrhythm.config.schema import RunConfig
from polyrhythm.errors import ConfigError, RunFolderError
from polyrhythm.pipeline.build import env_settings
from polyrhythm.pipeline.persistence.resume_rules import started
from polyrhythm.pipeline.placed import place, with_start
from polyrhythm.pipeline.validation.check import examine
from polyrhythm.plugins.moves.conductor import MovingConductor
from polyrhythm.plugins.moves.mover import MoveTolerance
from polyrhythm.plugins.moves.operation import Operation, starting
from polyrhythm.plugins.moves.rules import move_rules
from polyrhythm.plugins.moves.timing import MeasuredTimes
from polyrhythm.plugins.planning.profile import this_machine
from polyrhythm.scheduler.conductor import AnyConductor, Conductor
from polyrhythm.scheduler.settings import BatchLimits

ASYNCHRONOUS = {
    "freshness": {"max_lag": 2.0, "on_update": "continue"},
    "batching": {"type": "dynamic"},
    "rollout": {"rows": 4, "env_batches": 2, "generators": 2},
    "training": {"versions": 12, "order": "arrival"},
}
ONE = {"rollout": {"generators": 1}}
SHARED: dict[str, Any] = {"simulated_devices": 2, "generators": {"devices": "0,1"}, "trainer": {"devices": "1"}}


class HopefulConductor(MovingConductor):
    """Forecasts a thousand times as much for each other operation. However much other work disturbs the times of a run,
    it tries one as soon as it has counted versions, and no try ends early."""

    def __init__(self, outer: AnyConductor, inner: Conductor, _judge: object) -> None:
        def judge(times: MeasuredTimes, operation: Operation, _limits: BatchLimits) -> TableSimulation:
            rate = inner.settings.version_samples / times.version_s
            assert inner.settings.moves is not None
            here = operation == starting(inner.settings, inner.settings.moves)
            return TableSimulation(rate if here else 1000.0 * rate, operation.max_lag)

        super().__init__(outer, inner, judge)
        self.mover.tolerance = MoveTolerance(math.inf, math.inf, math.inf, math.inf)


@pytest.mark.parametrize(
    ("change", "metric", "before", "move"),
    [
        ({"placement": SHARED}, "stations/generators_off", 0.0, r"generator-\d off"),
        ({"training": {"micro_batch_steps": 8}} | ONE, "stations/micro_batch_steps", 8.0, "micro_batch_steps 8 → "),
        ({"placement": {"sharing": "lease"}} | ONE, "stations/together", 0.0, "sharing lease → share"),
    ],
)
def test_a_run_with_moves_trains_all_samples_and_shows_what_is_in_force(
    change: dict[str, Any],
    metric: str,
    before: float,
    move: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("polyrhythm.plugins.moves.conductor.MovingConductor", HopefulConductor)
    caplog.set_level(logging.INFO)
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(merge(merge(merge(LOCKSTEP, ASYNCHRONOUS), {"placement": {"moves": True}}), change)))
    assert main(["train", str(path), "--out", str(tmp_path / "run"), "training.versions=14"]) == 0
    assert re.search(rf"placement\.moves: tried .*{move}.*max_lag 2 → 1; max_lag", caplog.text)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["moves"][0]["outcome"] == "begun"
    assert re.match(move, summary["moves"][0]["move"])
    assert all(one["outcome"] in ("begun", "kept", "undone") for one in summary["moves"])
    assert summary["ledger"]["trained"] == 140
    assert summary["ledger"]["dropped"] == {}
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    updates = [line for line in lines if "staleness/max_lag" in line]
    assert len(updates) == 14
    assert all(0.5 <= line["staleness/max_lag"] <= 2.0 for line in updates)
    assert updates[0][metric] == before
    assert {line[metric] for line in updates} > {before}


def test_sizes_of_micro_batches_are_those_of_an_optimizer_step_that_fit() -> None:
    """Up to the 64 chunk steps of an optimizer step; none if the recipe does not cut it."""
    for own, sizes in ((16, (4, 8, 16, 32, 64)), (48, (12, 24, 48, 64)), (1, (1, 2, 4, 8)), (0, ())):
        change = {"placement": {"moves": True}, "training": {"micro_batch_steps": own}}
        config = validate(merge(merge(LOCKSTEP, ASYNCHRONOUS), change))
        spec = env_settings(config).spec()
        rules = move_rules(config, place(config), spec)
        assert rules is not None
        assert (rules.micro_batches, rules.micro_batch) == (sizes, own)


def test_what_does_not_fit_into_memory_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    leased = {"placement": {"sharing": "lease", "moves": True}, "training": {"micro_batch_steps": 16}}
    config = validate(merge(merge(LOCKSTEP, ASYNCHRONOUS), leased))
    spec = env_settings(config).spec()
    for free, together in ((10**12, True), (1, False)):
        monkeypatch.setattr("polyrhythm.plugins.moves.rules.free_memory", lambda _, free=free: free)
        rules = move_rules(config, place(config), spec)
        assert rules is not None
        assert (rules.together, max(rules.micro_batches)) == (together, 64 if together else 16)


def test_every_pair_of_micro_batch_and_sharing_that_may_be_reached_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for any size in turn and for sharing with the recipe's, but not for both at once."""

    def fits(_: object, settings: dict[str, object]) -> bool:
        return len(settings) < 2 or settings["training.micro_batch_steps"] == 32

    monkeypatch.setattr("polyrhythm.plugins.moves.rules._Memory.fits", fits)
    leased = {"placement": {"sharing": "lease", "moves": True}, "training": {"micro_batch_steps": 16}}
    config = validate(merge(merge(LOCKSTEP, ASYNCHRONOUS), leased))
    rules = move_rules(config, place(config), env_settings(config).spec())
    assert rules is not None
    assert (rules.together, rules.micro_batches) == (True, (4, 8, 16, 32))


def test_no_micro_batch_is_larger_than_an_optimizer_step() -> None:
    """Without mini-batches of steps it has all chunk steps of its samples."""
    for own in (16, 96):
        training = {"micro_batch_steps": own, "minibatch_steps": 0, "mini_batch_samples": 2}
        change = {"placement": {"moves": True}, "training": training}
        config = validate(merge(merge(LOCKSTEP, ASYNCHRONOUS), change))
        spec = env_settings(config).spec()
        rules = move_rules(config, place(config), spec)
        assert rules is not None
        most = config.training.mini_batch_samples * spec.max_steps
        assert [size for size in rules.micro_batches if size > most] == [own] * (own > most)


@pytest.mark.parametrize(
    ("free", "state", "words"),
    [
        (
            10**12,
            "ok",
            [
                "training.micro_batch_steps 4 to 64, placement.sharing lease or share",
                "generators off",
                "freshness.max_lag 0.5 to 2",
            ],
        ),
        (1, "note", ["training.micro_batch_steps above 16 (up to 64)", "placement.sharing = share"]),
    ],
)
def test_a_check_shows_which_moves_fit_and_none_is_no_error(
    free: int, state: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    leased = {"placement": {"sharing": "lease", "moves": True}, "training": {"micro_batch_steps": 16}}
    config = validate(merge(merge(LOCKSTEP, ASYNCHRONOUS), leased))
    monkeypatch.setattr("polyrhythm.plugins.moves.rules.free_memory", lambda _: free)
    (found,) = (finding for _, finding in examine(config, "machine") if finding.name == "moves")
    assert found.state == state
    assert all(word in found.detail for word in words)
    placed = config.placement.model_copy(update={"moves": False})
    still = config.model_copy(update={"placement": placed})
    assert not [finding for _, finding in examine(still, "machine") if finding.name == "moves"]


def test_auto_starts_with_the_recipe_if_there_is_no_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.INFO)
    config = recipe("placement=auto")
    found = with_start(config)
    assert found.placement.start == "recipe"
    assert found.placement.moves
    assert found.rollout == config.rollout
    assert "no latency.profile.json" in caplog.text
    assert "polyrhythm profile latency" in caplog.text


def _measured_here(config: RunConfig, **changes: Any) -> None:
    machine = this_machine().model_copy(update=changes.pop("machine", {}))
    profile(config).model_copy(update={"machine": machine, **changes}).save(Path("latency.profile.json"))


def test_auto_starts_with_the_plan_of_the_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.INFO)
    config = recipe("placement=auto", "placement.simulated_devices=1")
    _measured_here(config)
    found = with_start(config)
    assert found.placement.moves
    assert "by latency.profile.json, measured 2026-11-28" in caplog.text
    changed = caplog.text.split("changed: ")[1].split()
    assert "placement.generators.devices=0" in changed
    assert found.placement.generators.devices == "0"
    assert with_start(found) == found, "a run that is resumed keeps its settings"


def test_auto_refuses_a_profile_of_another_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    profile(recipe("env.step_time=constant:1ms")).save(Path("latency.profile.json"))
    with pytest.raises(ConfigError, match="polyrhythm profile"):
        with_start(recipe("placement=auto", "env.step_time=constant:9ms"))


@pytest.mark.parametrize(
    "command",
    [
        "train RECIPE --check",
        pytest.param("check RECIPE", marks=long(4, "polyrhythm check")),
        pytest.param("plan RECIPE --memory", marks=long(9, "polyrhythm plan")),
        pytest.param("plan RECIPE --memory --devices 1", marks=long(7, "polyrhythm plan for a machine")),
    ],
)
def test_what_is_checked_is_what_would_start(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.INFO)
    words = ["latency", *RECIPE, "placement=auto", "placement.simulated_devices=1"]
    _measured_here(recipe(*words[-2:]))
    more = ["--device-memory", "80"] if "--devices" in command else []
    own, *options = command.replace("RECIPE", "@").split("@")
    main([own.strip(), *words, *options[0].split(), *more])
    assert "changed: " in caplog.text
    assert "placement.generators.devices=0" in caplog.text


def test_the_checked_run_of_the_api_is_what_would_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = recipe("placement=auto", "placement.simulated_devices=1")
    _measured_here(config)
    assert pr.check(config).config.placement.generators.devices == "0"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"machine": {"cores": 977}}, "977 cores"),
        ({"machine": {"device": "another"}}, "another"),
        ({"settings": ""}, "assumed"),
    ],
)
def test_auto_refuses_a_profile_that_was_not_measured_here(
    changes: dict[str, Any], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = recipe("placement=auto", "placement.simulated_devices=1")
    _measured_here(config, **changes)
    with pytest.raises(ConfigError, match=f"{told}.*polyrhythm profile"):
        with_start(config)


@pytest.mark.parametrize("planned_first", [False, True])
def test_a_resumed_run_keeps_the_settings_it_began_with(
    planned_first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the profile appears after its beginning, or is gone then; other settings must still be the same."""
    monkeypatch.chdir(tmp_path)
    config = recipe("placement=auto", "placement.simulated_devices=1", "resume=auto", "rollout.rows=1")
    run = tmp_path / "run"
    if planned_first:
        _measured_here(config)
    begun, none = started(config, run)
    assert none is None
    assert (begun.rollout != config.rollout) == planned_first
    run.mkdir()
    save_config(begun, run / "config.yaml")
    if planned_first:
        Path("latency.profile.json").unlink()
    else:
        _measured_here(config)
    assert started(config, run) == (begun, run)
    with pytest.raises(RunFolderError, match="seed is 77 here"):
        started(config.model_copy(update={"seed": 77}), run)


def test_auto_is_short_for_moves() -> None:
    assert validate(merge(LOCKSTEP, {"placement": "auto"})).placement.moves
    merged = merge(merge(LOCKSTEP, {"placement": "auto"}), {"placement": {"trainer": {"threads": 2}}})
    assert validate(merged).placement.moves
    assert validate(merged).placement.trainer.threads == 2


def test_devices_of_stations_are_those_of_their_seats() -> None:
    config = validate(merge(merge(LOCKSTEP, ASYNCHRONOUS), {"placement": SHARED | {"moves": True}}))
    rules = move_rules(config, place(config))
    assert rules is not None
    assert rules.devices == {"generator-0": (0,), "generator-1": (1,), "trainer": (1,)}
    assert move_rules(config, place(config, trainer=False)) is None


def test_a_station_that_leases_the_host_shares_it() -> None:
    leased = {"placement": {"sharing": "lease", "moves": True}}
    config = validate(merge(merge(LOCKSTEP, ASYNCHRONOUS), leased))
    rules = move_rules(config, place(config))
    assert rules is not None
    assert rules.devices["generator-1"] == rules.devices["trainer"]


@pytest.mark.parametrize("weights", ["second_copy", "own_generator"])
def test_a_generator_for_evaluation_is_none_that_can_be_switched_off(weights: str) -> None:
    """The only generator for training, or the one that also evaluates, stays on."""
    generators = {"second_copy": 2, "own_generator": 1}[weights]
    change = {
        "rollout": {"generators": generators},
        "evaluation": {"every": 2, "episodes": 4, "weights": weights},
        "placement": {"simulated_devices": 2, "generators": {"devices": "0,1"}, "trainer": {"devices": "0"}},
    }
    config = validate(merge(merge(LOCKSTEP, {"placement": {"moves": True}}), change))
    with pytest.raises(ConfigError, match="nothing can be moved"):
        move_rules(config, place(config))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, "nothing can be moved"),  # lag 0, one generator
        ({"rollout": {"generators": 2}}, "nothing can be moved"),
        ({"placement": {"simulated_devices": 1, "generators": {"devices": 0}, "trainer": {"devices": 0}}}, "moved"),
    ],
)
def test_what_could_move_nothing_is_refused(change: dict[str, Any], words: str) -> None:
    config = validate(merge(merge(LOCKSTEP, {"placement": {"moves": True}}), change))
    with pytest.raises(ConfigError, match=words):
        move_rules(config, place(config))
