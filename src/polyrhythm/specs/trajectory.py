"""The data of one training sample."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(slots=True)
class Trajectory:
    """An episode, or a segment of one, of T chunk steps with C primitive actions of A entries each.

    obs: name → [T+1, ...]; entry T is the observation after the last step (for the bootstrap value). actions [T,C,A] in
    env units; logprob [T,C,A] float32 and value [T] or [T,C] float32 as computed by the behaviour policy;
    forward_inputs: name → [T, ...], further inputs of `evaluate`. rewards [T,C] float32; valid [T,C] bool: the
    primitive action was executed (the step that ended the episode counts, later ones of its chunk do not).

    version [T] int64: oldest weights that answered each chunk step. newer [T,C] int32: by how many versions the weights
    of each action are newer than `version`; None if weights cannot change within an answer.

    entries [T] int64: places of the chunk steps in the arena, while the trainer reads the sample there; else None.

    terminated: the task ended; truncated: cut by the time limit or at a segment's end (bootstrap applies); success: the
    environment has reported that the task was solved.
    """

    obs: dict[str, NDArray[np.generic]]
    actions: NDArray[np.generic]
    logprob: NDArray[np.float32]
    value: NDArray[np.float32]
    forward_inputs: dict[str, NDArray[np.generic]]
    rewards: NDArray[np.float32]
    valid: NDArray[np.bool_]
    version: NDArray[np.int64]
    terminated: bool
    truncated: bool
    success: bool
    env_steps: int
    ticket: int
    group: int
    task: int
    newer: NDArray[np.int32] | None = None
    entries: NDArray[np.int64] | None = None

    @property
    def newest(self) -> int:
        """Newest version that chose one of its actions."""
        if self.newer is None:
            return int(self.version.max())
        return int((self.version[:, None] + np.where(self.valid, self.newer, 0)).max())

    @property
    def steps(self) -> int:
        """Chunk steps T."""
        return int(self.actions.shape[0])

    @property
    def episode_return(self) -> float:
        """Undiscounted sum of the valid rewards."""
        return float(self.rewards[self.valid].sum())
