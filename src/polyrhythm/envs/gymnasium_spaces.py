"""Gymnasium's spaces: actions as specs; observations checked, stored, and written in the form for policies.

A policy gets Box and MultiBinary as they are (float64 as float32), and Discrete and MultiDiscrete as one-hot vectors: a
bool for each value of each entry. Arrays of Dict and Tuple spaces are named by their keys and positions, joined by a
dot. `where` is the environment's setting, which begins every error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from polyrhythm.envs.base import RowNumbers
from polyrhythm.errors import ConfigError
from polyrhythm.specs import ActionSpec, ArraySpec

if TYPE_CHECKING:
    import gymnasium

#: Name of the observation of an environment with a single array.
STATE = "state"
#: Maximum number of entries of a one-hot vector.
_MOST_VALUES = 2**14


@dataclass(frozen=True, slots=True)
class ObservedArray:
    """One array of an observation space.

    name: path in the space; shape, dtype: as declared; counts, start: of a Discrete or MultiDiscrete, the number of
    values of each entry (flat, empty for other spaces) and its lowest value.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    counts: NDArray[np.int64]
    start: NDArray[np.int64]

    @property
    def spec(self) -> ArraySpec:
        """Spec of the array for policies."""
        if len(self.counts):
            return ArraySpec((int(self.counts.sum()),), "bool")
        return ArraySpec(self.shape, "float32" if self.dtype == np.float64 else str(self.dtype))

    def check(self, value: Any, shape: tuple[int, ...], where: str) -> NDArray[Any]:
        """The value as an array of this shape. ConfigError, beginning with `where`: it does not match the space."""
        if type(value) is np.ndarray and value.shape == shape and value.dtype == self.dtype:
            return value  # nearly always
        try:
            array = np.asarray(value)
        except (TypeError, ValueError):
            raise self._unlike(where, f"is {str(value)[:80]!r}, no array") from None
        if array.shape != shape:
            raise self._unlike(where, f"has shape {list(array.shape)}", f"shape {list(shape)}")
        if array.dtype != self.dtype:
            self._check_dtype(array, where)
        return array

    def _check_dtype(self, array: NDArray[Any], where: str) -> None:
        """Integers may have any type that holds them, and may stand for floats; floats may not stand for integers."""
        allowed = "biuf" if self.dtype.kind == "f" else "biu"
        if array.dtype.kind not in allowed:
            raise self._unlike(where, f"is {array.dtype}")
        if self.dtype.kind in "iu" and not np.can_cast(array.dtype, self.dtype) and array.size:
            info = np.iinfo(self.dtype)
            odd = array[(array < info.min) | (array > info.max)]
            if odd.size:
                raise self._unlike(where, f"has {odd.flat[0]}, which {self.dtype} cannot hold")
        if self.dtype.kind == "b" and array.size and not np.isin(array, (0, 1)).all():
            raise self._unlike(where, f"is {array.dtype} with other numbers than 0 and 1")

    def write(self, values: NDArray[Any], out: NDArray[Any], where: str) -> None:
        """Write checked values [n, *shape] in the form for policies: [n, *spec.shape]."""
        if not len(self.counts):
            out[:] = values
            return
        chosen = values.reshape(len(values), -1) - self.start
        beyond = (chosen < 0) | (chosen >= self.counts)
        if beyond.any():
            odd = values.reshape(len(values), -1)[beyond][0]
            counts, start = self.counts.tolist(), self.start.tolist()
            values_from = f"{start[0]} to {start[0] + counts[0] - 1}"
            declared = values_from if len(counts) == 1 else f"{counts} values from {start} on"
            raise self._unlike(where, f"has the value {odd}", declared)
        out[:] = False
        out[np.arange(len(values))[:, None], chosen + np.cumsum(self.counts) - self.counts] = True

    def _unlike(self, where: str, found: str, declared: str = "") -> ConfigError:
        declared = declared or f"{self.dtype} {list(self.shape)}"
        return ConfigError(
            f"{where}: observation {self.name} {found}, its space declares {declared}; return it as declared, or "
            "correct observation_space"
        )


