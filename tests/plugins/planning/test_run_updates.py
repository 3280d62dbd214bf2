"""A run's own measurements bring a profile up to date, and with it what is predicted."""

import json
from pathlib import Path

import pytest
from tests.plugins.planning.test_cluster import profile_of

from polyrhythm.cli.main import main
from polyrhythm.config.load import load_config, save_config
from polyrhythm.plugins.planning.placing import as_data, lines
from polyrhythm.plugins.planning.problem import problem_of
from polyrhythm.plugins.planning.profile import Profile, load_profile
from polyrhythm.runtime.devices import Devices

LOCKSTEP = [
    *("batching.type=lockstep", "rollout.sharding=whole", "rollout.segment_steps=0"),
    *("freshness.max_lag=0", "freshness.on_update=drain"),
]
#: What the run took, in seconds: a step and a pass of 16 rows, and an update; its episodes have 10 steps.
STEP, PASS, UPDATE, STEPS = 0.012, 0.02, 0.5, 10
VERSION = STEPS * (STEP + PASS) + UPDATE


@pytest.fixture
def before() -> Profile:
    """Of the same recipe on this machine, when all work was several times as quick and episodes twice as long."""
    return profile_of(load_config("cartpole", LOCKSTEP))


@pytest.fixture
def run(tmp_path: Path, before: Profile) -> Path:
    """The folder of a run, with numbers that follow from the above."""
    folder = tmp_path / "run"
    folder.mkdir()
    save_config(load_config("cartpole", LOCKSTEP), folder / "config.yaml")
    rate = 16 * STEPS / VERSION
    summary = {
        "machine": before.machine.model_dump(mode="json"),
        "transitions_per_s": rate,
        "seats": {name: {"device": "cpu"} for name in ("simulator-0", "generator-0", "trainer")},
        "weights": {"generator-0": {"apply": {"mb": 0.001, "ms": 1.0}}},
    }
    updates = []
    for step in range(20):
        line = {"step": step, "time_s": VERSION * (step + 1), "throughput/transitions": 16.0 * STEPS * (step + 1)}
        line |= {"time/env/step": STEP * STEPS, "time/rollout/forward": PASS * STEPS, "rollouter/batch_rows": 16.0}
        line |= {"time/actor/update": UPDATE, "time/actor/passes": UPDATE, "train/actor/optimizer_steps": 6.0}
        line |= {"env/sample_env_steps": STEPS, "env/sample_chunk_steps": STEPS, "env/episode_len": STEPS}
        updates.append(line | {"cpu/utilization": 0.9, "cpu/own": 0.4})
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in updates))
    return folder


def simulated(path: Path, capsys: pytest.CaptureFixture[str]) -> float:
    """Transitions per second of the simulated cluster."""
    capsys.readouterr()
    assert main(["simulate", "--profile", str(path), "--gpus", "0", "--json", "cartpole", *LOCKSTEP]) == 0
    return float(json.loads(capsys.readouterr().out)["throughput"]["transitions_per_s"])


def test_a_profile_that_a_run_updates_predicts_the_run(
    run: Path, before: Profile, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polyrhythm.plugins.planning.from_run.this_machine", lambda: before.machine)
    path, measured = tmp_path / "cartpole.json", 16 * STEPS / VERSION
    before.save(path)
    assert simulated(path, capsys) > 2 * measured
    assert main(["profile", str(run), "--update", str(path)]) == 0
    assert simulated(path, capsys) == pytest.approx(measured, rel=0.03)
    after = load_profile(path)
    assert after.simulated == pytest.approx(after.rate, rel=0.03), "which a plan says of its predictions"
    amounts = [[timing.amount for timing in one.stations["simulator"].works["step"].timings] for one in (before, after)]
    assert amounts[0] == amounts[1], "the amounts that a run does not have stay"
    assert after.others_cores == pytest.approx(0.5 * before.machine.cores)


def test_a_plan_repeats_what_limits_its_profile(before: Profile) -> None:
    config, devices = load_config("cartpole", LOCKSTEP), Devices((("", 0),))
    quiet = before.model_copy(update={"rate": 100.0, "simulated": 125.0})
    found = problem_of(quiet, config, devices).solve(first=1, most=1)
    for profile, others in ((quiet, False), (quiet.model_copy(update={"others_cores": 1.5}), True)):
        text = "\n".join(lines(config, profile, devices, found, None, [], "latency"))
        assert "simulated: the run in which the profile was measured has 1.25 times the 100 transitions/s" in text
        assert ("not alone: other processes used 1.5 of 4 cores" in text) is others
        assert ("not alone" in as_data(config, profile, found, None, [])["profile"]["remarks"]) is others
    unknown = problem_of(before, config, devices).solve(first=1, most=1)
    text = "\n".join(lines(config, before, devices, unknown, None, [], "latency"))
    assert "simulated: no run of all stations was measured with the profile, so its error is not known" in text
