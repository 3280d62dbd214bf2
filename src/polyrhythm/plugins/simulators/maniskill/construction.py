"""Creates a ManiSkill environment from settings, without its prompts on stdin, and explains its errors.

The observation and reward modes are those that the task's class supports. Digital twins of real scenes, such as the
bridge tasks, support only `rgb+segmentation`, because they replace the image's background by a photograph; their
cameras have the size and focal length of the real camera.
"""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from polyrhythm.conformance import raised
from polyrhythm.errors import ConfigError, MissingError
from polyrhythm.plugins.simulators.maniskill.drivers import how_to_get_driver, is_about_driver
from polyrhythm.plugins.simulators.maniskill.settings import ManiSkillFields

#: Most characters that are quoted of an error of ManiSkill.
_QUOTED = 200


def make_env(settings: ManiSkillFields, task: str, rows: int) -> Any:
    """A ManiSkill environment (mani_skill.envs.sapien_env.BaseEnv) of `rows` parallel rows, without wrappers.

    ConfigError: an unknown task or a rejected setting; MissingError: assets or a driver.
    """
    registered = find_registered(task)
    modes = modes_of(settings, task, registered.cls)
    _refuse_missing_assets(task, registered)
    height, width = settings.picture
    own_size = modes.is_twin or settings.observation == "state"
    chosen: dict[str, Any] = {"control_mode": settings.control_mode, "robot_uids": settings.robot}
    arguments = {
        **(registered.default_kwargs or {}),
        **settings.kwargs,
        **{name: value for name, value in chosen.items() if value},
        "num_envs": rows,
        "obs_mode": modes.observation,
        "reward_mode": modes.reward,
        "sim_backend": "physx_cuda" if settings.simulates_on_gpu else "physx_cpu",
        "render_backend": "gpu" if settings.draws_on_gpu else "cpu",
        "sensor_configs": {
            **settings.kwargs.get("sensor_configs", {}),
            **({} if own_size else {"width": width, "height": height}),
        },
    }
    try:
        with _no_questions(task):
            return registered.cls(**arguments)
    except MissingError:
        raise
    except (Exception, SystemExit) as error:
        raise _explained(settings, task, error) from error


def episode_steps(settings: ManiSkillFields, task: str) -> int:
    """Env steps per episode of this task. ConfigError: neither the settings nor the task define it."""
    limit = settings.max_steps or find_registered(task).max_episode_steps
    if not limit:
        raise ConfigError(f"env.max_steps = 0: {task} registers no time limit; set max_steps above 0")
    return int(limit)


def find_registered(task: str) -> Any:
    """ManiSkill's registration of `ID` or `module:ID`. Raises ConfigError if there is none."""
    import mani_skill.envs
    from mani_skill.utils.registration import REGISTERED_ENVS

    assert mani_skill.envs, "importing it registers ManiSkill's own tasks"
    module, _, name = task.rpartition(":")
    if module:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            raise MissingError(
                f"env.tasks = {task}: there is no module {error.name} here; install the package that registers the "
                "task, or add its folder to PYTHONPATH"
            ) from error
        except Exception as error:  # a user's module may raise anything
            raise ConfigError(
                f"env.tasks = {task}: importing {module} {raised(error)}; correct it, or its name"
            ) from error
    if name not in REGISTERED_ENVS:
        near = ", ".join(difflib.get_close_matches(name, REGISTERED_ENVS, n=3, cutoff=0.0))
        raise ConfigError(f"env.tasks = {task}: ManiSkill has no such task; the nearest are {near}")
    return REGISTERED_ENVS[name]


def _refuse_missing_assets(task: str, registered: Any) -> None:
    """MissingError: files of the task are missing; ManiSkill would ask on stdin to download them."""
    from mani_skill.utils.assets import data

    missing, needed = [], []
    for name in registered.asset_download_ids or ():
        group = name in data.DATA_GROUPS
        sources = data.expand_data_group_into_individual_data_source_ids(name) if group else [name]
        lacking = [source for source in sources if not data.is_data_source_downloaded(source)]
        missing += lacking
        needed += [name] if lacking else []
    if missing:
        raise _lacks_assets(task, ", ".join(sorted(missing)[:3]), needed)


