"""Datasets in LeRobot's layout: what is read is what was played, recordings go on, what does not fit is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.plugins.demonstrations.test_recording import Demonstrable

from polyrhythm.config.sections.learning import DatasetSettings, DemonstrationSettings
from polyrhythm.envs.base import RowsFailed
from polyrhythm.errors import ConfigError, MissingError, PolyrhythmError, RunFolderError, RunHalted
from polyrhythm.imports import same_imports
from polyrhythm.plugins.demonstrations.episodes import expert_of, plan_episode
from polyrhythm.plugins.demonstrations.recording import demonstrate
from polyrhythm.plugins.lerobot import layout
from polyrhythm.plugins.lerobot.checking import check_dataset
from polyrhythm.plugins.lerobot.layout import VideoFrames
from polyrhythm.plugins.lerobot.reading import read_demonstrations
from polyrhythm.plugins.lerobot.recording import Source, record_dataset, recorded_form
from polyrhythm.specs import ActionSpec, ArraySpec, EnvSpec, Task
from polyrhythm.stations.simulator.slot import StepSettings

av = pytest.importorskip("av", reason="videos need: pip install 'polyrhythm[video]'")
pq = pytest.importorskip("pyarrow.parquet", reason="LeRobot datasets are parquet: pip install 'polyrhythm[lerobot]'")


class Seen(Demonstrable):
    """The environment that counts, with three cameras (channels last, first, none) whose pixels depend on the state.

    Episodes of task a take 5 steps, of task b 6; those whose seed is even do not succeed.
    """

    def __init__(self, rows: int, tasks: tuple[Task, ...] = (Task("a", "do a"), Task("b", "do b"))) -> None:
        super().__init__(rows)
        self.spec = EnvSpec(
            observation={
                "front": ArraySpec((12, 10, 3), "uint8"),
                "wrist": ArraySpec((3, 9, 11), "uint8"),
                "depth": ArraySpec((8, 9), "uint8"),
                "x": ArraySpec((3,), "float32"),
                "grid": ArraySpec((2, 2), "float32"),
            },
            action=ActionSpec("continuous", 1, low=(-9.0,), high=(9.0,)),
            tasks=tasks,
            max_steps=12,
        )
        self.fails = np.zeros(rows, bool)
        self.number = np.zeros(rows, np.int64)

    def reset(self, rows: Any, tasks: Any, seeds: Any) -> None:
        super().reset(rows, tasks, seeds)
        self.fails[list(rows)] = [seed % 2 == 0 for seed in seeds]
        self.number[list(rows)] = [seed % 1000 for seed in seeds]

    def step(self, rows: Any, actions: Any) -> Any:
        result = super().step(rows, actions)
        return result._replace(success=result.success & ~self.fails[np.asarray(rows)])

    def observe(self, rows: Any, out: Any) -> None:
        picked = np.asarray(rows)
        out["x"][: len(picked)] = self.state[picked] + np.float32(0.1)
        for i, row in enumerate(picked):
            draws = np.random.default_rng((int(self.number[row]), int(self.state[row, 1])))
            for name in ("front", "wrist", "depth"):
                out[name][i] = draws.integers(0, 256, self.spec.observation[name].shape)
            out["grid"][i] = draws.normal(size=(2, 2))


def settings(**changes: Any) -> DemonstrationSettings:
    return DemonstrationSettings.model_validate({"episodes_per_task": 5, "noise_std": 0.25, **changes})


def recorded(folder: Path, env: Seen | None = None, on_progress: Any = None, **changes: Any) -> dict[str, Any]:
    """Record the expert into the folder, 2 env steps an action."""
    env, given = env or Seen(3), settings(**changes)
    what = recorded_form({"type": "seen"}, given, 2, 10) | {"demonstrator": "expert"}
    source = Source(what, expert_of(env), given.noise_std, keep_failed=False)
    return record_dataset(folder, env, source, given, StepSettings(1, 2), on_progress or (lambda *_: None))


def read(folder: Path, chunk: int = 1, env: Seen | None = None, **changes: Any) -> Any:
    chosen = DatasetSettings.model_validate({"folder": str(folder), **changes})
    return read_demonstrations(chosen, (env or Seen(1)).spec, chunk, 2)


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


@pytest.mark.parametrize("chunk", [1, 2, 3])
def test_what_is_read_is_bit_for_bit_what_is_recorded_in_memory(chunk: int, tmp_path: Path) -> None:
    summary = recorded(tmp_path / "d")
    found = read(tmp_path / "d", chunk, every=chunk)
    expected = demonstrate(Seen(3), settings(), StepSettings(chunk, 2)).demonstrations
    assert found.obs.keys() == expected.obs.keys()
    for name, array in expected.obs.items():
        assert found.obs[name].dtype == array.dtype, name
        assert np.array_equal(found.obs[name], array), name
    assert found.actions.dtype == expected.actions.dtype
    assert np.array_equal(found.actions, expected.actions)
    assert (found.tasks, found.action_repeat) == (("a", "b"), 2)
    assert summary["frames"] == len(read(tmp_path / "d"))


def test_a_recording_that_is_stopped_goes_on_with_the_missing_episodes(tmp_path: Path) -> None:
    assert recorded(tmp_path / "whole")["resumed"] == 0

    class Stopped(Exception):
        pass

    def stop(done: int, of: int) -> None:
        assert of == 10
        if done == 6:
            raise Stopped

    with pytest.raises(Stopped):
        recorded(tmp_path / "cut", on_progress=stop)
    assert not (tmp_path / "cut" / layout.STATS).exists()
    assert json.loads((tmp_path / "cut" / layout.INFO).read_text())["total_frames"] == len(read(tmp_path / "cut"))
    # A turn whose files were written but not listed.
    for pattern in (layout.DATA, layout.EPISODES):
        (tmp_path / "cut" / pattern.format(**layout.file_place(2))).write_bytes(b"cut")
        (tmp_path / "cut" / pattern.format(**layout.file_place(9))).write_bytes(b"cut")
    env = Seen(3)
    assert recorded(tmp_path / "cut", env)["resumed"] == 6
    assert len(env.resets) == 4
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")
    before = contents(tmp_path / "whole")
    env = Seen(3)
    assert recorded(tmp_path / "whole", env)["resumed"] == 10
    assert not env.resets
    assert contents(tmp_path / "whole") == before
    assert recorded(tmp_path / "whole", episodes_per_task=6)["resumed"] == 10, "more episodes extend it"


def test_an_episode_whose_row_fails_is_dropped_and_not_played_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Falling(Seen):
        """The row that plays this episode fails at its third step."""

        def step(self, rows: Any, actions: Any) -> Any:
            result = super().step(rows, actions)
            fell = [int(r) for r in rows if self.number[r] == bad and self.state[r, 1] == 3]
            if fell:
                raise RowsFailed({row: RuntimeError("unstable") for row in fell}, result)
            return result

    bad = plan_episode(settings(), 0, 2).seed % 1000
    recorded(tmp_path / "whole")
    recorded(tmp_path / "cut", Falling(3))
    assert "the first since the environment failed in step: RuntimeError: unstable (task a, seed" in caplog.text

    def kept(name: str) -> dict[tuple[int, int], bool]:
        """(task, index) → whether the episode is in the dataset."""
        outcomes = json.loads((tmp_path / name / layout.OURS).read_text())["outcomes"]
        return {(task, index): number >= 0 for task, index, _, number in outcomes}

    assert kept("whole")[0, 2]
    assert kept("cut") == kept("whole") | {(0, 2): False}
    env = Falling(3)
    assert recorded(tmp_path / "cut", env)["resumed"] == 10
    assert not env.resets


#: Forks a process for each moment, which kills itself as it is about to give that file its name.
KILLED = """
import os, signal, sys
from pathlib import Path
from tests.plugins.lerobot.test_datasets import recorded
def record_until(moment):
    count = 0
    def hook(event, args):
        nonlocal count
        if event == "os.rename":
            count += 1
            if count == moment:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)
    recorded(Path(sys.argv[1]) / str(moment))
