"""Demonstrations to imitate: observations and the expert's action chunks."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from polyrhythm.errors import RunFolderError
from polyrhythm.files import atomic_write
from polyrhythm.specs import INSTRUCTION
from polyrhythm.specs.finite import first_not_finite

_OBS = "obs/"
_TASKS, _REPEAT = "tasks", "action_repeat"


@dataclass(frozen=True, slots=True)
class Demonstrations:
    """N demonstrated chunk steps. obs: name → [N,...]; actions [N,C,A] in env units, the expert's from there on.

    tasks: names of the tasks that instructions index; action_repeat: env steps that an action was held. Both are
    checked against the run; () and 0 where unknown.
    """

    obs: dict[str, NDArray[np.generic]]
    actions: NDArray[np.generic]
    tasks: tuple[str, ...] = ()
    action_repeat: int = 0

    def __post_init__(self) -> None:
        lengths = {name: len(x) for name, x in self.obs.items()} | {"actions": len(self.actions)}
        if len(set(lengths.values())) != 1 or not len(self.actions):
            raise ValueError(f"demonstrations need as many observations as actions, and at least one; got {lengths}")

    def __len__(self) -> int:
        return len(self.actions)

    def save(self, path: Path) -> None:
        """Write an .npz of plain arrays, atomically."""
        arrays = {"actions": self.actions} | {_OBS + name: x for name, x in self.obs.items()}
        arrays |= {_TASKS: np.array(self.tasks, np.str_), _REPEAT: np.array(self.action_repeat)}
        objects = [name for name, x in arrays.items() if x.dtype.hasobject]
        if objects:
            raise ValueError(f"{path}: {objects} hold Python objects, which only pickle could store; use number arrays")
        with atomic_write(path) as unfinished, unfinished.open("wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]

    @classmethod
    def load(cls, path: Path) -> Demonstrations:
        """Read what `save` wrote; nothing in the file is executed. RunFolderError: the file is absent, not
        demonstrations, or has NaN or infinity, which would make every step that imitates them non-finite."""
        if not path.is_file():
            raise RunFolderError(f"{path} is not there; name a file of demonstrations")
        if not zipfile.is_zipfile(path):
            raise RunFolderError(f"{path} holds no demonstrations: it is damaged, or something else; record them again")
        try:
            with np.load(path, allow_pickle=False) as file:
                if "actions" not in file:
                    raise KeyError("no array is named actions")
                obs = {name.removeprefix(_OBS): file[name] for name in file if name.startswith(_OBS)}
                tasks = tuple(file[_TASKS].tolist()) if _TASKS in file else ()
                found = cls(obs, file["actions"], tasks, int(file[_REPEAT]) if _REPEAT in file else 0)
        except Exception as error:  # arbitrary bytes may raise anything
            raise RunFolderError(f"{path} holds no demonstrations: {error}; record them again") from error
        floating = {n: x for n, x in (*found.obs.items(), ("actions", found.actions)) if x.dtype.kind == "f"}
        for row, name in first_not_finite(floating).items():
            instruction = found.obs.get(INSTRUCTION)
            of = "" if instruction is None or not tasks else f" of task {tasks[int(instruction[row])]}"
            raise RunFolderError(f"{path}: {name} of chunk step {row}{of} is not finite; record them again")
        return found
