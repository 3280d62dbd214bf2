"""Which of ManiSkill's modes of observation and reward serve the settings, by what a task's class supports.

Digital twins of real scenes, such as the bridge tasks, support `rgb+segmentation` alone, because they lay a photograph
over the background of the picture; their cameras have the size and the focal length of the real one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from polyrhythm.errors import ConfigError

if TYPE_CHECKING:
    from polyrhythm.plugins.simulators.maniskill.settings import ManiSkillSettings

#: Our observation → the parts of ManiSkill's mode.
_PARTS = {"state": "state", "rgb": "rgb", "rgbd": "rgb+depth"}


class Modes(NamedTuple):
    """observation, reward: ManiSkill's names. is_twin: the task is a digital twin; its cameras keep their own size."""

    observation: str
    reward: str
    is_twin: bool


def modes_of(settings: ManiSkillSettings, task: str, kind: Any) -> Modes:
    """The modes for a task of this class. Raises ConfigError if it supports none that the settings ask for."""
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


def _reward_of(settings: ManiSkillSettings, task: str, kind: Any) -> str:
    """`none` for a task without a reward of its own: then the reward is made of flags of `info`."""
    known = [mode for mode in kind.SUPPORTED_REWARD_MODES if mode != "none"]
    if settings.reward in known:
        return settings.reward
    if not known and settings.reward == "sparse":
        return "none"
    fix = f"choose {', '.join(known)}" if known else "choose sparse, since this one has no reward of its own"
    raise ConfigError(f"env.reward = {settings.reward}: {task} has no such reward; {fix}")
