"""Finds and creates robosuite environments: silent import, tasks by name, controllers, RoboCasa's requirements; resets
them by seed, places objects beyond their range, and reads their state. A table of tasks has array sizes with the Panda,
so that a spec needs no simulator; other sizes are measured on one environment.

robosuite up to 1.5.1 draws from the global random states of numpy and Python; 1.5.2 and RoboCasa draw from a generator
shared by the environment and its placement samplers, and partly still from the global ones. So all are seeded, and the
global ones restored.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import logging
import os
import random
import threading
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from polyrhythm.conformance import raised
from polyrhythm.envs.mujoco import RenderingUnavailable, choose_gl_backend, refuse_unstable
from polyrhythm.errors import ConfigError, MissingError, install_command, nearest
from polyrhythm.plugins.simulators.variation import draw_beyond

if TYPE_CHECKING:
    import mujoco

ROBOCASA = "robocasa"
#: Folders of RoboCasa's assets that its downloader makes, below the package.
_ASSETS = ("models/assets/textures", "models/assets/objects")
#: Seed of the models that are made once: equal models in all rows.
MODEL_SEED = 0
_LOGGER = "robosuite_logs"


def import_robosuite() -> Any:
    """Import robosuite with its log below errors silenced. MUJOCO_GL stays as it was or as chosen here.

    MissingError: it is not installed.
    """
    if importlib.util.find_spec("robosuite") is None:
        raise MissingError(
            f"env.type = robosuite: the package robosuite is not installed; run: {install_command('robosuite')}"
        )
    with contextlib.suppress(RenderingUnavailable):
        choose_gl_backend()  # MuJoCo reads it once, at import: a batch of states may be drawn for a video later
    logger = logging.getLogger(_LOGGER)
    if _is_serious not in logger.filters:
        logger.addFilter(_is_serious)
    before = os.environ.get("MUJOCO_GL")
    try:
        return importlib.import_module("robosuite")
    finally:  # it sets the variable, which child processes would inherit
        os.environ.pop("MUJOCO_GL", None)
        os.environ |= {} if before is None else {"MUJOCO_GL": before}


def find_class(task: str, registered_by: str) -> Any:
    """The registered environment class. ConfigError with the nearest name: there is none; MissingError: a
    requirement of RoboCasa or of the module `registered_by`."""
    import_robosuite()
    from robosuite.environments.base import REGISTERED_ENVS

    if task not in REGISTERED_ENVS:
        module = registered_by or ROBOCASA
        if module == ROBOCASA:
            check_robocasa()
        try:
            importlib.import_module(module)
        except (Exception, SystemExit) as error:  # robocasa asserts versions of other packages
            raise MissingError(
                f"env.registered_by = {module}: it is to register {task}, but importing it {raised(error)}; correct "
                "that"
            ) from error
        if task not in REGISTERED_ENVS:
            raise ConfigError(
                f"env.tasks = {task}: {nearest(task, REGISTERED_ENVS)}neither robosuite nor {module} has an "
                "environment of this name; correct it, or name the module that registers it in env.registered_by"
            )
    found = REGISTERED_ENVS[task]
    if is_kitchen(found):
        check_kitchen_assets()
    return found


def has_package(name: str) -> bool:
    """Whether the package is installed, without importing it."""
    return importlib.util.find_spec(name.partition(".")[0]) is not None


def is_kitchen(found: Any) -> bool:
    """Whether an environment class is RoboCasa's, whose resets rebuild the model."""
    return any(parent.__module__.partition(".")[0] == ROBOCASA for parent in found.__mro__)


def check_kitchen_assets() -> None:
    """MissingError: RoboCasa's downloaded assets are missing. Imports nothing."""
    spec = importlib.util.find_spec(ROBOCASA)
    root = Path(next(iter(spec.submodule_search_locations or ()), "")) if spec else Path()
    for folder in _ASSETS:
        if not (root / folder).is_dir():
            raise MissingError(
                f"RoboCasa's assets are missing ({root / folder}); run: python -m "
                "robocasa.scripts.download_kitchen_assets (about 10 GB, it asks for confirmation)"
            )


def check_robocasa() -> None:
    """MissingError: the package or its assets are missing. Imports nothing."""
    if not has_package(ROBOCASA):
        raise MissingError(
            "env.registered_by = robocasa: the package robocasa is not installed and not on PyPI; install it from "
            "https://github.com/robocasa/robocasa into a Python of its own (env.python)"
        )
    check_kitchen_assets()


