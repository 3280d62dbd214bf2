"""Sizes of a task's arrays: from the table for robosuite's tasks with the Panda, else measured on one environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from polyrhythm.plugins.simulators.robosuite.instance import Instance
from polyrhythm.plugins.simulators.robosuite.library import MODEL_SEED, find_class, is_kitchen, make
from polyrhythm.plugins.simulators.robosuite.randomness import seeded
from polyrhythm.plugins.simulators.robosuite.tasks import KNOWN, PANDA_ARM


class Sizes(NamedTuple):
    """Numbers in the object state and in all robots' proprioception, bounds of the action. objects: None if they
    differ between episodes."""

    objects: int | None
    proprio: int
    low: tuple[float, ...]
    high: tuple[float, ...]


def tabled(task: str, robot: str, controller: str) -> Sizes | None:
    """Sizes by the table; None if it does not have them."""
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
    """Sizes of a task; without the table's by making an environment, once per process."""
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