for moment in map(int, sys.argv[2:]):
    pid = os.fork()
    if pid == 0:
        try:
            record_until(moment)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL, moment
"""
MOMENTS = [1, 2, 3, 4, 5, 8, 12, 17]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of recordings that were killed, by moment, and of one that was not, `whole`."""
    folder = tmp_path_factory.mktemp("killed")
    words = [sys.executable, "-c", KILLED, str(folder), *map(str, MOMENTS)]
    subprocess.run(words, env=os.environ | same_imports(), timeout=120, check=True)
    recorded(folder / "whole")
    return folder


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_recording_may_be_killed_before_any_file_gets_its_name(moment: int, killed: Path) -> None:
    recorded(killed / str(moment))
    assert contents(killed / str(moment)) == contents(killed / "whole")


def test_filters_choose_by_success_task_and_number(tmp_path: Path) -> None:
    recorded(tmp_path)
    rows = [row for file in sorted(tmp_path.glob("meta/episodes/*/*")) for row in pq.read_table(file).to_pylist()]
    assert {row["success"] for row in rows} == {True, False}, "noisy episodes are kept"
    lengths = {word: [row["length"] for row in rows if row["tasks"] == [word]] for word in ("do a", "do b")}
    assert len(read(tmp_path, tasks=["a"])) == len(read(tmp_path, tasks=["do a"])) == sum(lengths["do a"])
    assert len(read(tmp_path, max_episodes=1)) == lengths["do a"][0] + lengths["do b"][0]
    good = sum(row["length"] for row in rows if row["success"])
    assert len(read(tmp_path, only_success=True)) == good < len(read(tmp_path))
    found = read(tmp_path, tasks=["b"], only_success=True, max_episodes=1)
    assert set(found.obs["instruction"].tolist()) == {1}
    assert len(found) == next(row["length"] for row in rows if row["success"] and row["tasks"] == ["do b"])


