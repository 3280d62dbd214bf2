"""Admission: how many samples may be started at each version. It delays tickets and drops nothing.

B is the number of samples consumed per version (batch_size · sync_interval).

A group of g samples is admitted while consumed + outstanding + g <= floor((version + 1 + max_lag)·B), where version is
the applied version and is stamped on its tickets. Lost tickets go out again before any new one.

`bound: sample` is deadline scheduling. A sample of version s must be lent (given to the trainer) before floor((s + 1 +
max_lag)·B) samples are consumed. Lending a younger group brings every older deadline nearer, so `buffer.py` allows it
only while each older version s' keeps room (`slack`) for what is outstanding of it:

    floor((s' + 1 + max_lag)·B) - consumed - outstanding(version <= s') >= g        for every s' < s with outstanding

Invariant: that left side is never negative (deadlines stay feasible), so nothing is dropped and nothing deadlocks.

Spare groups are not counted in `outstanding` (see `redundancy`).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from polyrhythm.scheduler.codec import UNSAVED
from polyrhythm.scheduler.records import Ticket
from polyrhythm.scheduler.samples.groups import Group, Sample
from polyrhythm.scheduler.settings import SchedulerSettings

_MASK = (1 << 64) - 1
#: Bits of a training seed: without that of evaluations, `specs.hashing.HELD_OUT`.
_TRAINING = (1 << 62) - 1


def mix(*parts: int) -> int:
    """Hash integers into 0..2^63-1: the same function as `specs.hashing.mix`, which may not be imported here."""
    h = 0
    for part in parts:
        z = ((h + 0x9E3779B97F4A7C15) ^ part) & _MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        h = z ^ (z >> 31)
    return h & (_MASK >> 1)


def shuffled(place: int, count: int, key: int) -> int:
    """Element `place` of the key's permutation of 0..count-1, without memory: a Feistel network of six rounds, applied
    until its result is below `count` (cycle walking: Black and Rogaway, "Ciphers with arbitrary finite domains",
    2002)."""
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    low = (1 << half) - 1
    while True:
        left, right = place >> half, place & low
        for step in range(6):
            left, right = right, left ^ (mix(key, step, right) & low)
        place = left << half | right
        if place < count:
            return place


@dataclass(slots=True)
class Admission:
    """consumed: samples lent to the trainer (and not come back); outstanding: version → samples admitted, not consumed.

    A group counts whole in `outstanding` from its admission on, at the version of its first ticket. `groups` are those
    outstanding and the spare ones, in the order of admission; `lost` is a heap of ticket numbers to grant again.
    spare: numbers of the spare groups; lacking: those of groups that may have extra members, some of which are gone.
    """

    settings: SchedulerSettings = field(metadata=UNSAVED)
    target: int = 0
    consumed: int = 0
    next_ticket: int = 0
    next_group: int = 0
    outstanding: dict[int, int] = field(default_factory=dict)
    groups: dict[int, Group] = field(default_factory=dict)
    open_group: int | None = None
    lost: list[int] = field(default_factory=list)
    spare: list[int] = field(default_factory=list)
    lacking: deque[int] = field(default_factory=deque)

    @property
    def outstanding_total(self) -> int:
        return sum(self.outstanding.values())

    def room(self, version: int) -> int:
        """Samples that may still be admitted at applied version `version`, before `target` versions are consumed."""
        limit = min(self.settings.limit(version), self.target * self.settings.version_samples)
        return limit - self.consumed - self.outstanding_total

    def closed(self, version: int) -> bool:
        """Whether `next` has no ticket to give."""
        return self.open_group is None and not self.lost and self.room(version) < self.settings.group_size

    def next(
        self, version: int, samples: Mapping[int, Sample], held: Callable[[Ticket], bool] = lambda _: False
    ) -> Ticket | None:
        """The next ticket to grant: a lost one, a member of the group begun, or a new group's; None if none is due.
        held: lost tickets that have to wait; others go before them."""
        waiting: list[int] = []
        found = None
        while self.lost and found is None:
            number = heapq.heappop(self.lost)
            sample = samples.get(number)
            if sample is not None and held(sample.ticket):
                waiting.append(number)
            elif sample is not None:
                found = sample.ticket
        for number in waiting:
            heapq.heappush(self.lost, number)
        if found is not None:
            return found
        group = None if self.open_group is None else self.groups[self.open_group]
        if group is None:
            if self.room(version) < self.settings.group_size:
                return None
            group = self.open(version)
        return self.add_member(group, version)

    def open(self, version: int, *, spare: bool = False) -> Group:
        """A new group, whose tickets go before any other new ones."""
        group = Group(self.next_group, version, self.settings.group_size, spare)
        self.next_group += 1
        self.groups[group.number] = group
        self.open_group = group.number
        if spare:
            self.spare.append(group.number)
        else:
            self._reserve(version, group.size)
        return group

    def add_member(self, group: Group, version: int) -> Ticket:
        """Another ticket of the group."""
        ticket = self._ticket(group, version)
        group.members.append(ticket.number)
        group.granted += 1
        if group.granted == group.size:
            self.open_group = None
            if self.settings.extra_members:
                self.lacking.append(group.number)
        return ticket

    def start_of(self, group: int) -> tuple[int, int]:
        """Task and seed of the group of this number, which need not exist yet. With `training_states` the groups of a
        task take each of them once an epoch: the seed is the state's number modulo their count."""
        settings = self.settings
        task, seed = group % settings.tasks, mix(settings.seed, 1, group) & _TRAINING
        if states := settings.training_states:
            epoch, place = divmod(group // settings.tasks, states)
            seed |= 1 << 61  # as `specs.hashing.seed_in_state`
            seed -= (seed - shuffled(place, states, mix(settings.seed, 6, task, epoch))) % states
        return task, seed

    def _ticket(self, group: Group, version: int) -> Ticket:
        task, seed = self.start_of(group.number)
        number = self.next_ticket
        self.next_ticket += 1
        return Ticket(
            number=number,
            group=group.number,
            task=task,
            instruction=task,
            seed=seed,
            noise=mix(self.settings.seed, 2, number),
            version=version,
        )

    def give_back(self, sample: Sample, *, blame: bool = True) -> None:
        """A running ticket was lost: it keeps number, version and group and goes out again, with blame as a new
        attempt."""
        sample.ticket = replace(sample.ticket, attempt=sample.ticket.attempt + blame)
        sample.slot, sample.row = "", -1
        heapq.heappush(self.lost, sample.ticket.number)

    def forget(self, group: Group) -> None:
        """A group is dropped: its capacity is free again."""
        del self.groups[group.number]
        if self.open_group == group.number:
            self.open_group = None
        if group.spare:
            self.spare.remove(group.number)
        else:
            self._settle(group.version, group.size)

    def transfer_quota(self, group: Group, spare: Group) -> None:
        """The quota reserved for `group` is now reserved for `spare`, a younger group or of the same version."""
        assert spare.spare > group.spare, f"{spare} has quota already, or {group} has none"
        assert group.version <= spare.version, f"quota never goes to an older version: from {group} to {spare}"
        group.spare, spare.spare = True, False
        self.spare[self.spare.index(spare.number)] = group.number
        self._settle(group.version, group.size)
        self._reserve(spare.version, spare.size)

    def consume(self, group: Group) -> None:
        """A group goes into training."""
        del self.groups[group.number]
        self._settle(group.version, group.size)
        self.consumed += group.size

    def restore(self, groups: Sequence[Group]) -> None:
        """Groups come back from the trainer, to their former positions in the order of admission."""
        for group in groups:
            self.consumed -= group.size
            self._reserve(group.version, group.size)
        merged = {**self.groups, **{group.number: group for group in groups}}
        self.groups = {number: merged[number] for number in sorted(merged)}

    def _reserve(self, version: int, size: int) -> None:
        self.outstanding[version] = self.outstanding.get(version, 0) + size

    def _settle(self, version: int, size: int) -> None:
        self.outstanding[version] -= size
        if not self.outstanding[version]:
            del self.outstanding[version]

    def slack(self) -> Iterator[tuple[int, int]]:
        """Per version with outstanding samples, oldest first: (version, samples that may still pass it)."""
        older = 0
        for version in sorted(self.outstanding):
            older += self.outstanding[version]
            yield version, self.settings.limit(version) - self.consumed - older
