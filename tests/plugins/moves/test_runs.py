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
from tests.pipeline.runs import LOCKSTEP
from tests.plugins.moves.scenes import TableSimulation

from polyrhythm.cli.main import main
from polyrhythm.config.load import merge, validate
from polyrhythm.errors import ConfigError
from polyrhythm.pipeline.placed import place
from polyrhythm.plugins.moves import mover
from polyrhythm.plugins.moves.conductor import MovingConductor
from polyrhythm.plugins.moves.operation import Operation
from polyrhythm.plugins.moves.rules import move_rules
from polyrhythm.plugins.moves.timing import MeasuredTimes
from polyrhythm.scheduler.settings import BatchLimits, MoveRules, SchedulerSettings

ASYNCHRONOUS = {
    "freshness": {"max_lag": 2.0, "on_update": "continue"},
    "batching": {"type": "dynamic"},
    "rollout": {"rows": 4, "env_batches": 2, "generators": 2},
    "training": {"versions": 12, "order": "arrival"},
}
SHARED: dict[str, Any] = {"simulated_devices": 2, "generators": {"devices": "0,1"}, "trainer": {"devices": "1"}}


class HopefulJudge:
    """Forecasts the measured rate for all generators at the setting's α, and twice that for all else."""

    def __init__(self, settings: SchedulerSettings, _rules: MoveRules) -> None:
        self._settings = settings

    def __call__(self, times: MeasuredTimes, operation: Operation, _limits: BatchLimits) -> TableSimulation:
        rate = self._settings.version_samples / times.version_s
        here = operation == Operation((), self._settings.max_lag)
        return TableSimulation(rate if here else 2.0 * rate, operation.max_lag)


def test_a_run_with_moves_shows_what_is_in_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """However much other work disturbs the times, something is tried."""
    monkeypatch.setattr(MovingConductor, "judge", f"{__name__}:HopefulJudge")
    monkeypatch.setattr(mover, "DRIFT", math.inf)
    caplog.set_level(logging.INFO)
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(merge(merge(LOCKSTEP, ASYNCHRONOUS), {"placement": SHARED | {"moves": True}})))
    assert main(["train", str(path), "--out", str(tmp_path / "run")]) == 0
    assert re.search(r"placement\.moves: tried .*generator-\d off; max_lag 2 → 1; max_lag", caplog.text)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["moves"][0]["outcome"] == "begun"
    assert all(move["outcome"] in ("begun", "kept", "undone", "reset") for move in summary["moves"])
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    updates = [line for line in lines if "staleness/max_lag" in line]
    assert len(updates) == 12
    assert all(
        0.5 <= line["staleness/max_lag"] <= 2.0 and line["stations/generators_off"] in (0, 1) for line in updates
    )


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
