import json
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.long import long
from tests.plugins.planning.test_cluster import profile_of

from polyrhythm.cli.main import main
from polyrhythm.config.load import load_config
from polyrhythm.errors import ConfigError, RunFolderError
from polyrhythm.plugins.planning.cluster import cluster_settings
from polyrhythm.plugins.planning.from_run import from_run
from polyrhythm.plugins.planning.profile import Profile, load_profile
from polyrhythm.plugins.planning.timing import Measurements
from polyrhythm.plugins.planning.together import measure_together


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A profile of cartpole, measured for six seconds."""
    path = tmp_path_factory.mktemp("profile") / "cartpole.json"
    assert main(["profile", "cartpole", "--minutes", "0.1", "--out", str(path)]) == 0
    return path


def test_every_station_is_measured_by_amount(measured: Path) -> None:
    profile = load_profile(measured)
    amounts = {
        kind: {name: [timing.amount for timing in work.timings] for name, work in station.works.items()}
        for kind, station in profile.stations.items()
    }
    assert amounts["simulator"]["step"] == [1, 2, 4, 8, 16]
    for kind, name in (("generator", "pass"), ("trainer", "micro_batch")):
        found = amounts[kind][name]
        assert found[:5] == [1, 2, 4, 8, 16][: len(found)]
        if len(found) < 5:  # where others use the machine, and then it is said
            assert any(sentence.startswith(kind) and "the time was over" in sentence for sentence in profile.left_out)
    assert amounts["generator"]["apply"] == amounts["trainer"]["stage"] == [profile.weights]
    assert {"optimizer_step", "prepare"} <= amounts["trainer"].keys()
    assert 5 < profile.episodes.mean <= 500


def test_what_was_not_measured_is_said(measured: Path) -> None:
    left_out = " ".join(load_profile(measured).left_out)
    assert "stations together: the time is too short" in left_out
    assert "trainer: leaving and entering a device" in left_out


def test_work_that_sleeps_takes_no_core(monkeypatch: pytest.MonkeyPatch) -> None:
    # The processes that earlier tests keep are this one's children, too.
    monkeypatch.setattr(psutil.Process, "children", lambda _: [])
    asleep, awake = Measurements(cold=False), Measurements(cold=False)
    for _ in range(3):
        with asleep.time("step", 1):
            time.sleep(0.01)
        with awake.time("step", 1):
            sum(range(300_000))
    assert asleep.awake < 0.5 < awake.awake
    config = load_config("latency")
    profile = profile_of(config)
    simulator = profile.stations["simulator"].model_copy(update={"awake": asleep.awake})
    sleeping = profile.model_copy(update={"stations": {**profile.stations, "simulator": simulator}})
    shares = [cluster_settings(one, config).simulators[0].occupies for one in (profile, sleeping)]
    assert shares[1] == pytest.approx(asleep.awake * shares[0])


def test_work_that_a_child_may_do_is_awake() -> None:
    """Only a child that the work has started: others, such as a server of earlier runs, do none of it."""
    for earlier in (True, False):
        found = None if earlier else Measurements(cold=False)
        with subprocess.Popen(["sleep", "60"]) as child:
            found = found or Measurements(cold=False)
            with found.time("step", 1):
                time.sleep(0.01)
            assert (found.awake < 0.5) is earlier
            child.kill()


def test_a_recipe_is_simulated_with_its_profile(measured: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rates = []
    for rows in (4, 16):
        assert main(["simulate", "--profile", str(measured), "cartpole", f"rollout.rows={rows}", "--json"]) == 0
        summary = json.loads(capsys.readouterr().out)
        rates.append(summary["throughput"]["transitions_per_s"])
        assert summary["gpus"] == 0
    assert 0 < rates[0] < rates[1]


def test_the_file_is_read_as_it_was_written(measured: Path, tmp_path: Path) -> None:
    profile = load_profile(measured)
    profile.save(tmp_path / "again.json")
    assert load_profile(tmp_path / "again.json") == profile


def _changed(data: dict[str, Any], **changes: object) -> dict[str, Any]:
    return {**data, **changes}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda data: _changed(data, format=2), "format"),
        (lambda data: _changed(data, extra=1), "extra"),
        (lambda data: {key: value for key, value in data.items() if key != "machine"}, "machine"),
        (lambda data: _changed(data, episodes={**data["episodes"], "mean": 0}), "episodes.mean"),
        (lambda data: [data], "file"),
    ],
)
def test_a_damaged_profile_is_refused(measured: Path, tmp_path: Path, change: Any, problem: str) -> None:
    path = tmp_path / "damaged.json"
    path.write_text(json.dumps(change(json.loads(measured.read_text()))))
    with pytest.raises(ConfigError, match=rf"damaged.json': {problem}: .*polyrhythm profile RECIPE"):
        load_profile(path)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["cartpole", "--minutes", "0"], "--minutes = 0: not a time"),
        (["cartpole", "--minutes", "-1"], "--minutes = -1: not a time"),
        (["cartpole", "--minutes", "nan"], "--minutes = nan: not a time"),
        (["cartpole", "--minutes", "601"], "--minutes = 601: not a time"),
        (["cartpole", "--out", "nowhere/profile.json"], "its folder is not there"),
        (["cartpole", "--update", "profile.json"], "name the run's folder"),
        (["cartpol"], "cartpole"),
    ],
)
def test_wrong_arguments_of_profile(arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", *arguments]) != 0
    assert problem in capsys.readouterr().err


def test_a_file_that_is_no_profile_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "notes.json"
    path.write_text("{}")
    assert main(["profile", "cartpole", "--out", str(path)]) != 0
    assert "would be overwritten" in capsys.readouterr().err
    assert path.read_text() == "{}"


# ------------------------------------------------------------ a run's own measurements


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a short run in one process."""
    out = tmp_path_factory.mktemp("runs")
    settings = ["launcher=inline", "training.versions=4", "evaluation.episodes=0", "tracking=[]", f"out_dir={out}"]
    assert main(["train", "cartpole", *settings]) == 0
    return next(out.glob("*/*/config.yaml")).parent