def make(found: Any, robots: int, robot: str, controller: str, given: Mapping[str, Any]) -> Any:
    """An environment without robosuite's rendering. given: keyword arguments; those unknown to the class are
    dropped. ConfigError: robosuite rejects the robot, controller or an argument."""
    robosuite = import_robosuite()
    if robot not in robosuite.ALL_ROBOTS:
        raise ConfigError(
            f"env.robot = {robot}: {nearest(robot, robosuite.ALL_ROBOTS)}known robots are "
            f"{', '.join(sorted(robosuite.ALL_ROBOTS))}"
        )
    known = parameters(found)
    ours = {
        "robots": [robot] * robots,
        "controller_configs": _controller(robot, controller),
        "has_renderer": False,
        "has_offscreen_renderer": False,
        "use_camera_obs": False,
        "use_object_obs": True,
        "ignore_done": True,
        "renderer": "mujoco",
        "seed": MODEL_SEED,
    }
    arguments = {name: value for name, value in {**ours, **given}.items() if name in known}
    try:
        return found(**arguments)
    except (AssertionError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"env.tasks = {found.__name__}: it cannot be made with {robots} × {robot} and {controller}: it "
            f"{raised(error)}; choose another env.robot, env.controller or env.kwargs"
        ) from error


def _controller(robot: str, part: str) -> dict[str, Any]:
    """The robot's composite controller, with `part` for each arm that has another one."""
    from robosuite.controllers import load_composite_controller_config, load_part_controller_config

    config: dict[str, Any] = load_composite_controller_config(controller=None, robot=robot)
    parts = config["body_parts"]
    for arm in {"right", "left"} & set(parts):
        if parts[arm]["type"] != part:
            gripper = parts[arm].get("gripper", {"type": "GRIP"})
            parts[arm] = {**load_part_controller_config(default_controller=part), "gripper": gripper}
    return config


