"""What a running conductor may change between two versions, and the neighbours of its present operation.

`generators`: a generator that shares a device with another station may be off, so that the other has the device for
itself; on again, it uses what the other leaves idle (an idle trainer's device is lent to generation). `max_lag`: α by
which new groups are granted, never above the setting's.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from polyrhythm.scheduler.settings import MoveRules, SchedulerSettings

#: Levels of α, as parts of the setting's.
LAG_LEVELS = (1.0, 0.5, 0.25)


@dataclass(frozen=True, slots=True)
class Operation:
    """off: names of the generators that are switched off, sorted; max_lag: α by which new groups are granted."""

    off: tuple[str, ...]
    max_lag: float

    def describe(self, other: Operation) -> str:
        """The change from here to `other`, in words."""
        words = [f"{name} on" for name in self.off if name not in other.off]
        words += [f"{name} off" for name in other.off if name not in self.off]
        if self.max_lag != other.max_lag:
            words.append(f"max_lag {self.max_lag:g} → {other.max_lag:g}")
        return ", ".join(words)


def neighbours(
    present: Operation, generators: Collection[str], settings: SchedulerSettings, rules: MoveRules
) -> list[Operation]:
    """The operations that one move leads to. generators: the present ones.

    Generators on the same devices are equal, so only their number counts: one more or less, all or none. With other
    generators α is the setting's again; it is lowered by a move of its own.
    """
    found: dict[Operation, None] = {}
    for own in _classes(generators, settings, rules):
        off = [name for name in own if name in present.off]
        counts = {0, len(off) - 1, len(off) + 1, len(own)} - {len(off)}
        for count in sorted(count for count in counts if 0 <= count <= len(own)):
            others = (name for name in present.off if name not in own)
            names = tuple(sorted((*others, *own[len(own) - count :])))
            if not set(generators) <= set(names):
                found[Operation(names, settings.max_lag)] = None
    for level in LAG_LEVELS:
        found[replace(present, max_lag=level * settings.max_lag)] = None
    found.pop(present, None)
    return list(found)


def _classes(generators: Collection[str], settings: SchedulerSettings, rules: MoveRules) -> list[list[str]]:
    """Generators by their devices, if these have other stations too. The evaluator is never switched off."""
    classes: dict[tuple[int, ...], list[str]] = {}
    for name in sorted(generators):
        devices = rules.devices.get(name, ())
        shared = any(set(devices) & set(own) for other, own in rules.devices.items() if other != name)
        if shared and name != settings.evaluator:
            classes.setdefault(devices, []).append(name)
    return list(classes.values())
