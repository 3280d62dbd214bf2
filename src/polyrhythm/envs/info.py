"""Reads success and metrics from the `info` of Gymnasium environments, single and vector ones.

A name is a key of the info, or `a.b` for key `b` of the mapping under `a`. Only a bool or one number counts, such as a
numpy scalar or an array of size 1; None counts as absent. Anything else raises a ConfigError that names the setting.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

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


class InfoReader:
    """Reads the infos of one env batch, and warns at the end of its first episode about keys that never appeared.

    success: the setting `env.success`, "" for the first present key of SUCCESS_KEYS; metrics: names of `env.metrics`.
    """

    def __init__(self, success: str, metrics: Collection[str]) -> None:
        self._success, self._metrics = success, tuple(metrics)
        self._candidates = {key: f"env.success = {key}" for key in ((success,) if success else SUCCESS_KEYS)}
        self._absent = {_OF_SUCCESS, *metrics}
        self._keys: dict[str, None] | None = {}  # of the first episode; None after it

    def read(self, info: Mapping[str, Any]) -> tuple[int, dict[str, float]]:
        """Success of one row's step (1, 0, or -1 if not reported), and its metrics (NaN if absent)."""
        number = math.nan
        for key, setting in self._candidates.items():
            number = _single(info, key, setting, finite=True)
            if not math.isnan(number):
                break
        metrics = {name: _single(info, name, f"env.metrics.{name}", finite=False) for name in self._metrics}
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
            return np.full(len(done), -1, np.int8), {name: np.full(len(done), np.nan) for name in self._metrics}
        numbers = np.full(len(done), np.nan)
        for key, setting in self._candidates.items():
            if (absent := np.isnan(numbers)).any():
                numbers = np.where(absent, _column(info, key, setting, done, finite=True), numbers)
        metrics = {name: _column(info, name, f"env.metrics.{name}", done, finite=False) for name in self._metrics}
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
        problems = [
            f"env.metrics.{name}: the environment's info has no such key"
            for name in self._metrics
            if name in self._absent
        ]
        if _OF_SUCCESS in self._absent and (keys or self._success):
            *others, last = SUCCESS_KEYS
            key = "such key" if self._success else f"{', '.join(others)} or {last}"
            which = f"env.success = {self._success}" if self._success else "env.success"
            problems.append(f"{which}: the environment's info has no {key}, so success rates are null")
        if problems:
            warn_once(f"{'; '.join(problems)}; in the first episode it had {_listed(list(keys))}")

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


def _listed(keys: list[str]) -> str:
    if not keys:
        return "no key at all"
    more = f" and {len(keys) - _LISTED} more" if len(keys) > _LISTED else ""
    return f"{', '.join(keys[:_LISTED])}{more}; set the key that you mean, if it is one of them"


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


def _column(info: Infos, name: str, setting: str, done: NDArray[np.bool_], *, finite: bool) -> NDArray[np.float64]:
    """The number of each row under this name, NaN if absent: [rows]. setting: `name = value`, for errors; finite:
    refuse other numbers."""
    if not isinstance(info, Mapping):
        return np.array([_single(one, name, setting, finite=finite) for one in info], np.float64)
    found = _present(info, name, setting, len(done), finite=finite)
    final = info.get(_FINAL)
    if final is not None:
        found = np.where(done, _column(final, name, setting, done, finite=finite), found)
    return found


def _present(info: Mapping[str, Any], name: str, setting: str, rows: int, *, finite: bool) -> NDArray[np.float64]:
    """`_column` of a mapping of columns, without `final_info`; the mask `_NAME` marks rows with a value."""
    inner, key = _find(info, name)
    value = inner.get(key)
    if value is None:
        return np.full(rows, np.nan)
    if isinstance(value, Mapping) or not hasattr(value, "__len__") or len(value) != rows:
        raise _refusal(setting, value)
    there = np.asarray(inner.get(f"_{key}", np.ones(rows, np.bool_)), np.bool_)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf" and value.size == rows:
        column = np.where(there, value.reshape(rows).astype(np.float64), np.nan)
        if finite and not np.isfinite(column[there]).all():
            raise _refusal(setting, value)
        return column
    numbers = [_number(one, setting, finite=finite) if has else np.nan for one, has in zip(value, there, strict=True)]
    return np.array(numbers, np.float64)


def _single(info: Any, name: str, setting: str, *, finite: bool) -> float:
    if not isinstance(info, Mapping):
        return math.nan
    inner, key = _find(info, name)
    value = inner.get(key)
    if value is None:
        return _single(info.get(_FINAL), name, setting, finite=finite)
    return _number(value, setting, finite=finite)


def _find(info: Mapping[str, Any], name: str) -> tuple[Mapping[str, Any], str]:
    """The mapping that may hold the name, and the key within it."""
    while name not in info and "." in name:
        parent, _, name = name.partition(".")
        inner = info.get(parent)
        info = inner if isinstance(inner, Mapping) else {}
    return info, name


def _number(value: Any, setting: str, *, finite: bool) -> float:
    if value is None:
        return math.nan
    if isinstance(value, bool | int | float):
        number = float(value)
    else:
        try:
            array = np.asarray(value)
        except Exception as error:  # arrays of other libraries, ragged lists
            raise _refusal(setting, value) from error
        if array.size != 1 or array.dtype.kind not in "biuf":
            raise _refusal(setting, value)
        number = float(array.item())
    if finite and not math.isfinite(number):
        raise _refusal(setting, value)
    return number


def _refusal(setting: str, value: Any) -> ConfigError:
    name = setting.removeprefix("env.metrics.").rpartition(" = ")[2]
    inner = next(iter(_names(value)), "") if isinstance(value, Mapping) else ""
    such_as = f", such as {name}.{inner}" if inner else ""
    return ConfigError(
        f"{setting}: the environment's info has {value!r:.200} there, neither a bool nor one finite number; name "
        f"another key{such_as}"
    )
