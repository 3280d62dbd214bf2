"""What a sweep varies: settings with several values or a range, and the combinations of them."""

from __future__ import annotations

import hashlib
import itertools
import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from polyrhythm.errors import ConfigError

_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_RANGE = re.compile(rf"({_NUMBER})\.\.({_NUMBER})(:log)?")
_OPENING, _CLOSING, _QUOTES = "[{(", "]})", "\"'"


@dataclass(frozen=True, slots=True)
class SweptSetting:
    """A setting that varies: it takes one of `values`, or a number between low and high, both included.

    log: numbers are drawn evenly by their logarithm; whole: integers alone.
    """

    path: str
    values: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    whole: bool = False

    @property
    def is_range(self) -> bool:
        return not self.values

    def text(self, number: float) -> str:
        """A number of the range as a setting's value, within the bounds."""
        if self.whole:
            return str(min(int(self.high), max(int(self.low), round(number))))
        return repr(min(self.high, max(self.low, float(f"{number:.6g}"))))

    def has(self, value: str) -> bool:
        """Whether it may take this value."""
        if not self.is_range:
            return value in self.values
        form = r"[+-]?\d+" if self.whole else _NUMBER
        return bool(re.fullmatch(form, value)) and self.low <= float(value) <= self.high

    def draw(self, rng: random.Random) -> str:
        if not self.is_range:
            return rng.choice(self.values)
        # An integer stands for the numbers that are rounded to it.
        low, high = (self.low - 0.5, self.high + 0.5) if self.whole and not self.log else (self.low, self.high)
        return self.text(math.exp(rng.uniform(math.log(low), math.log(high))) if self.log else rng.uniform(low, high))

    def ends(self) -> tuple[str, ...]:
        """The values, or both ends of the range: what is checked before the sweep."""
        return self.values or (self.text(self.low), self.text(self.high))


#: Value of each setting that varies, by its path.
Combination = Mapping[str, str]


def parse(words: Sequence[str]) -> tuple[list[str], list[SweptSetting]]:
    """Split `section.key=value` words into fixed settings and those that vary: `key=1,2,3`, `key=1e-5..1e-3:log`.

    Commas in brackets or quotes separate no values. ConfigError: a range is invalid, or a setting varies twice.
    """
    fixed, varied = [], dict[str, SweptSetting]()
    for word in words:
        path, _, value = word.partition("=")
        path = path.strip()
        parts = _split(value)
        if found := _RANGE.fullmatch(value.strip()):
            setting = _range(path, *found.groups())
        elif len(parts) > 1:
            if not all(parts) or len(set(parts)) < len(parts):
                raise ConfigError(f"{word}: a value is empty or given twice; write each once, as in {path}=1,2")
            setting = SweptSetting(path, tuple(parts))
        else:
            fixed.append(word)
            continue
        if path in varied:
            raise ConfigError(f"{word}: {path} varies already; give all of its values at once")
        varied[path] = setting
    if twice := next((word for word in fixed if word.partition("=")[0].strip() in varied), None):
        raise ConfigError(f"{twice}: this setting varies; leave one of the two out")
    return fixed, list(varied.values())


def _range(path: str, low: str, high: str, log: str | None) -> SweptSetting:
    first, last = float(low), float(high)
    text = f"{path}={low}..{high}{log or ''}"
    if not first < last < math.inf:
        raise ConfigError(f"{text}: a range goes from a number to a larger one; exchange or change them")
    if log and first <= 0:
        raise ConfigError(f"{text}: a logarithmic range needs numbers above 0; raise the first one, or leave :log out")
    whole = all(re.fullmatch(r"[+-]?\d+", number) for number in (low, high))
    return SweptSetting(path, (), first, last, bool(log), whole)


def _split(value: str) -> list[str]:
    """The parts between commas that are in no bracket and no quotes."""
    parts, depth, quote = [""], 0, ""
    for character in value:
        if quote:
            quote = "" if character == quote else quote
        elif character in _QUOTES:
            quote = character
        elif character in _OPENING or character in _CLOSING:
            depth += 1 if character in _OPENING else -1
        if character == "," and not quote and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def grid(settings: Sequence[SweptSetting]) -> Iterator[Combination]:
    """Every combination of the values."""
    for values in itertools.product(*(setting.values for setting in settings)):
        yield dict(zip((setting.path for setting in settings), values, strict=True))


def drawn(settings: Sequence[SweptSetting], count: int, seed: int) -> list[Combination]:
    """`count` different random combinations, fewer if there are no more; a larger count continues the list."""
    rng, found = random.Random(seed), dict[tuple[str, ...], Combination]()
    for _ in range(100 * count):
        combination = {setting.path: setting.draw(rng) for setting in settings}
        found.setdefault(tuple(combination.values()), combination)
        if len(found) == count:
            break
    return list(found.values())


def short_names(paths: Sequence[str]) -> dict[str, str]:
    """The last part of each path, or as many of its last parts as make it unique."""
    names = {}
    for path in paths:
        parts = path.split(".")
        for size in range(1, len(parts) + 1):
            names[path] = ".".join(parts[-size:])
            if sum(f".{other}".endswith(f".{names[path]}") for other in paths) == 1:
                break
    return names


def label(combination: Combination) -> str:
    """`lr=1e-4, gamma=0.98`."""
    names = short_names(list(combination))
    return ", ".join(f"{names[path]}={value}" for path, value in combination.items()) or "the recipe"


def key(combination: Combination, fixed: Sequence[str]) -> str:
    """A file name that is unique to these settings."""
    readable = re.sub(r"[^A-Za-z0-9.=-]+", "-", label(combination).replace(", ", "_"))[:60].strip("-.")
    text = repr((sorted(fixed), sorted(combination.items())))
    return f"{readable}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"
