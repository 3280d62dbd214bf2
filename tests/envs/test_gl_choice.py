"""The GL backend is chosen by what several processes draw at once, and once per run on each host."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest
from tests.long import long
from tests.pipeline.runs import config

from polyrhythm.config.registry import resolve
from polyrhythm.env_warnings import forget_warnings
from polyrhythm.envs.gl_speed import Drawn, draw, start_load
from polyrhythm.envs.mujoco import (
    GL,
    RUN_FOLDER,
    Drawing,
    RenderingUnavailable,
    better_backend,
    choose_gl_backend,
    drawing,
    fastest,
    offer_gl_backend,
    processes_at_once,
    set_drawing,
)
from polyrhythm.errors import ConfigError
from polyrhythm.imports import same_imports
from polyrhythm.pipeline.array_specs import env_batch_infos, step_settings
from polyrhythm.pipeline.placed import find_drawing_device
from polyrhythm.pipeline.validation.check import check_env_installed
from polyrhythm.plugins.simulators.metaworld.env import MetaWorldSettings
from polyrhythm.runtime.factories import StationContext
from polyrhythm.runtime.memory.arena import ArenaLayout, in_memory
from polyrhythm.runtime.memory.weights import InlineWeights
from polyrhythm.runtime.messages import Channels
from polyrhythm.specs import WeightsLayout
from polyrhythm.stations.simulator.station import SimulatorFactory

#: A MuJoCo whose frames take time by a clock of its own: `serial` draws one frame of all processes after another, as
#: one graphics unit of a GPU does, so they share a clock; `parallel` draws in each process for itself.
MUJOCO = """
import fcntl, os, time
from pathlib import Path
from types import SimpleNamespace
import numpy as np

kind, folder = os.environ["MUJOCO_GL"], Path(__file__).parent
with (folder / "started").open("a") as file:
    file.write(kind + "\\n")
if kind == "hangs":
    time.sleep(600)

class MjModel:
    @staticmethod
    def from_xml_string(xml):
        return SimpleNamespace(vis=SimpleNamespace(quality=SimpleNamespace()))

MjData = mj_forward = lambda *_: None

class Renderer:
    def __init__(self, *_):
        self._frames = 0

    def update_scene(self, data):
        if kind == "refuses":
            raise RuntimeError("no context")

    def render(self):
        self._frames += 1
        if kind == "crashes" and self._frames == 3:
            os.abort()
        if kind == "serial":
            with (folder / "unit").open("a") as unit:
                fcntl.flock(unit, fcntl.LOCK_EX)
                unit.write(".")
        if kind in {"serial", "parallel"}:
            time.monotonic = self._now
        return np.arange(2) * (kind != "blank")

    def _now(self):
        if kind == "serial":
            return 0.02 * (folder / "unit").stat().st_size
        return 0.04 * self._frames

    def close(self):
        pass
"""


@pytest.fixture
def waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the probe's processes find `MUJOCO`; its file `started` has a line for each of them."""
    folder = tmp_path / "fake"
    folder.mkdir()
    (folder / "mujoco.py").write_text(MUJOCO)
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    monkeypatch.delenv(RUN_FOLDER, raising=False)
    return folder


def test_what_draws_one_after_another_is_chosen_for_one_simulator_and_not_for_several(
    waiting: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)), raising=False)
    with caplog.at_level("INFO"):
        with set_drawing(Drawing(1)):
            assert fastest(("parallel", "serial")) == "serial"
        assert (waiting / "started").read_text().split() == ["parallel", "serial"]
        assert fastest(("serial", "parallel")) == "parallel"
    assert (waiting / "started").read_text().split()[2:] == ["serial"] * 4 + ["parallel"] * 4
    said = r"rendering by parallel: serial (\d+) frames/s, parallel (\d+) frames/s \(processes that drew at once: 4\)"
    found = re.search(said, caplog.text)
    assert found, caplog.text
    serial, parallel = map(float, found.groups())
    assert serial == pytest.approx(50, abs=5), "four at 20 ms in turn"
    assert parallel == pytest.approx(100, abs=10), "four at 40 ms side by side"


@pytest.mark.parametrize("kind", ["refuses", "blank", "crashes", "hangs"])
def test_a_backend_with_which_a_process_fails_draws_nothing(
    kind: str, waiting: Path, caplog: pytest.LogCaptureFixture
) -> None:
    began = time.monotonic()
    assert draw(kind, 2, limit_s=0.5 if kind == "hangs" else 3.0).frames_per_s == 0
    assert time.monotonic() - began < 20
    if kind == "refuses":
        with caplog.at_level("INFO"), set_drawing(Drawing(1)):
            assert fastest((kind, "parallel")) == "parallel"
            assert fastest((kind, "blank")) == kind
        assert "rendering by parallel: refuses draws nothing, parallel " in caplog.text