def test_statistics_are_those_of_numpy(tmp_path: Path) -> None:
    recorded(tmp_path)
    stats, found = json.loads((tmp_path / layout.STATS).read_text()), read(tmp_path)
    for key, array in {"observation.x": found.obs["x"], "action": found.actions[:, 0]}.items():
        exact = array.astype(np.float64)
        assert np.allclose(stats[key]["mean"], exact.mean(0), rtol=1e-12)
        assert np.allclose(stats[key]["std"], exact.std(0), rtol=1e-12)
        assert np.array_equal(stats[key]["min"], exact.min(0))
        assert np.array_equal(stats[key]["max"], exact.max(0))
        for name, q in {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}.items():
            assert np.allclose(stats[key][name], np.quantile(exact, q, axis=0), rtol=1e-12)
        assert stats[key]["count"] == [len(found)]
    front = found.obs["front"].reshape(-1, 3) / 255
    assert np.allclose(stats["observation.images.front"]["mean"], front.mean(0)[:, None, None], rtol=1e-12)
    assert np.shape(stats["observation.images.depth"]["q99"]) == (1, 1, 1)
    assert stats.keys() == layout.features_of(Seen(1).spec).keys()


def _edit(folder: Path, change: Any) -> None:
    info = json.loads((folder / layout.INFO).read_text())
    change(info)
    (folder / layout.INFO).write_text(json.dumps(info))


def _shape(key: str, shape: list[int]) -> Any:
    return lambda folder: _edit(folder, lambda info: info["features"][key].update(shape=shape))


