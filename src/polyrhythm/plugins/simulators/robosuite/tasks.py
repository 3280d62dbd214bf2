"""Table of robosuite's tasks: instructions, and array sizes with the Panda, so that a spec needs no simulator. Other
sizes are measured on one environment."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from polyrhythm.plugins.simulators.robosuite.library import MODEL_SEED, Instance, find_class, is_kitchen, make, seeded

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
