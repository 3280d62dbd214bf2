"""Creates a ManiSkill environment from settings, without its prompts on stdin, and explains its errors; and ManiSkill's
requirements of the machine: a Vulkan driver, and a GPU for its GPU backend.

The observation and reward modes are those that the task's class supports. Digital twins of real scenes, such as the
bridge tasks, support only `rgb+segmentation`, because they replace the image's background by a photograph; their
cameras have the size and focal length of the real camera.

`probe` starts the simulator in a separate process, `python -m …maniskill.env SETTINGS`: a broken Vulkan driver may
crash or hang a process, and ManiSkill uses stdout and stdin. SETTINGS is JSON, and so is the last line of stdout.

SAPIEN, ManiSkill's simulator, creates materials on a Vulkan device, so it needs a driver even without rendering.
Without a GPU, Mesa's software driver (lavapipe) works; SAPIEN 3.0.3 does not accept Mesa 22.3.
"""

from __future__ import annotations

import difflib
import importlib
import json
import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from polyrhythm.conformance import Finding, raised
from polyrhythm.envs.mujoco import count_gpus
from polyrhythm.errors import ConfigError, MissingError, PolyrhythmError, as_root
from polyrhythm.imports import run_module
from polyrhythm.plugins.simulators.maniskill.settings import ManiSkillFields
from polyrhythm.specs import EnvSpec
from polyrhythm.specs.plain import from_plain

#: Most characters that are quoted of an error of ManiSkill.
_QUOTED = 200


def make_env(settings: ManiSkillFields, task: str, rows: int) -> Any:
    """A ManiSkill environment (mani_skill.envs.sapien_env.BaseEnv) of `rows` parallel rows, without wrappers.

    ConfigError: an unknown task or a rejected setting; MissingError: assets or a driver.
    """
    from mani_skill.utils.assets import data

    registered = find_registered(task)
    modes = modes_of(settings, task, registered.cls)
    missing, needed = [], []  # for which ManiSkill would ask on stdin
    for name in registered.asset_download_ids or ():
        group = name in data.DATA_GROUPS
        sources = data.expand_data_group_into_individual_data_source_ids(name) if group else [name]
        lacking = [source for source in sources if not data.is_data_source_downloaded(source)]
        missing += lacking
        needed += [name] if lacking else []
    if missing:
        raise _lacks_assets(task, ", ".join(sorted(missing)[:3]), needed)
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
        with no_questions(task):
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


def _lacks_assets(task: str, what: str, names: Sequence[str]) -> MissingError:
    """names: ManiSkill's names of the downloads; its command does not know the ids of user-defined tasks."""
    commands = "; ".join(f"python -m mani_skill.utils.download_asset {name}" for name in names)
    return MissingError(f"env.tasks = {task}: its assets are not on this machine ({what}); run: {commands}")


@contextmanager
def no_questions(task: str) -> Iterator[None]:
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
    # A task without a reward has the mode `none`; its reward is then computed from flags of `info`.
    known = [mode for mode in kind.SUPPORTED_REWARD_MODES if mode != "none"]
    reward = "none" if not known and settings.reward == "sparse" else settings.reward
    if reward not in (*known, "none"):
        fix = f"choose {', '.join(known)}" if known else "choose sparse, since this one has no reward of its own"
        raise ConfigError(f"env.reward = {settings.reward}: {task} has no such reward; {fix}")
    return Modes(observation, reward, observation == twin)


#: Parts of SAPIEN's messages where no driver serves.
_NO_DRIVER = ("failed to find a rendering device", "failed to find a supported physical device", "vk::", "vulkan")
#: Variables that name the manifests of drivers, the one that wins first.
_VARIABLES = ("VK_DRIVER_FILES", "VK_ICD_FILENAMES")
#: Folders in which Vulkan looks for drivers.
_FOLDERS = ("/usr/share/vulkan/icd.d", "/etc/vulkan/icd.d", "/usr/local/share/vulkan/icd.d")
_PAGE = "docs/simulators/maniskill.md"


def is_about_driver(message: str) -> bool:
    """Whether this is SAPIEN's message about a missing or unsuitable Vulkan driver."""
    return any(part in message.lower() for part in _NO_DRIVER)


