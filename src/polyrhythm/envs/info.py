"""Reads success and metrics from the `info` of Gymnasium environments, single and vector ones.

A name is a key of the info, or `a.b` for key `b` of the mapping under `a`. Only a bool or one number counts, such as a
numpy scalar or an array of size 1; None counts as absent. Anything else raises a ConfigError that names the setting.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from polyrhythm.env_warnings import warn_once
from polyrhythm.errors import ConfigError

#: Keys of success if `env.success` is empty, in the order in which they are tried.
SUCCESS_KEYS = ("success", "is_success", "succeed")
#: Key of a row's last info when its info is already that of the next episode, and keys that hold observations.
_FINAL, _OBSERVATIONS = "final_info", ("final_obs", "final_observation", "terminal_observation")
#: Maximum number of keys that a warning lists.
_LISTED = 24
#: Numbers that are plain flags of success, and the stand-in for success among the names of metrics.
_FLAGS, _OF_SUCCESS = (0.0, 1.0), ""


Infos = Mapping[str, Any] | Iterable[Any]


def as_aggregates(value: Any) -> Any:
    """Expand a list of names to `last` for each."""
    return dict.fromkeys(value, "last") if isinstance(value, list | tuple) else value


class _Key(NamedTuple):
    """A key to read. setting: that names it, for errors; finite: refuse other numbers."""

    name: str
    setting: str
    finite: bool


class InfoReader:
    """Reads the infos of one env batch, and warns at the end of its first episode about keys that never appeared.

    success: the setting `env.success`, "" for the first present key of SUCCESS_KEYS; metrics: names of `env.metrics`.
    success_key: the key that success was read from last, "" before.
    """

    def __init__(self, success: str, metrics: Collection[str]) -> None:
        self._success, self.success_key = success, ""
        self._candidates = [
            _Key(key, f"env.success = {key}", True) for key in ((success,) if success else SUCCESS_KEYS)
        ]
        self._metrics = [_Key(name, f"env.metrics.{name}", False) for name in metrics]
        self._absent = {_OF_SUCCESS, *metrics}
        self._keys: dict[str, None] | None = {}  # of the first episode; None after it

    def read(self, info: Mapping[str, Any]) -> tuple[int, dict[str, float]]:
        """Success of one row's step (1, 0, or -1 if not reported), and its metrics (NaN if absent)."""
        number = math.nan
        for key in self._candidates:
            number = _single(info, key)
            if not math.isnan(number):
                self.success_key = key.name
                break
        metrics = {key.name: _single(info, key) for key in self._metrics}
        if self._keys is not None:
            present = {name for name, value in metrics.items() if not math.isnan(value)}
            self._record_present(info, present if math.isnan(number) else {_OF_SUCCESS, *present})
        if not (math.isnan(number) or number in _FLAGS):
            self._warn_of_number(number)
        return -1 if math.isnan(number) else int(number > 0), metrics

    def read_rows(
        self, info: Infos, done: NDArray[np.bool_]
    ) -> tuple[NDArray[np.int8], dict[str, NDArray[np.float64]]]:
        """`read` of all rows of a vector environment, each [rows]. done [rows]: rows whose last info is in
        `final_info`, if present."""
        if isinstance(info, Mapping) and not info:
            return np.full(len(done), -1, np.int8), {key.name: np.full(len(done), np.nan) for key in self._metrics}
        numbers = np.full(len(done), np.nan)
        for key in self._candidates:
            if (absent := np.isnan(numbers)).any():
                numbers = np.where(absent, _column(info, key, done), numbers)
                if not np.isnan(numbers[absent]).all():
                    self.success_key = key.name
        metrics = {key.name: _column(info, key, done) for key in self._metrics}
        given = ~np.isnan(numbers)
        if self._keys is not None:
            present = {name for name, found in metrics.items() if not np.isnan(found).all()}
            self._record_present(info, {_OF_SUCCESS, *present} if given.any() else present)
        if not (flags := np.isin(numbers, _FLAGS) | ~given).all():
            self._warn_of_number(float(numbers[~flags][0]))
        return np.where(given, numbers > 0, -1).astype(np.int8), metrics

    def end_episode(self) -> None:
        """Called after a row's last step: warn about keys that the first episode did not have."""
        keys, self._keys = self._keys, None
        if keys is None or not self._absent:
            return
        missing = [key.setting for key in self._metrics if key.name in self._absent]
        problems = [f"{setting}: the environment's info has no such key" for setting in missing]
        if _OF_SUCCESS in self._absent and (keys or self._success):
            *others, last = SUCCESS_KEYS
            key = "such key" if self._success else f"{', '.join(others)} or {last}"
            which = f"env.success = {self._success}" if self._success else "env.success"
            problems.append(f"{which}: the environment's info has no {key}, so it does not report success")
        if problems:
            more = f" and {len(keys) - _LISTED} more" if len(keys) > _LISTED else ""
            listed = f"{', '.join(list(keys)[:_LISTED])}{more}; set the key that you mean, if it is one of them"
            warn_once(f"{'; '.join(problems)}; in the first episode it had {listed if keys else 'no key at all'}")

    def _record_present(self, info: Infos, present: set[str]) -> None:
        assert self._keys is not None
        self._keys |= dict.fromkeys(_names(info))
        self._absent -= present

    def _warn_of_number(self, number: float) -> None:
        counts = "counts as a success, being above 0" if number > 0 else "counts as no success"
        warn_once(
            "env.success: the environment's info has a number there that is neither 0 nor 1; "
            f"{number:g} {counts}; name another key if this one is a measure"
        )