def test_a_run_leaves_a_profile(run: Path) -> None:
    profile = load_profile(run / "profile.json")
    assert {"step"} <= profile.stations["simulator"].works.keys()
    assert {"pass", "apply"} <= profile.stations["generator"].works.keys()
    assert {"prepare", "micro_batch", "optimizer_step", "stage"} <= profile.stations["trainer"].works.keys()
    assert profile.rate > 0


def test_a_run_sets_the_level_of_a_profile(measured: Path, run: Path, tmp_path: Path) -> None:
    path = tmp_path / "updated.json"
    path.write_bytes(measured.read_bytes())
    assert main(["profile", str(run), "--update", str(path)]) == 0
    before, after, seen = load_profile(measured), load_profile(path), from_run(run)
    point = seen.stations["generator"].works["pass"].timings[0]
    own, old = (each.stations["generator"].works["pass"] for each in (after, before))
    assert own.seconds(point.amount) == pytest.approx(point.median_s)
    assert [timing.amount for timing in own.timings] == [timing.amount for timing in old.timings]
    ratio = own.timings[0].p99_s / old.timings[0].p99_s
    assert own.timings[-1].p99_s / old.timings[-1].p99_s == pytest.approx(ratio)
    assert after.episodes == seen.episodes


def test_a_profile_of_another_machine_is_refused(
    measured: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = load_profile(measured)
    for change, differing in (
        ({"cores": profile.machine.cores + 1}, "cores"),
        ({"device": "another", "devices": 1}, "device 'another', here 'none'"),
    ):
        other: Profile = profile.model_copy(update={"machine": profile.machine.model_copy(update=change)})
        with pytest.raises(ConfigError, match=rf"{differing}.*measure here with `polyrhythm profile cartpole`"):
            from_run(run, other)
        other.save(tmp_path / "other.json")
        command = ["simulate", "--profile", str(tmp_path / "other.json"), "cartpole"]
        assert main(command) != 0
        assert "measure here with `polyrhythm profile cartpole`" in capsys.readouterr().err
        assert main([*command, "--gpus", "0"]) == 0  # for another machine


def test_a_folder_without_a_run_has_no_profile(run: Path, tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="not a run's folder"):
        from_run(tmp_path)
    (tmp_path / "config.yaml").write_bytes((run / "config.yaml").read_bytes())
    with pytest.raises(RunFolderError, match=r"no summary\.json"):
        from_run(tmp_path)
    (tmp_path / "summary.json").write_text("{}")
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    with pytest.raises(RunFolderError, match="trained nothing"):
        from_run(tmp_path)


@long(8, "a run in which stations are measured together")
def test_a_short_run_shows_what_stations_take_together(measured: Path) -> None:
    config = load_config("cartpole", ["launcher=inline"])
    profile = measure_together(config, load_profile(measured), 0.0)
    for kind in ("simulator", "generator"):
        handover = profile.stations[kind].works.get("handover")
        if handover is None:  # where others use the machine, and then it is said
            assert any(sentence.startswith(f"{kind}: its handover") for sentence in profile.left_out)
        else:
            assert 0 <= handover.seconds(0) < 1.0
