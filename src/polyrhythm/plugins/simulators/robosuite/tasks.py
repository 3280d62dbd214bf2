"""Table of robosuite's tasks: instructions, and array sizes with the Panda, so that a spec needs no simulator. Other
sizes are measured on one environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from polyrhythm.plugins.simulators.robosuite.instance import Instance, seeded
from polyrhythm.plugins.simulators.robosuite.library import MODEL_SEED, find_class, is_kitchen, make

#: Cameras of every task of robosuite, besides those of its robots.
_CAMERAS = ("agentview", "frontview", "birdview")
_SIDE = (*_CAMERAS, "sideview")


class KnownTask(NamedTuple):
    """A task of robosuite. objects: entries of its object state; robots: their number; proprio, gripper: entries per
    Panda of proprioception and of the action, with the task's gripper; dense: whether it has a shaped reward."""

    instruction: str
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
    "Lift": KnownTask("lift the red cube", 10),
    "Stack": KnownTask("put the red cube on the green cube", 23),
    "NutAssembly": KnownTask("put each nut on the peg of its shape", 28),
    "NutAssemblySingle": KnownTask("put the nut on the peg of its shape", 15),
    "NutAssemblySquare": KnownTask("put the square nut on the square peg", 14),
    "NutAssemblyRound": KnownTask("put the round nut on the round peg", 14),
    "PickPlace": KnownTask("put every object into its compartment", 56, scene_cameras=_CAMERAS),
    "PickPlaceSingle": KnownTask("put the object into its compartment", 15, scene_cameras=_CAMERAS),
    "PickPlaceMilk": KnownTask("put the milk carton into its compartment", 14, scene_cameras=_CAMERAS),
    "PickPlaceBread": KnownTask("put the bread into its compartment", 14, scene_cameras=_CAMERAS),
    "PickPlaceCereal": KnownTask("put the cereal box into its compartment", 14, scene_cameras=_CAMERAS),
    "PickPlaceCan": KnownTask("put the can into its compartment", 14, scene_cameras=_CAMERAS),
    "Door": KnownTask("open the door by its handle", 14),
    "Wipe": KnownTask("wipe the marks off the table", 8, proprio=40, gripper=0),
    "ToolHang": KnownTask("put the hook into the stand, then hang the wrench on it", 44, dense=False),
    "TwoArmLift": KnownTask("lift the pot level by both handles", 19, robots=2),
    "TwoArmPegInHole": KnownTask("push the peg of one arm through the hole of the other", 17, 2, 39, 0),
    "TwoArmHandover": KnownTask("pass the hammer from one arm to the other", 16, robots=2),
    "TwoArmTransport": KnownTask(
        "move the hammer to the other arm's bin and the trash to the trash bin",
        41,
        robots=2,
        dense=False,
        scene_cameras=(*_SIDE, "shouldercamera0", "shouldercamera1"),
    ),
}

INSTRUCTIONS = {name: task.instruction for name, task in KNOWN.items()}

#: The same tasks in other words, for a policy that was not trained on them.
OTHER_WORDS = {
    "Lift": "raise the crimson block",
    "Stack": "pile the crimson block onto the jade one",
    "NutAssembly": "slip every ring over the rod that fits it",
    "NutAssemblySingle": "slip the ring over the rod that fits it",
    "NutAssemblySquare": "slip the angular ring over the angular rod",
    "NutAssemblyRound": "slip the circular ring over the circular rod",
    "PickPlace": "sort all items into their bins",
    "PickPlaceSingle": "sort the item into its bin",
    "PickPlaceMilk": "sort the milk into its bin",
    "PickPlaceBread": "sort the loaf into its bin",
    "PickPlaceCereal": "sort the muesli into its bin",
    "PickPlaceCan": "sort the tin into its bin",
    "Door": "turn the latch and swing the door wide",
    "Wipe": "clean the dirty spots of the desk",
    "ToolHang": "fit the rack into its base and hook the tool onto it",
    "TwoArmLift": "raise the bucket by its two grips",
    "TwoArmPegInHole": "bring the rod of one robot into the other's opening",
    "TwoArmHandover": "give the tool to the other robot",
    "TwoArmTransport": "give the tool to the other robot and throw the rubbish away",
}

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


def tabled(task: str, robot: str, controller: str) -> Sizes | None:
    """Sizes from the table; None if it does not contain them."""
    known = KNOWN.get(task)
    if known is None or robot != "Panda" or controller not in PANDA_ARM:
        return None
    entries = known.robots * (PANDA_ARM[controller] + known.gripper)
    return Sizes(known.objects, known.robots * known.proprio, (-1.0,) * entries, (1.0,) * entries)


class _Key(NamedTuple):
    task: str
    robot: str
    controller: str
    registered_by: str
    kwargs: str


def sizes_of(task: str, robot: str, controller: str, registered_by: str, kwargs: Mapping[str, Any]) -> Sizes:
    """Sizes of a task: from the table, else from an environment that is created once per process."""
    if not kwargs and (found := tabled(task, robot, controller)):
        return found
    key = _Key(task, robot, controller, registered_by, repr(sorted(kwargs.items())))
    if key not in _measured:
        _measured[key] = _measure(key, kwargs)
    return _measured[key]


_measured: dict[_Key, Sizes] = {}


def _measure(key: _Key, kwargs: Mapping[str, Any]) -> Sizes:
    found = find_class(key.task, key.registered_by)
    robots = KNOWN[key.task].robots if key.task in KNOWN else 1
    with seeded(MODEL_SEED):
        instance = Instance(make(found, robots, key.robot, key.controller, kwargs), is_kitchen(found))
    try:
        instance.reset(0)
        objects, proprio = instance.state()
        low, high = instance.env.action_spec
        return Sizes(None if is_kitchen(found) else len(objects), len(proprio), tuple(low), tuple(high))
    finally:
        instance.close()