class Observations:
    """The last observation of each of `rows` rows.

    `where`: the environment's setting, which begins every error; drop: names of arrays to leave out, of any space.
    """

    def __init__(
        self,
        space: gymnasium.Space[Any],
        where: str,
        rename: Mapping[str, str] | None = None,
        rows: int = 0,
        drop: Sequence[str] = (),
    ) -> None:
        self._where, self._drop = where, set(drop)
        self._arrays: list[ObservedArray] = []
        self._root = self._node(space, ())
        self._only = self._root if isinstance(self._root, ObservedArray) else None
        self._names = self._names_of(drop, rename or {})
        self.spec = {name: array.spec for name, array in zip(self._names, self._arrays, strict=True)}
        self._kept = [np.zeros((rows, *array.shape), array.dtype) for array in self._arrays]

    def keep(self, row: int, observation: Any, where: str = "") -> None:
        """Store the observation of a row. where: replaces the general one. ConfigError: it does not match the space."""
        where = where or self._where
        if self._only is not None:
            self._kept[0][row] = self._only.check(observation, self._only.shape, where)
            return
        for array, kept, value in zip(self._arrays, self._kept, self._leaves(observation, where), strict=True):
            kept[row] = array.check(value, array.shape, where)

    def keep_rows(self, rows: NDArray[np.bool_], observation: Any) -> None:
        """Store the observations of these rows from a batch of all rows."""
        for array, kept, value in zip(self._arrays, self._kept, self._leaves(observation, self._where), strict=True):
            kept[rows] = array.check(value, kept.shape, self._where)[rows]

    def declared(self, observation: Any) -> Any:
        """The observation of one row, in the dtypes of the space. ConfigError: it does not match the space."""

        def as_declared(array: ObservedArray, value: Any) -> NDArray[Any]:
            return array.check(value, array.shape, self._where).astype(array.dtype, copy=False)

        return _walk(self._root, observation, "", self._where, as_declared)

    def write(self, rows: RowNumbers, out: Mapping[str, NDArray[Any]]) -> None:
        """Write the stored observations of these rows, in the form for policies, into `out[name][:n]`. ConfigError: a
        Discrete has an undeclared value."""
        picked = np.asarray(rows)
        for name, array, kept in zip(self._names, self._arrays, self._kept, strict=True):
            array.write(kept[picked], out[name][: len(picked)], self._where)

    def _node(self, space: gymnasium.Space[Any], path: tuple[str, ...]) -> Any:
        """Convert a space to a tree: an array, None if dropped, a dict for a Dict, a list for a Tuple. Appends to
        `_arrays`."""
        from gymnasium.spaces import Dict, Tuple

        if isinstance(space, Dict):
            if odd := next((key for key in space.spaces if "." in key), None):
                raise ConfigError(f"{self._where}: observation key {odd!r} has a dot; rename it with a wrapper")
            return {key: self._node(part, (*path, key)) for key, part in space.spaces.items()}
        if isinstance(space, Tuple):
            return [self._node(part, (*path, str(place))) for place, part in enumerate(space.spaces)]
        name = ".".join(path) or STATE
        if name in self._drop:
            self._drop.remove(name)
            return None
        array = _array(space, name, self._where)
        self._arrays.append(array)
        return array

    def _names_of(self, drop: Sequence[str], rename: Mapping[str, str]) -> list[str]:
        """Names of the arrays for policies. ConfigError: a name to drop or rename does not exist, no array is left, or
        two have one name."""
        names = [array.name for array in self._arrays]
        known = f"no such observation, there are {', '.join(names)}"
        if self._drop:
            raise ConfigError(f"env.drop = {min(self._drop)}: {known}; name one of them")
        if not names:
            where = f"env.drop = {list(drop)}" if drop else self._where
            raise ConfigError(f"{where}: no observation is left; policies need one")
        for old in rename:
            if old not in names:
                raise ConfigError(f"env.rename.{old} = {rename[old]}: {known}")
        renamed = [rename.get(name, name) for name in names]
        for new in renamed:
            if not new or renamed.count(new) > 1:
                raise ConfigError(
                    f"env.rename = {dict(rename)}: two observations would be {new!r}; give each its own name"
                )
        return renamed

    def _leaves(self, observation: Any, where: str) -> list[Any]:
        found: list[Any] = []
        _walk(self._root, observation, "", where, lambda _, value: found.append(value))
        return found


