"""Datasets whose files lack values or have them in other forms: each is read right, or refused in one sentence."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests.test_untrusted_names import STRANGE

from polyrhythm.config.sections.learning import DatasetSettings
from polyrhythm.errors import PolyrhythmError
from polyrhythm.plugins.lerobot import layout
from polyrhythm.plugins.lerobot.reading import read_demonstrations
from polyrhythm.specs import INSTRUCTION, ActionSpec, ArraySpec, EnvSpec, Task

pa = pytest.importorskip("pyarrow", reason="LeRobot datasets are parquet: pip install 'polyrhythm[lerobot]'")
pq = pytest.importorskip("pyarrow.parquet")

CAMERA, STATE = "observation.images.image", "observation.state"
SPEC = EnvSpec(
    observation={"image": ArraySpec((16, 16, 3), "uint8"), "state": ArraySpec((3,), "float32")},
    action=ActionSpec("continuous", 1, low=(-1.0,), high=(1.0,)),
    tasks=(Task("a", "do a"), Task("b", "do b")),
    max_steps=50,
)
Change = Callable[[Path], None]


def picture(level: int, shape: tuple[int, ...] = (16, 16, 3), form: str = "PNG", dtype: Any = np.uint8) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(np.full(shape, level, dtype)).save(stream, form)
    return stream.getvalue()


def dataset(folder: Path) -> None:
    """An episode of 4 frames of task a, and one of 3 frames of task b; frame i has the state i and the level 10 i."""
    lengths, first = (4, 3), (0, 4)
    frames: dict[str, list[Any]] = {
        name: [] for name in (*layout.INDICES, layout.ACTION, STATE, CAMERA, layout.SUCCESS)
    }
    for episode, length in enumerate(lengths):
        for t in range(length):
            i = first[episode] + t
            values = {"timestamp": t / 10, "frame_index": t, "episode_index": episode, "index": i}
            values |= {"task_index": episode, layout.ACTION: [i / 10], STATE: [float(i)] * 3}
            values |= {CAMERA: {"bytes": picture(10 * i), "path": None}, layout.SUCCESS: episode == 0 and t == 3}
            for name, value in values.items():
                frames[name].append(value)
    rows = [
        {"episode_index": i, "tasks": [f"do {'ab'[i]}"], "length": n, "data/chunk_index": 0, "data/file_index": 0}
        for i, n in enumerate(lengths)
    ]
    tables = {
        layout.DATA.format(**layout.file_place(0)): pa.table(frames),
        layout.EPISODES.format(**layout.file_place(0)): pa.Table.from_pylist(rows),
        layout.TASKS: pa.table({"task_index": [0, 1], "__index_level_0__": ["do a", "do b"]}),
    }
    for name, table in tables.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, folder / name)
    scalars = dict.fromkeys(layout.INDICES, "int64") | {layout.SUCCESS: "bool"}
    features: dict[str, Any] = {name: {"dtype": dtype, "shape": [1]} for name, dtype in scalars.items()}
    features |= {CAMERA: {"dtype": "image", "shape": [16, 16, 3], "names": ["height", "width", "channels"]}}
    features |= {STATE: {"dtype": "float32", "shape": [3]}, layout.ACTION: {"dtype": "float32", "shape": [1]}}
    (folder / layout.INFO).write_text(
        json.dumps({"codebase_version": "v3.0", "fps": 10, "features": features, "data_path": layout.DATA})
    )


def read(folder: Path, **filters: Any) -> Any:
    return read_demonstrations(DatasetSettings.model_validate({"folder": str(folder), **filters}), SPEC, 1, 1)


def info(**changes: Any) -> Change:
    def change(folder: Path) -> None:
        found = json.loads((folder / layout.INFO).read_text())
        (folder / layout.INFO).write_text(json.dumps(found | changes))

    return change


def feature(key: str, value: Any) -> Change:
    def change(folder: Path) -> None:
        found = json.loads((folder / layout.INFO).read_text())
        is_update = isinstance(value, dict)
        found["features"][key] = {**found["features"][key], **value} if is_update else value
        (folder / layout.INFO).write_text(json.dumps(found))

    return change


def column(file: str, name: str, values: Any) -> Change:
    """values: the new column, a function of the old one, or None to drop it."""

    def change(folder: Path) -> None:
        table = pq.read_table(folder / file)
        at = table.column_names.index(name)
        if values is None:
            table = table.remove_column(at)
        else:
            new = values(table[name].to_pylist()) if callable(values) else values
            table = table.set_column(at, name, new if isinstance(new, pa.Array) else pa.array(new))
        pq.write_table(table, folder / file)

    return change


def rows(file: str, change_of: Callable[[list[Any]], list[Any]]) -> Change:
    def change(folder: Path) -> None:
        pq.write_table(pa.Table.from_pylist(change_of(pq.read_table(folder / file).to_pylist())), folder / file)

    return change


DATA = layout.DATA.format(**layout.file_place(0))
EPISODES = layout.EPISODES.format(**layout.file_place(0))


def one_frame(name: str, value: Any, at: int = 2) -> Change:
    return column(DATA, name, lambda old: [value if i == at else x for i, x in enumerate(old)])


def stored(*args: Any, **options: Any) -> dict[str, Any]:
    return {"bytes": picture(*args, **options), "path": None}


READ: dict[str, Change] = {
    "as it is": lambda folder: None,
    "a byte order mark": lambda f: (f / layout.INFO).write_text("\ufeff" + (f / layout.INFO).read_text()) and None,
    "version 3.1": info(codebase_version="v3.1"),
    "version without v": info(codebase_version="3.0"),
    "fps as text": info(fps="10"),
    "data_path null": info(data_path=None),
    "a path without fields": info(data_path=DATA),
    "names of axes in a mapping": feature(CAMERA, {"names": {"axes": ["height", "width", "channels"]}}),
    "channels named first": feature(CAMERA, {"shape": [3, 16, 16], "names": ["channels", "height", "width"]}),
    "tasks as text": column(EPISODES, "tasks", ["do a", "do b"]),
    "tasks null": column(EPISODES, "tasks", pa.array([None, None], pa.list_(pa.string()))),
    "no tasks": column(EPISODES, "tasks", None),
    "lengths as floats": column(EPISODES, "length", [4.0, 3.0]),
    "places as floats": column(EPISODES, "data/chunk_index", [0.0, 0.0]),
    "an episode without frames": rows(EPISODES, lambda r: [*r, {**r[0], "episode_index": 2, "length": 0}]),
    "episodes in another order": rows(EPISODES, lambda r: r[::-1]),
    "frames in another order": rows(DATA, lambda r: r[::-1]),
    "sentences beside other text": column(layout.TASKS, "task_index", [0, 1]),
    "another text column": lambda f: pq.write_table(
        pq.read_table(f / layout.TASKS).append_column("note", pa.array(["x", "y"])), f / layout.TASKS
    ),
    "actions without a list": column(DATA, layout.ACTION, lambda old: [x[0] for x in old]),
    "nested lists": column(DATA, STATE, lambda old: [[x] for x in old]),
    "lists of a fixed size": column(DATA, STATE, lambda old: pa.array(old, pa.list_(pa.float32(), 3))),
    "large lists": column(DATA, STATE, lambda old: pa.array(old, pa.large_list(pa.float64()))),
    "task_index as floats": column(DATA, "task_index", lambda old: [float(x) for x in old]),
    "pictures as bytes": column(DATA, CAMERA, lambda old: [x["bytes"] for x in old]),
    "a grey picture": one_frame(CAMERA, stored(20, (16, 16))),
    "a picture with alpha": one_frame(CAMERA, stored(20, (16, 16, 4))),
    "success as numbers": column(DATA, layout.SUCCESS, lambda old: [int(x) for x in old]),
}

REFUSED: dict[str, tuple[Change, str]] = {
    "features a list": (info(features=[]), "features = []: it must be a section"),
    "info a list": (lambda f: (f / layout.INFO).write_text("[]") and None, "info.json is damaged (it holds a list)"),
    "info nested deeply": (lambda f: (f / layout.INFO).write_text("[" * 99_999) and None, "info.json is damaged"),
    "fps null": (info(fps=None), "fps is missing"),
    "fps nan": (info(fps="nan"), "fps = 'nan': it must be"),
    "version 4": (info(codebase_version="v4.0"), "has version v4.0, and only v3 is read; name another"),
    "version 2": (info(codebase_version="v2.1"), "convert it with lerobot"),
    "no version": (info(codebase_version=None), "has version None, and only v3 is read"),
    "a path of version 2": (info(data_path="data/{episode_chunk:03d}.parquet"), "with no fields but chunk_index, file"),
    "a path with a wide field": (
        info(data_path="{chunk_index:999999999d}"),
        "with no fields but chunk_index, file_ind",
    ),
    "a path that leaves": (info(data_path="../{file_index:03d}.parquet"), "it must be a path inside the folder"),
    "an absolute path": (info(data_path="/etc/passwd"), "it must be a path inside the folder"),
    "a feature null": (feature(STATE, None), "features.observation.state = null"),
    "a shape null": (feature(STATE, {"shape": None}), "features.observation.state.shape = null: it must be a list"),
    "a shape that is a number": (feature(STATE, {"shape": 3}), "features.observation.state.shape = 3"),
    "a dtype null": (feature(STATE, {"dtype": None}), "features.observation.state.dtype = null"),
    "an action null": (feature(layout.ACTION, None), "features.action = null"),
    "a video without video_path": (feature(CAMERA, {"dtype": "video"}), "info.json has no video_path"),
    "a place null": (column(EPISODES, "data/file_index", pa.array([None, 0])), "data/file_index of row 0 is None"),
    "a place that is negative": (column(EPISODES, "data/file_index", [0, -1]), "data/file_index of row 1 is -1"),
    "a length of half a frame": (column(EPISODES, "length", [4.5, 3.0]), "length of row 0 is 4.5"),
    "a length that is not the frames'": (column(EPISODES, "length", [5, 3]), "has 4 frames and should have 5"),
    "no length": (column(EPISODES, "length", None), "has no column length"),
    "tasks of numbers": (column(EPISODES, "tasks", [[0], [1]]), "tasks has [0]; it must be a list of sentences"),
    "no rows": (rows(EPISODES, lambda r: [{**r[0], "length": 0}]), "has no episode of the chosen tasks"),
    "an episode twice": (rows(EPISODES, lambda r: [*r, r[0]]), "has episode 0 twice"),
    "a sentence null": (column(layout.TASKS, "__index_level_0__", ["do a", None]), "the sentence of row 1 is null"),
    "frames numbered twice": (column(DATA, "frame_index", [0, 1, 1, 3, 0, 1, 2]), "should have 4, numbered from 0"),
    "a frame's task without sentence": (one_frame("task_index", 7), "has task_index 7 (no sentence in meta/tasks.par"),
    "a frame's task of another episode": (one_frame("task_index", 1), "has task_index 1 (do b), and meta/episodes na"),
    "a task_index null": (one_frame("task_index", None), "task_index is null in a frame"),
    "an action null in a frame": (one_frame(layout.ACTION, None), "action is null in a frame"),
    "an entry null": (one_frame(layout.ACTION, [None]), "action is null in a frame"),
    "a shorter state": (one_frame(STATE, [1.0, 2.0]), "observation.state has lists of different lengths"),
    "shifted lengths": (
        column(DATA, STATE, lambda old: [[1.0, 2.0], [3.0, 4.0, 5.0, 6.0], *old[2:]]),
        "observation.state has lists of different lengths",
    ),
    "a state of two numbers": (column(DATA, STATE, lambda old: [x[:2] for x in old]), "has 2 numbers in a frame, and"),
    "a state of text": (column(DATA, STATE, lambda old: [["x"] * 3 for _ in old]), "is of type string"),
    "a state that is not finite": (one_frame(STATE, [1.0, float("nan"), 0.0]), "state is not finite"),
    "a picture null": (one_frame(CAMERA, None), "in frame 2 of episode 0: it is stored as NoneType"),
    "a larger picture": (one_frame(CAMERA, stored(20, (24, 16, 3))), "it is [24, 16, 3], and info.json says [16, 16"),
    "a picture of 16 bits": (one_frame(CAMERA, stored(20, (16, 16), dtype=np.uint16)), "more than 8 bits"),
    "a picture cut off": (one_frame(CAMERA, {"bytes": picture(20)[:40], "path": None}), "it cannot be decoded"),
    "a picture elsewhere": (one_frame(CAMERA, {"bytes": None, "path": "../x.png"}), "is not the name of a file inside"),
    "a picture that is missing": (one_frame(CAMERA, {"bytes": None, "path": "x.png"}), "x.png is not there"),
    "success null": (column(DATA, layout.SUCCESS, [None] * 6 + [True]), "next.success is null in a frame"),
    "success not finite": (column(DATA, layout.SUCCESS, [float("nan")] * 7), "next.success is neither true nor false"),
    "success as text": (column(DATA, layout.SUCCESS, ["False"] * 7), "next.success is of type string"),
}


@pytest.mark.parametrize("name", READ)
def test_other_forms_of_the_same_dataset_are_read_alike(name: str, tmp_path: Path) -> None:
    dataset(tmp_path)
    READ[name](tmp_path)
    found = read(tmp_path)
    assert found.obs["state"][:, 0].tolist() == list(range(7))
    assert found.obs["image"][:, 0, 0].tolist() == [[10 * i] * 3 for i in range(7)]
    assert found.obs[INSTRUCTION].tolist() == [0] * 4 + [1] * 3
    assert np.allclose(found.actions[:, 0, 0], np.arange(7) / 10)
    assert len(read(tmp_path, only_success=True)) == 4


@pytest.mark.parametrize("name", REFUSED)
def test_a_damaged_dataset_is_refused_in_one_sentence(name: str, tmp_path: Path) -> None:
    dataset(tmp_path)
    change, words = REFUSED[name]
    change(tmp_path)
    with pytest.raises(PolyrhythmError) as refused:
        read(tmp_path, only_success=name.startswith("success"))
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", STRANGE)
def test_names_of_files_in_a_dataset_stay_in_its_folder(name: str, tmp_path: Path) -> None:
    def add_video(old: list[Any]) -> list[Any]:
        places = {f"videos/{CAMERA}/{key}": 0.0 for key in ("chunk_index", "file_index", "from_timestamp")}
        return [row | places for row in old]

    for number, (problem, changes) in enumerate(
        {
            "data_path = ": [info(data_path=name)] if name else [],
            "video_path = ": [feature(CAMERA, {"dtype": "video"}), rows(EPISODES, add_video), info(video_path=name)],
            "is not the name of a file": [one_frame(CAMERA, {"bytes": None, "path": name})],
        }.items()
    ):
        dataset(tmp_path / str(number))
        for change in changes:
            change(tmp_path / str(number))
        if changes:
            with pytest.raises(PolyrhythmError, match=problem):
                read(tmp_path / str(number))


def test_each_frame_has_the_instruction_of_its_own_task(tmp_path: Path) -> None:
    dataset(tmp_path)
    column(DATA, "task_index", [0, 0, 1, 1, 1, 1, 1])(tmp_path)
    column(EPISODES, "tasks", [["do a", "do b"], ["do b"]])(tmp_path)
    assert read(tmp_path).obs[INSTRUCTION].tolist() == [0, 0, 1, 1, 1, 1, 1]
    assert read(tmp_path, tasks=["do b"]).obs["state"][:, 0].tolist() == [2, 3, 4, 5, 6]
    assert read(tmp_path, tasks=["do a"]).obs["state"][:, 0].tolist() == [0, 1]
    first = read(tmp_path, max_episodes=1)
    assert first.obs["state"][:, 0].tolist() == [0, 1, 2, 3], "the first episode of each task"


def test_discrete_actions_are_choices_of_the_environment(tmp_path: Path) -> None:
    dataset(tmp_path)
    feature(layout.ACTION, {"dtype": "int64"})(tmp_path)
    spec = EnvSpec(SPEC.observation, ActionSpec("discrete", 1, choices=3), SPEC.tasks, 50)
    chosen = DatasetSettings(folder=str(tmp_path))
    column(DATA, layout.ACTION, [[0], [1], [2], [0], [1], [2], [0]])(tmp_path)
    assert read_demonstrations(chosen, spec, 1, 1).actions.ravel().tolist() == [0, 1, 2, 0, 1, 2, 0]
    for wrong in (3, -1):
        one_frame(layout.ACTION, [wrong])(tmp_path)
        with pytest.raises(PolyrhythmError, match="an action is not one of 0 to 2"):
            read_demonstrations(chosen, spec, 1, 1)
    column(DATA, layout.ACTION, [[0.0], [1.0], [1.5], [0.0], [1.0], [2.0], [0.0]])(tmp_path)
    with pytest.raises(PolyrhythmError, match=r"episode 0: an action has 1.5, which int64 does not hold"):
        read_demonstrations(chosen, spec, 1, 1)


def test_each_entry_of_an_action_has_its_own_choices(tmp_path: Path) -> None:
    dataset(tmp_path)
    feature(layout.ACTION, {"dtype": "int64", "shape": [2]})(tmp_path)
    spec = EnvSpec(SPEC.observation, ActionSpec("discrete", 2, counts=(3, 2)), SPEC.tasks, 50)
    column(DATA, layout.ACTION, [[2, 1]] * 7)(tmp_path)
    assert read_demonstrations(DatasetSettings(folder=str(tmp_path)), spec, 1, 1).actions[0, 0].tolist() == [2, 1]
    one_frame(layout.ACTION, [1, 2])(tmp_path)
    with pytest.raises(PolyrhythmError, match="an action is not one of 0 to 2, 1; name"):
        read_demonstrations(DatasetSettings(folder=str(tmp_path)), spec, 1, 1)


def test_numbers_that_an_array_cannot_hold_are_refused(tmp_path: Path) -> None:
    dataset(tmp_path)
    spec = EnvSpec({**SPEC.observation, "state": ArraySpec((3,), "uint8")}, SPEC.action, SPEC.tasks, 50)
    column(DATA, STATE, [[300.0, 1.0, 2.0]] * 7)(tmp_path)
    with pytest.raises(PolyrhythmError, match=r"observation.state has 300.0, which uint8 does not hold"):
        read_demonstrations(DatasetSettings(folder=str(tmp_path)), spec, 1, 1)


def test_actions_beyond_the_bounds_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dataset(tmp_path)
    column(DATA, layout.ACTION, [[50.0]] * 2 + [[0.5]] * 5)(tmp_path)
    read(tmp_path)
    assert "29% of the actions of" in caplog.text
