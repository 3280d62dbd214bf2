"""Finds and creates robosuite environments: silent import, tasks by name, controllers, RoboCasa's requirements."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from polyrhythm.config.nearest import nearest
from polyrhythm.conformance import raised
from polyrhythm.envs.mujoco import RenderingUnavailable, choose_gl_backend
from polyrhythm.errors import ConfigError, MissingError, install_command

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
    with _kept_variable("MUJOCO_GL"):
        return importlib.import_module("robosuite")


def find_class(task: str, registered_by: str) -> Any:
    """The registered environment class. ConfigError with the nearest name: there is none; MissingError: a
    requirement of RoboCasa or of the module `registered_by`."""
    import_robosuite()
    from robosuite.environments.base import REGISTERED_ENVS

    if task not in REGISTERED_ENVS:
        _import_registering(registered_by or ROBOCASA, task)
    if task not in REGISTERED_ENVS:
        raise ConfigError(
            f"env.tasks = {task}: {nearest(task, REGISTERED_ENVS)}neither robosuite nor {registered_by or ROBOCASA} "
            "has an environment of this name; correct it, or name the module that registers it in env.registered_by"
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
    known = _parameters(found)
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


def unknown_arguments(found: Any, given: Mapping[str, Any]) -> list[str]:
    """Names in `given` that the environment class does not accept."""
    return sorted(set(given) - _parameters(found))


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


def _parameters(found: Any) -> set[str]:
    """Keyword arguments of the class, following `**kwargs` into its parents."""
    names: set[str] = set()
    for parent in found.__mro__:
        if "__init__" in vars(parent):
            parameters = inspect.signature(parent.__init__).parameters.values()
            names |= {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
            if all(p.kind != p.VAR_KEYWORD for p in parameters):
                break
    return names - {"self"}


def _import_registering(module: str, task: str) -> None:
    """Import the module that registers the task. MissingError: the import failed."""
    if module == ROBOCASA:
        check_robocasa()
    try:
        importlib.import_module(module)
    except (Exception, SystemExit) as error:  # robocasa asserts versions of other packages
        raise MissingError(
            f"env.registered_by = {module}: it is to register {task}, but importing it {raised(error)}; correct that"
        ) from error


def _is_serious(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


@contextlib.contextmanager
def _kept_variable(name: str) -> Iterator[None]:
    """Restore an environment variable: robosuite sets MUJOCO_GL at import, which child processes would inherit."""
    before = os.environ.get(name)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before
