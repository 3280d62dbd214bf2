"""What a running conductor may change between two versions, and the neighbours of its present operation.

`generators`: a generator that shares a device with another station may be off, so that the other has the device for
itself; on again, it uses what the other leaves idle (an idle trainer's device is lent to generation). `max_lag`: α by
which new groups are granted, never above the setting's. `micro_batch`: chunk steps of a training pass, one of the sizes
that fit into memory; an optimizer step's gradient stays the same but for rounding. `together`: stations that lease a
device are on it at once, where they fit, and share it; else in turn.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from polyrhythm.scheduler.settings import MoveRules, SchedulerSettings

#: Levels of α, as parts of the setting's.
LAG_LEVELS = (1.0, 0.5, 0.25)


@dataclass(frozen=True, slots=True)
class Operation:
    """off: names of the generators that are switched off, sorted; max_lag: α by which new groups are granted;
    micro_batch: chunk steps of a training pass, 0: the recipe's, which is not moved; together: leased devices are
    shared."""

    off: tuple[str, ...]
    max_lag: float
    micro_batch: int = 0
    together: bool = False

    def needs_more(self, other: Operation) -> bool:
        """Whether it needs more memory in any respect."""
        return self.micro_batch > other.micro_batch or self.together > other.together

    def describe(self, other: Operation) -> str:
        """The change from here to `other`, in words."""
        words = [f"{name} on" for name in self.off if name not in other.off]
        words += [f"{name} off" for name in other.off if name not in self.off]
        if self.max_lag != other.max_lag:
            words.append(f"max_lag {self.max_lag:g} → {other.max_lag:g}")
        if self.micro_batch != other.micro_batch:
            words.append(f"micro_batch_steps {self.micro_batch} → {other.micro_batch}")
        if self.together != other.together:
            words.append("sharing lease → share" if other.together else "sharing share → lease")
        return ", ".join(words)


def starting(settings: SchedulerSettings, rules: MoveRules) -> Operation:
    """The operation of the settings alone."""
    return Operation((), settings.max_lag, rules.micro_batch)


def neighbours(
    present: Operation,
    generators: Collection[str],
    settings: SchedulerSettings,
    rules: MoveRules,
    sizes: Collection[int] = (),
) -> list[Operation]:
    """The operations that one move leads to. generators: the present ones; sizes: of micro-batches that were measured.

    Generators on the same devices are equal, so only their number counts: one more or less, all or none. Micro-batches
    become the next smaller or larger, and once two sizes show what to expect the smallest or the largest. With any
    other move α is the setting's again; it is lowered by a move of its own.
    """
    found: dict[Operation, None] = {}
    for own in _classes(generators, settings, rules):
        off = [name for name in own if name in present.off]
        counts = {0, len(off) - 1, len(off) + 1, len(own)} - {len(off)}
        for count in sorted(count for count in counts if 0 <= count <= len(own)):
            others = (name for name in present.off if name not in own)
            names = tuple(sorted((*others, *own[len(own) - count :])))
            if not set(generators) <= set(names):
                found[replace(present, off=names, max_lag=settings.max_lag)] = None
    if rules.micro_batches:
        place, last = rules.micro_batches.index(present.micro_batch), len(rules.micro_batches) - 1
        far = {0, last} if len(sizes) > 1 else set()
        for index in sorted({max(0, place - 1), min(last, place + 1)} | far):
            found[replace(present, max_lag=settings.max_lag, micro_batch=rules.micro_batches[index])] = None
    if rules.together:
        found[replace(present, max_lag=settings.max_lag, together=not present.together)] = None
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
