"""The sample buffer: complete groups that wait for the trainer, and the choice of those that form an update.

`order: ticket`: strictly by group number; the update waits for the lowest outstanding one. Reproducible.
`order: arrival`: with `bound: sample` the oldest version first, within the deadlines that `admission` keeps; with
`bound: mean` simply as they came.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from polyrhythm.scheduler.codec import UNSAVED
from polyrhythm.scheduler.samples.admission import Admission
from polyrhythm.scheduler.samples.groups import Group
from polyrhythm.scheduler.settings import SchedulerSettings


@dataclass(slots=True)
class SampleBuffer:
    """ready: version → heap of (order of completion, group number)."""

    settings: SchedulerSettings = field(metadata=UNSAVED)
    ready: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    samples: int = 0
    completed: int = 0

    def add(self, group: Group) -> None:
        """A group is complete (again, if it came back from the trainer: it keeps its order)."""
        if group.completed_order < 0:
            self.completed += 1
            group.completed_order = self.completed
        heapq.heappush(self.ready.setdefault(group.version, []), (group.completed_order, group.number))
        self.samples += group.size

    def remove(self, group: Group) -> None:
        """Take a complete group out, to train or to drop it."""
        heap = self.ready[group.version]
        entry = (group.completed_order, group.number)
        if heap[0] == entry:
            heapq.heappop(heap)
        else:
            heap.remove(entry)
            heapq.heapify(heap)
        if not heap:
            del self.ready[group.version]
        self.samples -= group.size

    def complete_groups(self, version: int) -> int:
        """How many groups of this version wait here."""
        return len(self.ready.get(version, ()))

    def choose(self, admission: Admission, lent: int = 0) -> list[Group] | None:
        """Groups for an update that has `lent` samples, in their order within it, or None while there are too few. With
        `parts` fewer than it lacks will do: those that may go now."""
        wanted = (self.settings.batch_size - lent) // self.settings.group_size
        if self.samples < (self.settings.group_size if self.settings.parts else wanted * self.settings.group_size):
            return None
        if self.settings.order == "ticket":
            return self._by_ticket(admission, wanted)
        if self.settings.bound == "mean":
            entries = heapq.nsmallest(wanted, (entry for heap in self.ready.values() for entry in heap))
            return [admission.groups[number] for _, number in entries]
        return self._by_deadline(admission, wanted)

    def _by_ticket(self, admission: Admission, wanted: int) -> list[Group] | None:
        chosen: list[Group] = []
        for group in admission.groups.values():  # in the order of admission
            if not group.complete:
                return None
            chosen.append(group)
            if len(chosen) == wanted:
                return chosen
        return None

    def _by_deadline(self, admission: Admission, wanted: int) -> list[Group] | None:
        shares: list[tuple[int, int]] = []  # (version, groups of it); counted first, since mostly there are too few
        chosen, allowed = 0, wanted
        size = self.settings.group_size
        for version, slack in admission.slack():
            count = min(len(self.ready.get(version, ())), allowed - chosen)
            shares.append((version, count))
            chosen += count
            if chosen == wanted:
                break
            if count * size < admission.outstanding[version]:  # some of this version are not here yet
                # Groups of this version or older cost it no slack, each younger one costs `size`.
                allowed = min(allowed, chosen + max(0, slack) // size)
                if allowed == chosen:
                    break
        if chosen == wanted or (self.settings.parts and chosen):
            return [admission.groups[number] for share in shares for number in self._first(*share)]
        return None

    def _first(self, version: int, count: int) -> list[int]:
        """Numbers of the groups of `version` that were complete first."""
        return [number for _, number in heapq.nsmallest(count, self.ready.get(version, []))]