def _lacks_assets(task: str, what: str, names: Sequence[str]) -> MissingError:
    """names: ManiSkill's names of the downloads; its command does not know the ids of user-defined tasks."""
    commands = "; ".join(f"python -m mani_skill.utils.download_asset {name}" for name in names)
    return MissingError(f"env.tasks = {task}: its assets are not on this machine ({what}); run: {commands}")


@contextmanager
def _no_questions(task: str) -> Iterator[None]:
    """Inside the context, ManiSkill's download prompt raises MissingError."""
    from mani_skill.agents import REGISTERED_AGENTS
    from mani_skill.utils import download_asset

    def refuse(question: str) -> bool:
        robot = re.match(r"Robot (\S+) has assets", question)
        if robot and (known := REGISTERED_AGENTS.get(robot[1])) and known.asset_download_ids:
            raise _lacks_assets(task, f"robot {robot[1]}", known.asset_download_ids)
        raise _lacks_assets(task, question.partition(" which ")[0], ["ID, with the ID that is missing"])

    asks, download_asset.prompt_yes_no = download_asset.prompt_yes_no, refuse
    try:
        yield
    finally:
        download_asset.prompt_yes_no = asks


def _explained(settings: ManiSkillFields, task: str, error: BaseException) -> ConfigError:
    message = " ".join(str(error).split())
    if is_about_driver(message):
        return MissingError(
            f"env.renderer = {settings.renderer}: ManiSkill finds no Vulkan driver that it can use ({message}); run: "
            f"{how_to_get_driver()}"
        )
    if 'find device "cuda"' in message:
        field = "backend" if settings.simulates_on_gpu else "renderer"
        return MissingError(f"env.{field} = gpu: there is no CUDA device; set it to cpu")
    if "not in supported modes" in message:
        known = message.partition("supported modes:")[2].strip(" []").replace("'", "")
        return ConfigError(f"env.control_mode = {settings.control_mode}: {task}'s robot lacks it; it has {known}")
    if "not found in the dict of registered agents" in message:
        return ConfigError(f"env.robot = {settings.robot}: ManiSkill has no such robot; leave it empty for the task's")
    if isinstance(error, FileNotFoundError):
        return MissingError(
            f"env.tasks = {task}: it needs a file that is not on this machine ({message[:_QUOTED]}); put the task's "
            "assets there"
        )
    if isinstance(error, TypeError) and "argument" in message:
        return ConfigError(f"env.kwargs: the class of {task} takes others ({message[:_QUOTED]}); correct env.kwargs")
    return ConfigError(
        f"env.tasks = {task}: ManiSkill cannot make it ({type(error).__name__}: {message[:_QUOTED]}); correct env"
    )


#: Our observation → the parts of ManiSkill's mode.
_PARTS = {"state": "state", "rgb": "rgb", "rgbd": "rgb+depth"}


class Modes(NamedTuple):
    """observation, reward: ManiSkill's names. is_twin: the task is a digital twin; its cameras keep their own size."""

    observation: str
    reward: str
    is_twin: bool


def modes_of(settings: ManiSkillFields, task: str, kind: Any) -> Modes:
    """The modes for a task of this class. ConfigError: it does not support the requested ones."""
    supported = tuple(kind.SUPPORTED_OBS_MODES)
    parts = _PARTS[settings.observation]
    twin = f"{parts}+segmentation"
    is_any = "any_textures" in supported and parts != "state"
    if parts in supported or is_any:
        observation = parts
    elif twin in supported:
        observation = twin
    else:
        known = [name for name, mode in _PARTS.items() if {mode, f"{mode}+segmentation"} & {*supported}]
        fix = f"choose {', '.join(known)}" if known else "choose another task"
        raise ConfigError(f"env.observation = {settings.observation}: {task} has no such observation; {fix}")
    return Modes(observation, _reward_of(settings, task, kind), observation == twin)


def _reward_of(settings: ManiSkillFields, task: str, kind: Any) -> str:
    """The reward mode: `none` for a task without a reward, whose reward is then computed from flags of `info`."""
    known = [mode for mode in kind.SUPPORTED_REWARD_MODES if mode != "none"]
    if settings.reward in known:
        return settings.reward
    if not known and settings.reward == "sparse":
        return "none"
    fix = f"choose {', '.join(known)}" if known else "choose sparse, since this one has no reward of its own"
    raise ConfigError(f"env.reward = {settings.reward}: {task} has no such reward; {fix}")