def parameters(found: Any) -> set[str]:
    """Keyword arguments of the class, following `**kwargs` into its parents."""
    names: set[str] = set()
    for parent in found.__mro__:
        if "__init__" in vars(parent):
            parameters = inspect.signature(parent.__init__).parameters.values()
            names |= {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
            if all(p.kind != p.VAR_KEYWORD for p in parameters):
                break
    return names - {"self"}


def _is_serious(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


#: Only some versions of robosuite have joint accelerations, and those are noisy.
_LEFT_OUT = "joint_acc"
_OBJECTS = "object"


class Instance:
    """An environment. new_models: each reset creates a new MuJoCo model, so `model` changes."""

    def __init__(self, env: Any, new_models: bool) -> None:
        self.env, self.new_models = env, new_models
        self._state: tuple[NDArray[np.float32], NDArray[np.float32]] | None = None

    @property
    def model(self) -> mujoco.MjModel:
        return self.env.sim.model._model

    @property
    def data(self) -> mujoco.MjData:
        return self.env.sim.data._data

    def reset(self, seed: int) -> None:
        self._state = None
        with seeded(seed, getattr(self.env, "rng", None)):
            self.env.reset()

    def step(self, action: NDArray[np.float64]) -> tuple[float, bool, bool]:
        self._state = None
        _, reward, ended, _ = self.env.step(action)
        refuse_unstable(self.data, f"at step {self.env.timestep}")
        return float(reward), bool(ended), bool(self.env._check_success())

    def state(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Object state [K] and proprioception of all robots [P] after the last step."""
        if self._state is None:
            self.env._update_observables(force=True)
            objects, proprio = [], []
            for name, observable in self.env._observables.items():
                if not (observable.is_enabled() and observable.is_active()):
                    continue  # objects that a single-object task omits
                if observable.modality == _OBJECTS:
                    objects.append(np.ravel(observable.obs))
                elif name.startswith("robot") and not name.endswith(_LEFT_OUT):
                    proprio.append(np.ravel(observable.obs))
            self._state = _joined(objects), _joined(proprio)
        return self._state

    def camera_names(self) -> tuple[str, ...]:
        return tuple(self.env.sim.model.camera_names)

    def close(self) -> None:
        self.env.close()


def _joined(parts: list[NDArray[Any]]) -> NDArray[np.float32]:
    return np.concatenate(parts).astype(np.float32) if parts else np.zeros(0, np.float32)


_GLOBAL = threading.Lock()


@contextlib.contextmanager
def seeded(seed: int, generator: np.random.Generator | None = None) -> Iterator[None]:
    """Seed all of robosuite's randomness from `seed` (0..2^63-1) inside the context, and restore the global states
    afterwards. Only one context per process at a time."""
    with _GLOBAL:
        saved: Any = np.random.get_state(), random.getstate()
        np.random.seed(np.random.SeedSequence(seed).generate_state(8))
        random.seed(seed)
        if generator is not None:  # in place: placement samplers hold it too
            generator.bit_generator.state = np.random.default_rng(seed).bit_generator.state
        try:
            yield
        finally:
            np.random.set_state(saved[0])
            random.setstate(saved[1])


#: Tasks whose objects are drawn from a range on the table, so that there is room around it; the others have bins.
PLACED = frozenset(
    {
        "Lift",
        "Stack",
        "Door",
        "TwoArmLift",
        "TwoArmHandover",
        "NutAssembly",
        "NutAssemblySingle",
        "NutAssemblySquare",
        "NutAssemblyRound",
    }
)


def place_beyond(env: Any) -> None:
    """Make an environment of `PLACED` draw object positions from a shell around robosuite's range: outside it in at
    least one horizontal coordinate, by up to a quarter of its extent. Applies to later models of the environment,
    too."""
    load = env._load_model

    def load_and_change() -> None:
        load()
        _change(env.placement_initializer)

    env._load_model = load_and_change
    _change(env.placement_initializer)


def _change(sampler: Any) -> None:
    for part in getattr(sampler, "samplers", {}).values():
        _change(part)
    if hasattr(sampler, "x_range") and not isinstance(getattr(sampler, "_sample_x", None), _Shell):
        shell = _Shell(sampler)
        sampler._sample_x, sampler._sample_y = shell, shell.y


class _Shell:
    """Replaces a sampler's draws of x and of the following y."""

    def __init__(self, sampler: Any) -> None:
        self.low, self.high = np.array([sorted(sampler.x_range), sorted(sampler.y_range)], np.float64).T
        self._drawn: NDArray[np.float64] = self.low

    def __call__(self, object_horizontal_radius: float) -> float:  # noqa: ARG002 - robosuite names it
        self._drawn = draw_beyond(np.random.uniform, self.low, self.high, self.high > self.low)
        return float(self._drawn[0])

    def y(self, object_horizontal_radius: float) -> float:  # noqa: ARG002
        return float(self._drawn[1])


#: Cameras of every task of robosuite, besides those of its robots.
_CAMERAS = ("agentview", "frontview", "birdview")
_SIDE = (*_CAMERAS, "sideview")


class KnownTask(NamedTuple):
    """A task of robosuite. other: the instruction in other words, for a policy that was not trained on it; objects:
    entries of its object state; robots: their number; proprio, gripper: entries per Panda of proprioception and of the
    action, with the task's gripper; dense: whether it has a shaped reward."""

    instruction: str
    other: str
    objects: int
    robots: int = 1
    proprio: int = 43
    gripper: int = 1
    dense: bool = True
    scene_cameras: tuple[str, ...] = _SIDE

    @property
    def cameras(self) -> tuple[str, ...]:
        own = (f"robot{i}_{name}" for i in range(self.robots) for name in ("robotview", "eye_in_hand"))
        return (*self.scene_cameras, *own)


#: Name in robosuite -> what is known about it (robosuite 1.5.1 and 1.5.2).
KNOWN = {
    name: KnownTask(**fields)
    for name, fields in tomllib.loads(Path(__file__).with_name("tasks.toml").read_text("utf-8")).items()
}
INSTRUCTIONS = {name: task.instruction for name, task in KNOWN.items()}

#: Entries of a Panda's action without the gripper, for part controllers whose actions lie in -1..1.
PANDA_ARM = {"OSC_POSE": 6, "OSC_POSITION": 3, "JOINT_POSITION": 7, "JOINT_VELOCITY": 7, "JOINT_TORQUE": 7}


def words_of(name: str) -> str:
    """The instruction of a task that is not in the table: `CloseFridge` -> `close fridge`."""
    spaced = "".join(f" {letter}" if letter.isupper() else letter for letter in name)
    return spaced.strip().lower()


class Sizes(NamedTuple):
    """Entries of the object state and of all robots' proprioception, and bounds of the action. objects: None if
    their number differs between episodes."""

    objects: int | None
    proprio: int
    low: tuple[float, ...]
    high: tuple[float, ...]


#: Sizes that were measured, by the arguments of `sizes_of`.
_measured: dict[str, Sizes] = {}


def sizes_of(task: str, robot: str, controller: str, registered_by: str, kwargs: Mapping[str, Any]) -> Sizes:
    """Sizes of a task: from the table, else from an environment that is created once per process."""
    known = KNOWN.get(task)
    robots = known.robots if known else 1
    if known and not kwargs and robot == "Panda" and controller in PANDA_ARM:
        entries = robots * (PANDA_ARM[controller] + known.gripper)
        return Sizes(known.objects, robots * known.proprio, (-1.0,) * entries, (1.0,) * entries)
    key = repr((task, robot, controller, registered_by, sorted(kwargs.items())))
    if key not in _measured:
        found = find_class(task, registered_by)
        with seeded(MODEL_SEED):
            instance = Instance(make(found, robots, robot, controller, kwargs), is_kitchen(found))
        try:
            instance.reset(0)
            objects, proprio = instance.state()
            low, high = instance.env.action_spec
            count = None if is_kitchen(found) else len(objects)
            _measured[key] = Sizes(count, len(proprio), tuple(low), tuple(high))
        finally:
            instance.close()
    return _measured[key]
