"""ManiSkill's tasks: instructions, and positions beyond the range from which a task draws. Does not need a simulator.

Some tasks, such as RLinf's PutOnPlateInScene25, return instructions from `get_language_instruction()`, one sentence per
object, and number their episodes. Such a task becomes one task per sentence, because a policy's instructions are a
table of tasks; an episode is then drawn from those of its sentence. The episode number is a mixed-radix number whose
last digits are the objects' positions and rotations (`xyz_configs`, `quat_configs`), which do not affect the sentence:
one episode is started for each value of the other digits.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from polyrhythm.errors import ConfigError
from polyrhythm.plugins.simulators.variation import draw_beyond
from polyrhythm.specs.hashing import mix

_TASKS = tomllib.loads(Path(__file__).with_name("tasks.toml").read_text("utf-8"))
#: Task id → instruction of the policy.
INSTRUCTIONS: dict[str, str] = {name: task["instruction"] for name, task in _TASKS.items()}
#: The same tasks in other words, for an evaluation out of distribution.
OTHER_WORDS: dict[str, str] = {name: task["other"] for name, task in _TASKS.items()}


def other_words_of(task: str) -> str | None:
    """The task's paraphrased instruction; None for a task that is not listed."""
    return OTHER_WORDS.get(task.rpartition(":")[2])


def instruction_of(task: str, own: str = "") -> str:
    """The task's instruction; for a task that is not listed `own`, the text from its code, or else the words of its
    id: `RotateValveLevel0-v1` gives "rotate valve level 0". The module of `module:ID` is omitted."""
    identifier = task.rpartition(":")[2]
    if known := INSTRUCTIONS.get(identifier) or own:
        return known
    name = re.sub(r"-v\d+$", "", identifier)
    words = re.findall(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+|\d+", name)
    return " ".join(words).lower() or task


#: Hash domain of the draws of episodes.
_DOMAIN = 9
#: Most episodes that are begun to read their sentences.
_MOST = 10_000


class TaskSentences(NamedTuple):
    """starts: sentence -> numbers [N] of the first episode of each block with this sentence; length: of each block."""

    starts: Mapping[str, NDArray[np.int64]]
    length: int

    def episode(self, sentence: str, seed: int) -> int:
        """Number of the episode with this seed, drawn uniformly from all with this sentence."""
        draws = np.random.default_rng(mix(seed, _DOMAIN))
        return int(draws.choice(self.starts[sentence]) + draws.integers(self.length))


def own_sentences(env: Any) -> list[str]:
    """The instruction of each row's current episode from the task's code; empty if there is none."""
    ask = getattr(env, "get_language_instruction", None)
    if not callable(ask):
        return []
    told = ask()
    return [told] * env.num_envs if isinstance(told, str) else [str(one) for one in told]


def read_sentences(env: Any, task: str, begin: Callable[[NDArray[np.int64]], object]) -> TaskSentences | None:
    """The sentences of a task with numbered episodes; None for any other. begin: starts the episodes with these
    numbers, one per row. ConfigError: there are too many to read."""
    total = int(getattr(env, "total_num_trials", 0))
    if not total or not own_sentences(env):
        return None
    length = len(getattr(env, "xyz_configs", ())) * len(getattr(env, "quat_configs", ())) or 1
    length = 1 if total % length else length
    if total // length > _MOST:
        raise ConfigError(
            f"env.tasks = {task}: its {total} episodes have too many instructions to read; give it one by "
            f"env.instructions: {{{task}: ...}}"
        )
    numbers = np.arange(0, total, length, dtype=np.int64)
    found: dict[str, list[int]] = {}
    for chunk in np.array_split(numbers, -(-len(numbers) // env.num_envs)):
        begin(np.resize(chunk, env.num_envs))
        for number, sentence in zip(chunk, own_sentences(env), strict=False):
            found.setdefault(sentence, []).append(int(number))
    return TaskSentences({sentence: np.array(starts, np.int64) for sentence, starts in found.items()}, length)


#: Hash domain of the draws, which are independent of the usual ones.
_PLACES = 8


class PlacedObjects(NamedTuple):
    """name: the task's attribute of an object; half: half the edge, in metres, of the square around the origin from
    which its position is drawn, unless the task has attributes for it; followers: attributes of objects that keep
    their position relative to it."""

    name: str
    half: float = 0.1
    followers: tuple[str, ...] = ()


#: Task → what is placed, read in its `_initialize_episode`. The others have ranges that depend on each other.
PLACED: Mapping[str, tuple[PlacedObjects, ...]] = {
    "PickCube-v1": (PlacedObjects("cube"), PlacedObjects("goal_site")),
    "PushCube-v1": (PlacedObjects("obj", followers=("goal_region",)),),
    "PullCube-v1": (PlacedObjects("obj", followers=("goal_region",)),),
    "LiftPegUpright-v1": (PlacedObjects("peg"),),
}


def place_beyond(env: Any, task: str, seed: int) -> None:
    """Move the objects of a task of `PLACED`, with one row, to a shell around their range: outside it in x or y, by
    up to a quarter of its extent. Heights and rotations do not change."""
    from mani_skill.utils.structs import Pose

    draws = np.random.default_rng(mix(seed, _PLACES))
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