def _names(info: Infos, prefix: str = "") -> Iterator[str]:
    """Keys that a setting can name, nested ones joined by a dot."""
    if not isinstance(info, Mapping):
        for one in info:
            if isinstance(one, Mapping):
                yield from _names(one, prefix)
        return
    for key, value in info.items():
        is_mask = f"{key}".startswith("_") and f"{key}"[1:] in info  # of the rows that have a value under that key
        if key == _FINAL and value is not None:
            yield from _names(value)
        elif isinstance(value, Mapping):
            yield from _names(value, f"{prefix}{key}.")
        elif value is not None and key not in _OBSERVATIONS and not is_mask:
            yield f"{prefix}{key}"


def _column(info: Infos, key: _Key, done: NDArray[np.bool_]) -> NDArray[np.float64]:
    """The number of each row under this key, NaN if absent: [rows]."""
    if not isinstance(info, Mapping):
        return np.array([_single(one, key) for one in info], np.float64)
    found = _present(info, key, len(done))
    final = info.get(_FINAL)
    return found if final is None else np.where(done, _column(final, key, done), found)


def _present(info: Mapping[str, Any], key: _Key, rows: int) -> NDArray[np.float64]:
    """`_column` of a mapping of columns, without `final_info`; the mask `_NAME` marks rows with a value."""
    inner, name = _find(info, key.name)
    value = inner.get(name)
    if value is None:
        return np.full(rows, np.nan)
    if isinstance(value, Mapping) or not hasattr(value, "__len__") or len(value) != rows:
        raise _refusal(key, value)
    there = np.asarray(inner.get(f"_{name}", np.ones(rows, np.bool_)), np.bool_)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf" and value.size == rows:
        column = np.where(there, value.reshape(rows).astype(np.float64), np.nan)
        if key.finite and not np.isfinite(column[there]).all():
            raise _refusal(key, value)
        return column
    numbers = [_number(one, key) if has else np.nan for one, has in zip(value, there, strict=True)]
    return np.array(numbers, np.float64)


def _single(info: Any, key: _Key) -> float:
    if not isinstance(info, Mapping):
        return math.nan
    inner, name = _find(info, key.name)
    value = inner.get(name)
    return _single(info.get(_FINAL), key) if value is None else _number(value, key)


def _find(info: Mapping[str, Any], name: str) -> tuple[Mapping[str, Any], str]:
    """The mapping that may hold the name, and the key within it."""
    while name not in info and "." in name:
        parent, _, name = name.partition(".")
        inner = info.get(parent)
        info = inner if isinstance(inner, Mapping) else {}
    return info, name


def _number(value: Any, key: _Key) -> float:
    if value is None:
        return math.nan
    if isinstance(value, bool | int | float):
        number = float(value)
    else:
        try:
            array = np.asarray(value)
        except Exception as error:  # arrays of other libraries, ragged lists
            raise _refusal(key, value) from error
        if array.size != 1 or array.dtype.kind not in "biuf":
            raise _refusal(key, value)
        number = float(array.item())
    if key.finite and not math.isfinite(number):
        raise _refusal(key, value)
    return number


def _refusal(key: _Key, value: Any) -> ConfigError:
    inner = next(iter(_names(value)), "") if isinstance(value, Mapping) else ""
    such_as = f", such as {key.name}.{inner}" if inner else ""
    return ConfigError(
        f"{key.setting}: the environment's info has {value!r:.200} there, neither a bool nor one finite number; name "
        f"another key{such_as}"
    )