DATA = layout.DATA.format(**layout.file_place(1))
WRONG: dict[str, tuple[Any, type[PolyrhythmError], str]] = {
    "version": (
        lambda folder: _edit(folder, lambda info: info.update(codebase_version="v2.1")),
        RunFolderError,
        "has version v2.1, and only v3 is read; convert it with lerobot: python -m lerobot",
    ),
    "info": (lambda folder: (folder / layout.INFO).unlink(), RunFolderError, "has no meta/info.json"),
    "rubbish": (lambda folder: (folder / layout.INFO).write_text("{"), RunFolderError, "info.json is damaged"),
    "depths": (lambda folder: (folder / layout.INFO).write_text("[" * 200_000), RunFolderError, "nested too deeply"),
    "tasks": (lambda folder: (folder / layout.TASKS).unlink(), RunFolderError, "tasks.parquet is not there"),
    "data": (lambda folder: (folder / DATA).unlink(), RunFolderError, r"is not there \(missing: 1 of 4 files\)"),
    "parquet": (lambda folder: (folder / layout.TASKS).write_bytes(b"PAR1"), RunFolderError, "cannot be read as parq"),
    "camera": (
        _shape("observation.images.front", [24, 10, 3]),
        ConfigError,
        r"images.front is image \[24, 10, 3\], the environment's front is image \[12, 10, 3\]",
    ),
    "state": (_shape("observation.x", [4]), ConfigError, r"x is float32 \[4\], the environment's x is float32 \[3\]"),
    "action": (_shape("action", [7]), ConfigError, r"an action is of \[7\] entries, the environment's of \[1\]"),
    "missing": (
        lambda folder: _edit(folder, lambda info: info["features"].pop("observation.x")),
        ConfigError,
        "has no observation.x, which would be the environment's x; it has observation.images.front",
    ),
    "unknown": (
        lambda folder: _edit(folder, lambda info: info["features"].pop("next.success")),
        ConfigError,
        "has no next.success; set it to false",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_said_before_any_frame_is_read(name: str, tmp_path: Path) -> None:
    change, error, words = WRONG[name]
    recorded(tmp_path)
    chosen = DatasetSettings(folder=str(tmp_path), only_success=True)
    check_dataset(chosen, Seen(1).spec, 2)
    change(tmp_path)
    with pytest.raises(error, match=words) as raised:
        check_dataset(chosen, Seen(1).spec, 2)
    assert "\n" not in str(raised.value)


def test_tasks_keys_and_holding_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    recorded(tmp_path)
    other = Seen(1, (Task("a", "do a"), Task("c", "do c")))
    with pytest.raises(ConfigError, match=r"'do b', which the environment does not have \(do a, a, do c, c\)"):
        read(tmp_path, env=other)
    assert len(read(tmp_path, env=other, tasks=["a"])) == len(read(tmp_path, tasks=["a"]))
    with pytest.raises(ConfigError, match="has no episode of the chosen tasks"):
        read(tmp_path, env=other, tasks=["c"])
    with pytest.raises(ConfigError, match="tasks = z: the environment has no such task but a, b"):
        read(tmp_path, tasks=["z"])
    with pytest.raises(ConfigError, match="keys = y: the environment has no such array but front"):
        read(tmp_path, keys={"y": "observation.x"})
    with pytest.raises(ConfigError, match=r"action_repeat = 3: the demonstrations in .* hold each action for 2 steps"):
        check_dataset(DatasetSettings(folder=str(tmp_path)), Seen(1).spec, 3)
    with pytest.raises(MissingError, match="is not there; name the folder"):
        read(tmp_path / "none")


def test_arrays_under_other_keys_are_found_by_name(tmp_path: Path) -> None:
    recorded(tmp_path)
    swapped = read(tmp_path, keys={"x": "observation.x"})
    assert np.array_equal(swapped.obs["x"], read(tmp_path).obs["x"])
    with pytest.raises(ConfigError, match=r"observation.grid is float32 \[4\], the environment's x"):
        read(tmp_path, keys={"x": "observation.grid"})


def test_a_recording_of_other_settings_or_of_nothing_is_refused(tmp_path: Path) -> None:
    recorded(tmp_path / "d")
    with pytest.raises(RunFolderError, match=r"has seed = 2000000000 and this one 7; make them equal"):
        recorded(tmp_path / "d", seed=7)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine.txt").write_text("mine")
    with pytest.raises(RunFolderError, match="is not empty and no recording of polyrhythm"):
        recorded(tmp_path / "taken")
    env = Seen(3)
    env.length = 70
    with pytest.raises(RunHalted, match="no episode of 10 was kept"):
        recorded(tmp_path / "never", env, noise_std=0.0)


def _lerobot_python() -> str:
    """A Python that has lerobot 0.4 or later: this one, or the one that POLYRHYTHM_LEROBOT_PYTHON names."""
    python = os.environ.get("POLYRHYTHM_LEROBOT_PYTHON", sys.executable)
    found = subprocess.run(
        [python, "-c", "import lerobot.datasets.lerobot_dataset"], capture_output=True, timeout=120, check=False
    )
    if found.returncode:
        pytest.skip("lerobot is not installed here; POLYRHYTHM_LEROBOT_PYTHON may name a Python that has it")
    return python


READ = """
import json, sys
import numpy as np
from lerobot.datasets.lerobot_dataset import LeRobotDataset
found = LeRobotDataset("local/d", root=sys.argv[1], delta_timestamps={"action": [0.0, 0.1]})
items = [found[i] for i in range(len(found))]
np.savez(
    sys.argv[2],
    x=np.stack([item["observation.x"] for item in items]),
    grid=np.stack([item["observation.grid"] for item in items]),
    front=np.stack([item["observation.images.front"] for item in items]),
    depth=np.stack([item["observation.images.depth"] for item in items]),
    action=np.stack([item["action"] for item in items]),
    success=np.stack([item["next.success"] for item in items]),
    mean=found.meta.stats["action"]["mean"],
)
told = [found.num_episodes, found.fps, [item["task"] for item in items], sorted(found.meta.camera_keys)]
print(json.dumps(told))
"""


@pytest.mark.timeout(300)
def test_lerobots_own_reader_opens_it(tmp_path: Path) -> None:
    python, out = _lerobot_python(), tmp_path / "out.npz"
    recorded(tmp_path / "d")
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    words = [python, "-c", READ, str(tmp_path / "d"), str(out)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    episodes, fps, tasks, cameras = json.loads(done.stdout.splitlines()[-1])
    ours, theirs = read(tmp_path / "d", 2), np.load(out)
    assert (episodes, fps) == (json.loads((tmp_path / "d" / layout.INFO).read_text())["total_episodes"], 10)
    assert tasks == ["do " + "ab"[i] for i in ours.obs["instruction"]]
    assert cameras == [f"observation.images.{name}" for name in ("depth", "front", "wrist")]
    assert np.array_equal(theirs["x"], ours.obs["x"])
    assert np.array_equal(theirs["grid"].reshape(-1, 2, 2), ours.obs["grid"])
    assert np.array_equal(theirs["action"].reshape(ours.actions.shape), ours.actions)
    assert np.array_equal(np.round(theirs["front"].transpose(0, 2, 3, 1) * 255).astype(np.uint8), ours.obs["front"])
    assert np.array_equal(np.round(theirs["depth"][:, 0] * 255).astype(np.uint8), ours.obs["depth"])
    assert np.allclose(theirs["mean"], ours.actions[:, 0].mean(0))


WRITE = """
import sys
import numpy as np
from lerobot.datasets.lerobot_dataset import LeRobotDataset
features = {
    "observation.images.top": {"dtype": "image", "shape": (12, 10, 3), "names": ["height", "width", "channels"]},
    "observation.state": {"dtype": "float32", "shape": (3,), "names": None},
    "action": {"dtype": "float32", "shape": (2,), "names": None},
}
made = LeRobotDataset.create("local/d", fps=20, features=features, root=sys.argv[1], use_videos=False)
draws = np.random.default_rng(0)
frames = []
for episode in range(3):
    for _ in range(4 + episode):
        frame = {
            "observation.images.top": draws.integers(0, 256, (12, 10, 3), dtype=np.uint8),
            "observation.state": draws.normal(size=3).astype(np.float32),
            "action": draws.normal(size=2).astype(np.float32),
        }
        frames.append(frame)
        made.add_frame({**frame, "task": ["lift", "push", "lift"][episode]})
    made.save_episode()
made.finalize()
np.savez(sys.argv[2], **{key: np.stack([frame[key] for frame in frames]) for key in features})
"""


@pytest.mark.timeout(300)
def test_what_lerobot_itself_writes_is_read(tmp_path: Path) -> None:
    python, out = _lerobot_python(), tmp_path / "out.npz"
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    words = [python, "-c", WRITE, str(tmp_path / "d"), str(out)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    theirs = np.load(out)
    spec = EnvSpec(
        observation={"image": ArraySpec((3, 12, 10), "uint8"), "proprio": ArraySpec((3,), "float32")},
        action=ActionSpec("continuous", 2, low=(-9.0, -9.0), high=(9.0, 9.0)),
        tasks=(Task("push-v3", "push"), Task("lift-v3", "lift")),
        max_steps=20,
    )
    chosen = DatasetSettings(folder=str(tmp_path / "d"), keys={"image": "observation.images.top"})
    found = read_demonstrations(chosen, spec, 1, 1)
    assert found.obs["instruction"].tolist() == [1] * 4 + [0] * 5 + [1] * 6
    assert np.array_equal(found.obs["image"], theirs["observation.images.top"].transpose(0, 3, 1, 2))
    assert np.array_equal(found.obs["proprio"], theirs["observation.state"])
    assert np.array_equal(found.actions[:, 0], theirs["action"])


def write_mp4(file: Path, frames: Any, fps: int) -> None:
    """Losslessly, with a key frame every fourth frame."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(file), "w") as container:
        stream = container.add_stream("libx264", rate=fps, options={"qp": "0", "g": "4"})
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = "yuv444p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode(None))


def grey(levels: Any, height: int = 16, width: int = 24) -> list[Any]:
    return [np.full((height, width, 3), level, np.uint8) for level in levels]


def levels_of(frames: Any) -> list[int]:
    """The level, to the 1 or 2 that YUV rounds off, in tens."""
    return [round(float(frame.mean()) / 10) for frame in frames]


def test_a_video_of_many_episodes_is_decoded_once(tmp_path: Path) -> None:
    files = [tmp_path / "a.mp4", tmp_path / "b.mp4"]
    for file in files:
        write_mp4(file, grey(range(0, 240, 10)), fps=10)
    with closing(VideoFrames()) as videos:
        for first in range(0, 24, 4):  # six episodes of four frames, every second one wanted
            wanted = [first, first + 2]
            for camera, file in zip(("left", "right"), files, strict=True):
                assert levels_of(videos.take(camera, file, [t / 10 for t in wanted], (16, 24))) == wanted
        assert videos.decoded == 2 * 23
        assert levels_of(videos.take("left", files[0], [0.3, 0.4], (16, 24))) == [3, 4], "it goes back"
        assert levels_of(videos.take("left", files[1], [0.9], (16, 24))) == [9], "another file"


def test_frames_are_chosen_by_their_time_and_have_the_size_that_is_declared(tmp_path: Path) -> None:
    write_mp4(tmp_path / "fast.mp4", grey([10 * (i // 3) for i in range(36)]), fps=30)
    (tmp_path / "broken.mp4").write_bytes(b"no video")
    with closing(VideoFrames()) as videos:
        times = [t / 10 for t in range(12)]
        assert levels_of(videos.take("c", tmp_path / "fast.mp4", times, (16, 24))) == list(range(12))
        with pytest.raises(RunFolderError, match=r"has no frame at 0.550 s \(the next one: 0.567 s\)"):
            videos.take("c", tmp_path / "fast.mp4", [0.55], (16, 24))
        with pytest.raises(RunFolderError, match=r"has no frame at 1.200 s \(the next one: 1.167 s\)"):
            videos.take("c", tmp_path / "fast.mp4", [1.1, 1.2], (16, 24))
        with pytest.raises(RunFolderError, match=r"has frames of 16x24, and info.json says 24x16"):
            videos.take("c", tmp_path / "fast.mp4", [0.0], (24, 16))
        with pytest.raises(RunFolderError, match=r"broken.mp4 cannot be read as a video"):
            videos.take("c", tmp_path / "broken.mp4", [0.0], (16, 24))


def test_cameras_may_be_videos(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    env = Seen(1)
    spec = EnvSpec(
        observation={"cam": ArraySpec((32, 48, 3), "uint8"), "x": ArraySpec((1,), "float32")},
        action=env.spec.action,
        tasks=env.spec.tasks,
        max_steps=12,
    )
    for folder in ("data/chunk-000", "meta/episodes/chunk-000", "videos/observation.images.cam/chunk-000"):
        (tmp_path / folder).mkdir(parents=True)
    levels = np.linspace(10, 240, 9).astype(np.uint8)
    video = tmp_path / "videos/observation.images.cam/chunk-000/file-000.mp4"
    write_mp4(video, grey(levels, 32, 48), fps=10)
    features = layout.features_of(spec)
    features["observation.images.cam"]["dtype"] = "video"
    info = {"codebase_version": "v3.0", "fps": 10, "features": features, "data_path": layout.DATA}
    info["video_path"] = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
    (tmp_path / layout.INFO).write_text(json.dumps(info))
    pq.write_table(pa.table({"task_index": [0, 1], "task": ["do a", "do b"]}), tmp_path / layout.TASKS)
    lengths = {0: 4, 1: 5}
    columns: dict[str, list[Any]] = {name: [] for name in (*layout.INDICES, "action", "observation.state")}
    rows = []
    for episode, length in lengths.items():
        first = 4 * episode
        for t in range(length):
            values = {"timestamp": t / 10, "frame_index": t, "episode_index": episode, "index": first + t}
            values |= {"task_index": episode, "action": 0.5, "observation.state": float(first + t)}
            for name, value in values.items():
                columns[name].append(value)
        places = {f"{of}/{n}": 0 for of in ("data", "videos/observation.images.cam") for n in layout.file_place(0)}
        own = {"episode_index": episode, "tasks": [["do a"], ["do b"]][episode], "length": length}
        rows.append({**own, **places, "videos/observation.images.cam/from_timestamp": first / 10})
    pq.write_table(pa.table(columns), tmp_path / layout.DATA.format(**layout.file_place(0)))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / layout.EPISODES.format(**layout.file_place(0)))
    found = read_demonstrations(DatasetSettings(folder=str(tmp_path), every=2), spec, 2, 1)
    assert found.obs["x"][:, 0].tolist() == [0, 2, 4, 6, 8]
    assert np.abs(found.obs["cam"].mean((1, 2, 3)) - levels[[0, 2, 4, 6, 8]]).max() < 4
    short = {**rows[1], "videos/observation.images.cam/from_timestamp": 2.0}
    pq.write_table(pa.Table.from_pylist([rows[0], short]), tmp_path / layout.EPISODES.format(**layout.file_place(0)))
    with pytest.raises(RunFolderError, match=r"file-000.mp4 has no frame at 2.000 s \(the next one: 0.800 s\)"):
        read_demonstrations(DatasetSettings(folder=str(tmp_path)), spec, 2, 1)
    write_mp4(video, grey(levels, 48, 32), fps=10)
    with pytest.raises(RunFolderError, match=r"file-000.mp4 has frames of 48x32, and info.json says 32x48"):
        check_dataset(DatasetSettings(folder=str(tmp_path)), spec, 1)
    video.unlink()
    with pytest.raises(RunFolderError, match=r"file-000.mp4 is not there"):
        check_dataset(DatasetSettings(folder=str(tmp_path)), spec, 1)