@pytest.mark.usefixtures("waiting")
def test_where_the_next_process_cannot_start_the_others_are_ended() -> None:
    code = (
        "import os, resource\n"
        "from polyrhythm.envs.gl_speed import draw\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))\n"
        "print(draw('parallel', 16).frames_per_s)\n"
        "try: print(os.waitpid(-1, os.WNOHANG))\n"
        "except ChildProcessError: print('none left')"
    )
    variables = os.environ | same_imports()
    done = subprocess.run(
        [sys.executable, "-c", code], env=variables, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "0.0\nnone left\n", done.stderr


@pytest.mark.sim
@pytest.mark.usefixtures("simulator")
def test_three_processes_draw_with_the_backend_of_this_machine() -> None:
    assert draw(os.environ["MUJOCO_GL"], 3).frames_per_s > 0
    assert draw("nonsense", 2).frames_per_s == 0


def test_as_many_processes_draw_as_there_are_cores_and_simulators(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, simulators, processes in ((4, 0, 4), (4, 3, 3), (4, 9, 4), (64, 0, 16), (64, 40, 16), (1, 3, 1)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)), raising=False)
        with set_drawing(Drawing(simulators)):
            assert processes_at_once() == processes
    assert drawing() == Drawing()


# ------------------------------------------------------------ beside a device that computes


@pytest.mark.parametrize(
    ("rates", "kept", "better"),
    [
        ({"osmesa": 100, "egl": 900}, None, "egl"),
        ({"osmesa": 900, "egl": 100}, None, "osmesa"),
        ({"osmesa": 100, "egl": 900}, 0.95, "egl"),
        ({"osmesa": 100, "egl": 900}, 0.9, "egl"),
        ({"osmesa": 100, "egl": 900}, 0.89, "osmesa"),
        ({"osmesa": 100, "egl": 900}, 0.0, "osmesa"),
        ({"osmesa": 900, "egl": 100}, 1.0, "osmesa"),
        ({"osmesa": 0, "egl": 100}, 0.1, "egl"),
        ({"osmesa": 100, "egl": 0}, 1.0, "osmesa"),
        ({"osmesa": 0, "egl": 0}, 0.5, "osmesa"),
        ({"egl": 0, "osmesa": 0}, None, "egl"),
    ],
)
def test_beside_a_device_that_computes_the_cores_draw_unless_egl_is_faster_and_spares_it(
    rates: dict[str, float], kept: float | None, better: str
) -> None:
    assert better_backend(rates, kept) == better


def test_a_load_counts_its_products_in_a_window() -> None:
    with start_load("cpu") as load:
        assert load is not None
        now = time.monotonic()
        assert load.products_per_s(now, now + 0.2) > 0
        assert load.products_per_s(now - 20, now - 19) == 0, "before it began"
        assert 0 < load.share_kept(Drawn(1.0, now, now + 0.2)) <= 1
    assert load.products_per_s(now, now + 0.2) == 0, "it has ended"


