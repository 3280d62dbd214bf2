"""`bench envs`: small real measurements of CartPole, the page, resets ahead, and what is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tests.long import long

from polyrhythm.cli.main import main
from polyrhythm.config import catalog
from polyrhythm.config.registry import resolve
from polyrhythm.envs.gymnasium_env import GymnasiumSettings
from polyrhythm.specs import ActionSpec
from polyrhythm_bench.cases import envs, envs_page, envs_worker

PENDULUM = {"type": "gymnasium", "id": "Pendulum-v1"}


@long(4, "bench envs, short")
def test_environments_that_are_installed(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(envs, "CELL_S", 0.1)
    monkeypatch.setattr(envs, "GRID", ((1, 1, 1), (2, 2, 2)))
    monkeypatch.setattr(
        catalog, "need", lambda package: catalog.Need(package, package not in ("mani_skill", "libero"), "")
    )
    names = "cartpole,cartpole_vector,maniskill,libero"
    assert main(["bench", "envs", "--only", names, "--steps", "60", "--repeats", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found["modes"]) == list(found["parts"]) == ["cartpole", "cartpole_vector"]
    maniskill, libero = found["left_out"]
    assert maniskill.startswith("maniskill: the package mani_skill is not installed here; run: ")
    assert maniskill.endswith("envs setup maniskill, with --pythons maniskill=maniskill here")
    for part in ("package libero is not", "polyrhythm[libero]", "--pythons libero=libero", "~/.cache/libero/assets"):
        assert part in libero
    for name, mode in found["modes"].items():
        times = found["parts"][name]["modes"]
        assert set(times) == {"step", "observe", "reset", "bare", "bare_reset"}
        assert all(0 < of["p50"] <= of["p95"] <= of["p99"] for of in times.values())
        assert mode["ratio"] > 0
        assert mode["within_limit"] == (mode["ratio"] <= 1.05 or mode["over_us"] <= 100)
        assert mode["mb"] > 10
        assert all(cell["steps_per_s"] > 0 for cell in found["parts"][name]["steps_per_s"])
    text = " ".join(envs_page.write(found, tmp_path)[0].read_text().split())
    assert "| cartpole_vector |" in text
    assert "1 × 1 × 1 | 2 × 2 × 2" in text


def test_resets_ahead_are_the_same_episodes_and_take_less_of_the_slot():
    found = envs_worker.reset_ahead(resolve("env", PENDULUM), rows=2, think_s=0.0, repeats=1)
    assert set(found["modes"]) == {"in place", "ahead"}
    for mode in found["modes"].values():
        assert 0 < mode["share"] < 1
    assert "Resets ahead" in envs_page.ahead_text("pendulum", found)


def test_episodes_that_begin_differently_are_noticed(monkeypatch):
    def build(self, rows):
        batch = builds(self, rows)
        batch.observe = lambda rows, out: np.copyto(out["state"], np.random.default_rng().random(out["state"].shape))
        return batch

    builds = GymnasiumSettings.build
    monkeypatch.setattr(GymnasiumSettings, "build", build)
    with pytest.raises(ValueError, match="begin differently ahead"):
        envs_worker.reset_ahead(resolve("env", PENDULUM), rows=1, think_s=0.0, repeats=1)


def test_random_actions_lie_within_the_bounds():
    rng = np.random.default_rng(0)
    low, high = (-1.0, 2.0), (1.0, 5.0)
    actions = envs_worker.random_actions(ActionSpec("continuous", 2, low=low, high=high), 200, rng)
    assert actions.dtype == np.float32
    assert (actions >= low).all()
    assert (actions <= high).all()
    chosen = envs_worker.random_actions(ActionSpec("discrete", 1, choices=3), 200, rng)
    assert set(chosen[:, 0]) == {0, 1, 2}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--only", "cartpool"], "--only cartpool: it is not one of cartpole, cartpole_vector"),
        (["--pythons", "robosuit=x"], "--pythons robosuit: it is not one of gymnasium"),
    ],
)
def test_wrong_names_are_refused(words, said, capsys):
    assert main(["bench", "envs", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_python_that_is_not_there_is_left_out():
    found = envs.run(["robosuite"], pythons={"robosuite": "/nowhere/python"})
    assert found["modes"] == {}
    assert "/nowhere/python" in found["left_out"][0]
