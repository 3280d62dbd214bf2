"""The peers' workloads, how their answers are read, and that nothing of them stays; no peer is installed for it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
import psutil
import pytest
from tests.long import long

from polyrhythm.errors import ConfigError, RunHalted, StartError
from polyrhythm.specs.distributions import parse_distribution
from polyrhythm_bench.cases import throughput
from polyrhythm_bench.peers import groups, ours, process, run, turn, venvs
from polyrhythm_bench.peers.slowest_env import SlowestSettings
from polyrhythm_bench.peers.workload import Drift, Sleeping, SleepingEpisodes, ZeroCost
from polyrhythm_bench.workloads.drift_env import DriftSettings

ROOT = Path(__file__).parents[2]


def test_sleeping_episodes_sleep_by_the_law_and_end_in_time():
    work, slept = Sleeping(), []
    episodes = SleepingEpisodes(work, 0, slept.append)
    assert episodes.reset().shape == (work.observation_dim,)
    ends = [episodes.step()[1] for _ in range(work.episode_steps)]
    assert ends == [False] * (work.episode_steps - 1) + [True]
    for _ in range(20_000):
        episodes.step()
    assert fmean(slept) == pytest.approx(work.step_s, rel=0.03)
    assert stdev(np.log(slept).tolist()) == pytest.approx(work.sigma, rel=0.03)


def test_two_environments_do_not_sleep_alike():
    first, second = [], []
    for seed, slept in ((0, first), (1, second)):
        episodes = SleepingEpisodes(Sleeping(), seed, slept.append)
        for _ in range(5):
            episodes.step()
    assert first != second


def test_drift_is_the_arithmetic_of_our_own_environment():
    work = ZeroCost(rows=3)
    batch, drift = DriftSettings(type="", episode_steps=work.episode_steps).build(3), Drift(work)
    rows = list(range(3))
    batch.reset(rows, [0] * 3, [5, 6, 7])
    drift.reset()
    seen = {"state": np.zeros((3, work.observation_dim), np.float32)}
    batch.observe(rows, seen)
    drift.state = seen["state"].copy()
    actions = np.random.default_rng(0).uniform(-1, 1, (3, work.action_dim)).astype(np.float32)
    result = batch.step(rows, actions)
    state, reward, over = drift.step(actions)
    batch.observe(rows, seen)
    assert np.allclose(state, seen["state"], atol=1e-6)
    assert np.allclose(reward, result.reward, atol=1e-6)
    assert not over


def test_zero_cost_is_what_bench_throughput_trains_on():
    for rows in run.ROWS:
        work, training = ZeroCost(rows), throughput.config(rows, "inline").training
        env = throughput.config(rows, "inline").env
        assert work.episode_steps == env.episode_steps
        assert work.transitions == training.batch_size * env.episode_steps
        assert (work.minibatch, work.epochs) == (training.minibatch_steps, training.epochs)


def test_sleeping_is_the_scene_of_bench_overlap():
    scene = ours.as_scene(Sleeping(train_s=0.5))
    assert (scene.env_batches, scene.simulators, scene.generators) == (16, 2, 1)
    assert (scene.sim_latency, scene.infer_latency) == ("lognormal:10ms:0.8", "10ms+0.1ms")
    assert scene.train_latency == "constant:500.000ms"
    assert Sleeping().acting_s(16) == pytest.approx(0.0116)


def test_the_slowest_row_decides_and_rows_may_come_from_an_array():
    settings = SlowestSettings(type="", episode_steps=2, step_time="constant:0ms")
    batch = settings.build(4)
    batch.reset(np.arange(4), [0] * 4, [2**61 + row for row in range(4)])
    assert not batch.step(range(4), np.zeros((4, 7))).truncated.any()
    assert batch.step(range(4), np.zeros((4, 7))).truncated.all()


def test_the_plain_loop_steps_all_rows_at_once():
    config = ours.plain_config(Sleeping(train_s=0.5))
    assert (config.rollout.simulators, config.rollout.env_batches, config.rollout.rows) == (1, 1, 16)
    assert parse_distribution(config.env.step_time).mean == pytest.approx(0.010)


def test_the_meter_leaves_the_warm_up_out():
    meter = turn.Meter(transitions=100, warm_up=2, updates=3)
    for count in range(5):
        assert not meter.over, count
        meter.updated()
    assert meter.over
    assert meter.figures["transitions_per_s"] == pytest.approx(300 / meter.figures["seconds"])
    assert meter.figures["pss_mb"] > 1


def test_a_question_names_its_workload():
    assert turn.work_of({"workload": "sleeping", "settings": {"envs": 4}}) == Sleeping(envs=4)
    assert turn.work_of({"workload": "zero_cost", "settings": {"rows": 8}}) == ZeroCost(rows=8)


def _answer(rate: float, pss_mb: float) -> dict[str, object]:
    figures = {"transitions_per_s": rate, "cpu_s_per_million": 1000.0 / rate, "pss_mb": pss_mb}
    return {**figures, "settings": {"rows": 1}, "versions": {"python": "3"}}


def test_figures_are_medians_and_ratios_within_a_turn():
    answers = {
        "plain_loop": [_answer(100, 300), _answer(50, 300), _answer(100, 300)],
        "sb3": [_answer(90, 400), _answer(90, 400), _answer(95, 500)],
        "polyrhythm": [_answer(210, 390), _answer(100, 390), _answer(220, 390)],
    }
    found = run.summarise(answers, 250.0)
    full = found["modes"]["polyrhythm"]
    assert full["transitions_per_s"] == 210
    assert full["speedup"] == pytest.approx(2.1)
    assert full["fraction_of_limit"] == pytest.approx(0.84)
    assert full["rates_by_turn"] == [210, 100, 220]
    assert found["behind"] == []
    assert "fraction_of_limit" not in run.summarise(answers, None)["modes"]["sb3"]
    json.dumps(found)


@pytest.mark.parametrize(
    ("rate", "pss_mb", "behind"),
    [(80, 100, ["sb3: speed"]), (500, 450, ["sb3: memory"]), (90, 400, ["sb3: speed", "sb3: memory"])],
)
def test_ahead_means_in_speed_and_in_memory(rate, pss_mb, behind):
    answers = {"plain_loop": [_answer(100, 1)], "sb3": [_answer(90, 400)], "polyrhythm": [_answer(rate, pss_mb)]}
    assert run.summarise(answers, None)["behind"] == behind


def test_the_plain_loop_is_always_among_the_chosen():
    assert list(run.chosen(run.ZERO_COST_SYSTEMS, ["sb3"])) == ["plain_loop", "sb3"]
    with pytest.raises(ConfigError, match="rllib"):
        run.chosen(run.ZERO_COST_SYSTEMS, ["rllib"])


@pytest.mark.parametrize("peer", venvs.PEERS)
def test_requirements_are_all_pinned_and_share_our_torch(peer):
    text = venvs.requirements(peer)
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert all("==" in line for line in lines)
    assert venvs.torch_of(text) in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()


def test_environments_lie_in_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert venvs.default_folder() == tmp_path / "polyrhythm" / "peers"


def test_a_folder_that_is_no_environment_is_left_alone(tmp_path):
    own = tmp_path / "sb3" / "my thesis"
    own.mkdir(parents=True)
    with pytest.raises(StartError, match="is not a Python virtual environment"):
        venvs.python_of("sb3", tmp_path)
    assert own.is_dir()


def _in_group(group: int) -> list[int]:
    return [p.pid for p in psutil.process_iter() if p.status() != psutil.STATUS_ZOMBIE and os.getpgid(p.pid) == group]


def test_a_group_ends_with_all_its_members():
    script = "import subprocess, time; subprocess.Popen(['sleep', '60']); print(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, start_new_session=True) as popen:
        popen.stdout.readline()
        assert len(_in_group(popen.pid)) == 2
        groups.end(popen.pid)
        assert _in_group(popen.pid) == []


def test_resource_trackers_tidy_up_before_they_go():
    made = (
        "import multiprocessing as m, time; lock = m.get_context('spawn').Lock(); print(lock._semlock.name, flush=True)"
    )
    command = [sys.executable, "-c", f"{made}; time.sleep(60)"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as popen:
        semaphore = Path("/dev/shm") / ("sem." + popen.stdout.readline().decode().strip().removeprefix("/"))
        assert semaphore.exists()
        until = time.monotonic() + 30.0
        while not any(map(groups.tracks_resources, psutil.Process(popen.pid).children())):
            assert time.monotonic() < until, "its tracker has begun, but is not yet what it will be"
            time.sleep(0.01)
        groups.end(popen.pid)
    assert not semaphore.exists()


@long(3, "a turn of our own")
@pytest.mark.slow
def test_a_turn_of_ours_answers_and_leaves_nothing():
    settings = {"workload": "zero_cost", "settings": {"rows": 16}, "warm_up": 1, "updates": 1}
    found = process.ask(Path(sys.executable), "ours", {**settings, "choice": {"way": "inline"}}, 120.0)
    assert found["transitions_per_s"] > 0
    assert found["pss_mb"] > 50
    assert found["versions"]["torch"]


def test_a_turn_that_fails_says_why():
    with pytest.raises(RunHalted, match="KeyError"):
        process.ask(Path(sys.executable), "ours", {"workload": "sleeping"}, 120.0)


@long(4, "a turn that is ended after 3 s")
def test_a_turn_that_takes_too_long_is_ended():
    settings = {"workload": "sleeping", "settings": {"step_s": 60.0}, "warm_up": 1, "updates": 1}
    with pytest.raises(RunHalted, match="within 3 s"):
        process.ask(Path(sys.executable), "ours", {**settings, "choice": {"way": "plain"}}, 3.0)
    assert not [child for child in psutil.Process().children() if "peers.ours" in " ".join(child.cmdline())]


@long(2, "a turn whose owner ends")
def test_a_turn_ends_with_its_owner():
    question = {"workload": "sleeping", "settings": {"step_s": 60.0}, "warm_up": 1, "updates": 1}
    command = [sys.executable, "-m", "polyrhythm_bench.peers.ours"]
    words = [*command, json.dumps({**question, "choice": {"way": "plain"}})]
    with subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True) as popen:
        popen.stdin.close()
        assert popen.wait(60) == -signal.SIGKILL
        assert _in_group(popen.pid) == []


@pytest.mark.slow
@pytest.mark.parametrize(("module", "venv"), [("peer_sb3", "sb3"), ("peer_torchrl", "torchrl")])
def test_a_peer_answers(module, venv):
    python = venvs.default_folder() / venv / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{venv} is not installed; bench peers installs it in {venvs.default_folder()}")
    question = {"workload": "zero_cost", "settings": {"rows": 16}, "warm_up": 1, "updates": 1}
    assert process.ask(python, module, {**question, "choice": {"workers": 0}}, 150.0)["transitions_per_s"] > 0