def vulkan_manifests() -> list[str]:
    """Vulkan's driver manifests: those named in the environment, else the installed ones."""
    if name := _variable():
        return [file for file in os.environ[name].split(os.pathsep) if Path(file).is_file()]
    return [str(file) for folder in _FOLDERS if Path(folder).is_dir() for file in sorted(Path(folder).glob("*.json"))]


def how_to_get_driver() -> str:
    """The command that installs a suitable Vulkan driver on this machine."""
    if (name := _variable()) and not vulkan_manifests():
        return f"unset {name}  # {os.environ[name]} is not a file"
    root = as_root()
    if _codename() == "bookworm":
        line = "deb http://deb.debian.org/debian bookworm-backports main"
        return (
            f"echo '{line}' | {root}tee /etc/apt/sources.list.d/backports.list && {root}apt-get update && "
            f"{root}apt-get install -y -t bookworm-backports mesa-vulkan-drivers"
        )
    return f"{root}apt-get install -y mesa-vulkan-drivers  # Mesa 25 is known to work, 22.3 not to; {_PAGE}"


def _variable() -> str:
    """The environment variable that names drivers, "" if none is set."""
    return next((name for name in _VARIABLES if os.environ.get(name)), "")


def _codename() -> str:
    """Codename of the Debian or Ubuntu release, "" if unknown."""
    release = Path("/etc/os-release")
    if not release.is_file():
        return ""
    lines = release.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line.partition("=")[2].strip('"') for line in lines if line.startswith("VERSION_CODENAME=")), "")


def examine(tried: ManiSkillFields) -> Iterator[Finding]:
    """Findings on Vulkan drivers, a trial run of `tried` in another process, and GPUs, as they become known."""
    manifests = vulkan_manifests()
    if manifests:
        yield Finding("Vulkan drivers", "ok", ", ".join(manifests))
    else:
        yield Finding("Vulkan drivers", "missing", "none is found; a state needs one too", how_to_get_driver())
    gpus = count_gpus()
    if gpus:
        yield Finding("GPU", "ok", f"{gpus} for backend: gpu, which was never run")
    else:
        yield Finding("GPU", "ok", "none: backend: cpu (backend: gpu needs one)")
    name, (height, width) = tried.tasks[0], tried.picture
    try:
        seen = probe(tried)
    except PolyrhythmError as error:
        problem, _, fix = str(error).partition("; run: ")
        yield Finding(name, "missing", problem, fix)
        return
    frame = f"a frame of {width}x{height} pixels {seen.observe_ms:.0f} ms"
    yield Finding(name, "ok", f"ready after {seen.start_s:.1f} s; a step takes {seen.step_ms:.1f} ms, {frame}")


_PATIENCE_S = 240.0


class Probed(NamedTuple):
    """step_ms, observe_ms: median times of one row; start_s: seconds to import ManiSkill and make the instances."""

    spec: EnvSpec
    start_s: float
    step_ms: float
    observe_ms: float


def probe(settings: ManiSkillFields) -> Probed:
    """Start the simulator once with these settings and return its spec data; cached.

    MissingError: a package, asset or driver is missing; ConfigError: an unknown task or setting.
    """
    affects = (*_VARIABLES, "CUDA_VISIBLE_DEVICES", "MS_ASSET_DIR")  # whether the simulator starts
    return _probe(named_tasks(settings), settings.model_dump_json(), tuple(map(os.environ.get, affects)))


@lru_cache(maxsize=32)
def _probe(what: str, given: str, machine: object) -> Probed:  # noqa: ARG001 - part of the cache key
    try:
        done = run_module("polyrhythm.plugins.simulators.maniskill.env", given, _PATIENCE_S)
    except subprocess.TimeoutExpired as error:
        raise MissingError(
            f"{what}: ManiSkill did not start within {_PATIENCE_S:.0f} s; run: polyrhythm doctor maniskill"
        ) from error
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        told = " ".join(done.stderr.split())[-300:]
        raise MissingError(
            f"{what}: ManiSkill ended its process with status {done.returncode} ({told or 'it printed nothing'}); "
            "install another Vulkan driver, see: polyrhythm doctor maniskill"
        )
    answer = json.loads(lines[-1])
    if "problem" in answer:
        raise (MissingError if answer["missing"] else ConfigError)(answer["problem"])
    return Probed(from_plain(answer["spec"]), answer["start_s"], answer["step_ms"], answer["observe_ms"])


def named_tasks(settings: ManiSkillFields) -> str:
    return f"env.tasks = {', '.join(settings.tasks)}"
