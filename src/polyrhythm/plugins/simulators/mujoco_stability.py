"""Notices that MuJoCo found a state unstable: it then resets it by itself, and `step` returns as if nothing were."""

from __future__ import annotations

import sys
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import mujoco


class UnstableSimulationError(Exception):
    """MuJoCo found the state unstable and has reset it by itself; the episode is void."""


def instabilities(data: mujoco.MjData) -> int:
    """How often MuJoCo found this state unstable since the last reset that was not its own."""
    return int(data.warning.number[_kinds()].sum())


def refuse_unstable(data: mujoco.MjData, when: str, known: int = 0) -> None:
    """Raise UnstableSimulationError if MuJoCo found the state unstable more than `known` times. when: `at step 3`."""
    if instabilities(data) > known:
        raise UnstableSimulationError(f"MuJoCo found the state unstable {when}")


def mujoco_data(env: Any) -> mujoco.MjData | None:
    """The state `env.data` of an environment whose simulator is MuJoCo."""
    data, found = getattr(env, "data", None), sys.modules.get("mujoco")
    return data if found is not None and isinstance(data, found.MjData) else None


@cache
def _kinds() -> list[int]:
    """Numbers of the warnings after which MuJoCo resets a state."""
    import mujoco

    kinds = mujoco.mjtWarning
    return [int(kind) for kind in (kinds.mjWARN_BADQPOS, kinds.mjWARN_BADQVEL, kinds.mjWARN_BADQACC)]