@long(4, "a process that imports torch")
@pytest.mark.usefixtures("waiting")
def test_without_a_load_to_try_the_cores_draw(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"), set_drawing(Drawing(1, "cuda:99")):
        assert fastest(("parallel", "egl")) == "parallel"
    assert "cuda:99 computes for the run, and no load could be tried there" in caplog.text


@pytest.mark.parametrize(
    ("changes", "variables", "found"),
    [
        ({}, {}, "cuda:0"),
        ({"launcher": "inline"}, {}, ""),
        ({"batching": {"type": "lockstep"}, "freshness": {"max_lag": 0, "on_update": "drain"}}, {}, ""),
        ({"batching": {"type": "lockstep"}}, {}, "cuda:0"),
        ({"placement": {"generators": {"devices": "1"}}}, {}, ""),
        ({"placement": {"generators": {"devices": "1"}}}, {"MUJOCO_EGL_DEVICE_ID": "1"}, "cuda:1"),
        ({"placement": {"generators": {"devices": "0"}}}, {"CUDA_VISIBLE_DEVICES": "2,0"}, ""),
        ({"placement": {"generators": {"devices": "1"}}}, {"CUDA_VISIBLE_DEVICES": "2,0"}, "cuda:1"),
        ({"placement": {"generators": {"devices": "0"}, "simulators": {"devices": "1"}}}, {}, ""),
        ({"placement": {"trainer": {"devices": "1"}, "simulators": {"devices": "0-1"}}}, {}, "cuda:1"),
        ({"placement": {"trainer": {"devices": "7"}}}, {}, ""),
        ({"placement": {}}, {}, ""),
    ],
)
def test_a_device_is_shared_by_what_draws_and_computes_at_once(
    changes: dict[str, Any], variables: dict[str, str], found: str
) -> None:
    usual: dict[str, Any] = {"placement": {"generators": {"devices": "0"}, "trainer": {"devices": "0"}}}
    usual |= {"launcher": "local", "rollout": {"simulators": 2}, "batching": {"type": "dynamic"}}
    usual["freshness"] = {"max_lag": 1, "on_update": "continue"}
    run = config(**(usual | changes))
    assert find_drawing_device(run, variables, devices=2) == found


@pytest.mark.parametrize(("gl", "other"), [("osmesa", "egl"), ("egl", "osmesa"), ("egl", "glfw")])
def test_a_named_backend_is_taken_and_the_variable_overrides_it(
    gl: GL, other: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("polyrhythm.envs.mujoco.is_loadable", lambda backend: backend != "egl")
    monkeypatch.delitem(sys.modules, "mujoco", raising=False)
    monkeypatch.setenv("MUJOCO_GL", "")
    for choose in (choose_gl_backend, offer_gl_backend):
        monkeypatch.delenv("MUJOCO_GL", raising=False)
        if gl == "egl":
            with pytest.raises(RenderingUnavailable, match=r"env\.gl = egl, but its library is missing; run: apt-get"):
                choose(gl)
        else:
            choose(gl)
            assert os.environ["MUJOCO_GL"] == gl
    monkeypatch.setattr("polyrhythm.envs.mujoco.is_loadable", lambda _: True)
    monkeypatch.setenv("MUJOCO_GL", other)
    for choose in (choose_gl_backend, offer_gl_backend):
        forget_warnings()
        caplog.clear()
        monkeypatch.setenv("MUJOCO_GL", other)
        choose(gl)
        assert os.environ["MUJOCO_GL"] == other
        assert f"MUJOCO_GL={other} is set, so env.gl = {gl} has no effect" in caplog.text
        monkeypatch.delenv("MUJOCO_GL")
        with monkeypatch.context() as changes:
            changes.setitem(sys.modules, "mujoco", types.ModuleType("mujoco"))
            with pytest.raises(RenderingUnavailable, match=f"before the GL backend was chosen; set MUJOCO_GL={gl} in"):
                choose(gl)


# ------------------------------------------------------------ once per run


def test_simulators_of_a_host_share_one_measurement(waiting: Path, tmp_path: Path) -> None:
    code = (
        "import logging; logging.basicConfig(level=20);"
        "from polyrhythm.envs.mujoco import *\n"
        "with set_drawing(Drawing(1)): print(fastest(('serial', 'parallel')))"
    )
    variables = os.environ | same_imports() | {RUN_FOLDER: str(tmp_path)}
    simulators = [
        subprocess.Popen(
            [sys.executable, "-c", code], env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    said = [simulator.communicate(timeout=60) for simulator in simulators]
    assert [out for out, _ in said] == ["serial\n"] * 3, said
    assert sorted((waiting / "started").read_text().split()) == ["parallel", "serial"]
    assert "".join(errors for _, errors in said).count("rendering by") == 1


def test_a_simulator_whose_run_folder_is_gone_measures_for_itself(
    waiting: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUN_FOLDER, str(tmp_path / "gone"))
    with set_drawing(Drawing(1)):
        assert fastest(("refuses", "serial")) == "serial"


@pytest.mark.sim
@pytest.mark.usefixtures("simulator")
def test_what_an_environment_in_another_python_chooses_is_chosen_for_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a GPU, as far as its count tells."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("MUJOCO_GL", "")
    monkeypatch.delenv("MUJOCO_GL")
    section = MetaWorldSettings(tasks=("reach-v3",)).model_dump(mode="json") | {"python": sys.executable}
    with set_drawing(Drawing(1)):
        resolve("env", section).check()
    assert os.environ.get("MUJOCO_GL") in ("osmesa", "egl")


@pytest.mark.parametrize(
    ("launcher", "reserved", "python", "told"),
    [
        ("inline", 0, "", 1),
        ("local", 0, "", 5),
        ("local", 2, "", 6),
        ("ray", 0, "", 0),
        ("local", 0, sys.executable, 5),
    ],
)
def test_the_check_of_an_environment_is_told_how_many_simulators_there_are(
    launcher: str, reserved: int, python: str, told: int
) -> None:
    env = {"type": "tests.plugins.simulators.pinned_env:PinnedSettings", "defect": "check tells"}
    run = config(
        env=env | ({"python": python} if python else {}),
        launcher=launcher,
        rollout={"simulators": 5},
        evaluation={"episodes": 2, "every": 1, "rows": reserved} if reserved else {},
    )
    with pytest.raises(ConfigError, match=f"told {told}$"):
        check_env_installed(run)


def test_a_simulators_process_knows_the_folder_that_it_shares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUN_FOLDER, "none")
    run, layout = config(), ArenaLayout(1, 1, 1, {}, {}, {})
    spec = run.env.spec()  # type: ignore[attr-defined]
    infos = tuple(env_batch_infos(run, spec)[0])
    factory = SimulatorFactory("s", run.env.model_dump(mode="json"), spec, 6, infos, step_settings(run, 1))
    weights = InlineWeights(WeightsLayout.of({}))
    channels = Channels(print, print, print)
    factory.parts(StationContext(in_memory(layout), lambda: weights, channels), 0)
    assert os.environ[RUN_FOLDER] == "none", "inline"
    factory.parts(StationContext(in_memory(layout), lambda: weights, channels, rendezvous=tmp_path / "s.ranks"), 0)
    assert os.environ[RUN_FOLDER] == str(tmp_path)
