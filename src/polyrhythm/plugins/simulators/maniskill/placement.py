"""Places objects and goals beyond the range in which a ManiSkill task draws them, after a reset."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from polyrhythm.plugins.simulators.variation import draw_beyond
from polyrhythm.specs.hashing import mix

#: Hash domain of the draws, which are independent of the usual ones.
_DOMAIN = 8


class Placed(NamedTuple):
    """name: the task's attribute of an object; half: half an edge, in metres, of the square around the origin from
    which it is drawn, unless the task has attributes for both; followers: attributes of what keeps its place beside it.
    """

    name: str
    half: float = 0.1
    followers: tuple[str, ...] = ()


#: Task → what is placed, read in its `_initialize_episode`. The others have ranges that depend on each other.
PLACED: Mapping[str, tuple[Placed, ...]] = {
    "PickCube-v1": (Placed("cube"), Placed("goal_site")),
    "PushCube-v1": (Placed("obj", followers=("goal_region",)),),
    "PullCube-v1": (Placed("obj", followers=("goal_region",)),),
    "LiftPegUpright-v1": (Placed("peg"),),
}


def place_beyond(env: Any, task: str, seed: int) -> None:
    """Move what was just placed in the only row of a task of `PLACED` to a shell around its range: outside of it in x
    or y, by up to a quarter of its extent. Heights and turns stay."""
    from mani_skill.utils.structs import Pose

    draws = np.random.default_rng(mix(seed, _DOMAIN))
    for one in PLACED[task]:
        half = getattr(env, "cube_spawn_half_size", one.half)
        middle = np.array(getattr(env, "cube_spawn_center", (0.0, 0.0)), np.float64)
        drawn = draw_beyond(draws.uniform, middle - half, middle + half, np.ones(2, np.bool_))
        shift = np.zeros(3, np.float32)
        shift[:2] = drawn - getattr(env, one.name).pose.p[0, :2].cpu().numpy()
        for name in (one.name, *one.followers):
            actor = getattr(env, name)
            moved = actor.pose.p + actor.pose.p.new_tensor(shift)
            actor.set_pose(Pose.create_from_pq(moved, actor.pose.q))