def _walk(node: Any, value: Any, path: str, where: str, visit: Callable[[ObservedArray, Any], Any]) -> Any:
    """The observation below a node, with the results of `visit` in place of its arrays. ConfigError: it has another
    structure."""
    if node is None:
        return value
    if isinstance(node, ObservedArray):
        return visit(node, value)
    what = f"observation {path}" if path else "the observation"
    below = f"{path}." if path else ""
    if isinstance(node, dict):
        if not isinstance(value, Mapping):
            raise _other_parts(where, f"{what} is {type(value).__name__}", f"a Dict of {', '.join(node)}")
        if value.keys() != node.keys():
            raise _other_parts(where, f"{what} has the keys {', '.join(map(str, value))}", ", ".join(node))
        return {key: _walk(part, value[key], f"{below}{key}", where, visit) for key, part in node.items()}
    if not isinstance(value, tuple | list) or len(value) != len(node):
        size = f" of {len(value)}" if isinstance(value, tuple | list) else ""
        raise _other_parts(where, f"{what} is {type(value).__name__}{size}", f"a Tuple of {len(node)}")
    return tuple(_walk(part, value[place], f"{below}{place}", where, visit) for place, part in enumerate(node))


def _other_parts(where: str, found: str, declared: str) -> ConfigError:
    return ConfigError(
        f"{where}: {found}, its space declares {declared}; return it as declared, or correct observation_space"
    )


def _array(space: gymnasium.Space[Any], name: str, where: str) -> ObservedArray:
    """The array of a space that is not nested. ConfigError: policies do not support the space."""
    from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete

    counts = start = np.zeros(0, np.int64)
    if isinstance(space, Discrete | MultiDiscrete):
        counts = np.asarray(space.n if isinstance(space, Discrete) else space.nvec, np.int64).reshape(-1)
        start = np.asarray(space.start, np.int64).reshape(-1)
    elif not isinstance(space, Box | MultiBinary):
        drop = "" if name == STATE else f", or leave it out by env.drop=[{name}]"
        raise ConfigError(
            f"{where}: observation {name} is {space}; wrap it into a Box, Discrete, Dict or Tuple space of these{drop}"
        )
    if counts.sum() > _MOST_VALUES:
        raise ConfigError(
            f"{where}: observation {name} is {space}, a one-hot vector of {counts.sum():,} entries, above "
            f"{_MOST_VALUES:,}; wrap it into a MultiDiscrete of its parts, such as row and column, or into a Box"
        )
    assert space.shape is not None
    assert space.dtype is not None
    return ObservedArray(name, space.shape, np.dtype(space.dtype), counts, start)


def action_spec(space: gymnasium.Space[Any], where: str) -> ActionSpec:
    from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete

    if isinstance(space, Box) and np.issubdtype(space.dtype, np.floating):
        low, high = (tuple(bound.astype(float).ravel().tolist()) for bound in (space.low, space.high))
        if not all(a < b for a, b in zip(low, high, strict=True)):
            raise ConfigError(f"{where}: actions are {space}, with an entry that cannot change; wrap it away")
        return ActionSpec("continuous", len(low), low=low, high=high)
    counts: tuple[int, ...] = ()
    if isinstance(space, Discrete):
        counts = (int(space.n),)
    elif isinstance(space, MultiDiscrete):
        counts = tuple(space.nvec.ravel().tolist())
    elif isinstance(space, MultiBinary):
        counts = (2,) * int(np.prod(space.shape))
    if max(counts, default=0) < 2:
        what = f"{space}, with nothing to choose" if counts else space
        raise ConfigError(
            f"{where}: actions are {what}; wrap them into a float Box, Discrete, MultiDiscrete or MultiBinary"
        )
    return ActionSpec("discrete", len(counts), counts=counts)


def action_converter(space: gymnasium.Space[Any]) -> Callable[[NDArray[np.generic]], Sequence[Any] | NDArray[Any]]:
    """Function from actions [n,A] to n actions of the space."""
    from gymnasium.spaces import Discrete, MultiDiscrete

    if isinstance(space, Discrete):
        start = int(space.start)
        return lambda actions: (actions[:, 0] + start).tolist()
    shape, dtype = space.shape or (), space.dtype
    offset = space.start if isinstance(space, MultiDiscrete) else 0
    return lambda actions: np.asarray(actions, dtype).reshape(len(actions), *shape) + offset


def action_entries(space: gymnasium.Space[Any], action: Any) -> NDArray[Any]:
    """The entries [A] of an action of the space: the inverse of `action_converter`."""
    from gymnasium.spaces import Discrete, MultiDiscrete

    first = space.start if isinstance(space, Discrete | MultiDiscrete) else 0
    return (np.asarray(action) - first).reshape(-1)
