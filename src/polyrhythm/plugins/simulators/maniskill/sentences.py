"""Instructions that the tasks' own code gives, by `get_language_instruction()`.

Some tasks have a sentence for each object and say which of their numbered episodes they have: RLinf's
PutOnPlateInScene25 does. Such a task becomes one task per sentence, because a policy's instructions are a table of
tasks. An episode of a seed is then drawn among the episodes of its sentence.

The number of an episode is a mixed-radix number whose last digits are the positions and turns of the objects
(`xyz_configs`, `quat_configs`), which have no part in the sentence: one episode is begun for each value of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from polyrhythm.errors import ConfigError
from polyrhythm.specs.hashing import mix

#: Hash domain of the draws of episodes.
_DOMAIN = 9
#: Most episodes that are begun to read their sentences.
_MOST = 10_000


class Sentences(NamedTuple):
    """starts: sentence → numbers [N] at which blocks of episodes with this sentence begin; length: of each block."""

    starts: Mapping[str, NDArray[np.int64]]
    length: int

    def episode(self, sentence: str, seed: int) -> int:
        """The number of the episode of this seed, among all that have this sentence with equal probability."""
        draws = np.random.default_rng(mix(seed, _DOMAIN))
        return int(draws.choice(self.starts[sentence]) + draws.integers(self.length))


def own_sentences(env: Any) -> list[str]:
    """What the task's code calls the present episode of each row; empty for a task that says nothing."""
    ask = getattr(env, "get_language_instruction", None)
    if not callable(ask):
        return []
    told = ask()
    return [told] * env.num_envs if isinstance(told, str) else [str(one) for one in told]


def read_sentences(env: Any, task: str, begin: Callable[[NDArray[np.int64]], object]) -> Sentences | None:
    """The sentences of a task with numbered episodes; None for any other. begin: begins the episodes of these numbers,
    one in each row. Raises ConfigError if there are too many to read."""
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
    return Sentences({sentence: np.array(starts, np.int64) for sentence, starts in found.items()}, length)
