"""Redundant tickets: more groups and members run than an update needs, and the first to finish are trained.

Admission reserves a place for every group that an update will need. `extra_groups` spare groups may run without a
place; `extra_members` tickets of a group may run beside the `group_size` that it needs. Both get rows only while
admission has no ticket to give. When a spare group is complete first, the oldest unfinished group hands its place over
and becomes spare instead; so does a group that is dropped, while there are spare ones.

A place is only ever handed to a group of the same or a younger version. So the total stays, the sum over the versions
up to any s does not grow, and the slack of every version (see `admission`) does not fall: the lag bound and the freedom
from deadlock are those of admission alone.

Invariant, after an event: at most `extra_groups` groups are spare, none of them is complete, and each could still take
the place of an unfinished group that is not younger; a spare group that could not is surplus.

The price is a bias, measured by `SelectionStats`: a redundant sample is surplus when others were faster, so trained
samples tend to be short episodes. The length of a finished sample is known. Of one cancelled in its row only the time
that it had run is known, and that it would have needed longer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from polyrhythm.scheduler.records import Ticket
from polyrhythm.scheduler.samples.admission import Admission
from polyrhythm.scheduler.samples.buffer import SampleBuffer
from polyrhythm.scheduler.samples.groups import Group, Sample, SampleState


def oldest_missing(admission: Admission, buffer: SampleBuffer) -> int | None:
    """The oldest version with a place whose group is incomplete."""
    size = admission.settings.group_size
    missing = (
        version for version, places in admission.outstanding.items() if places > size * buffer.complete_groups(version)
    )
    return min(missing, default=None)


def is_closed(admission: Admission, buffer: SampleBuffer) -> bool:
    if admission.lacking:
        return False
    return len(admission.spare) >= admission.settings.extra_groups or oldest_missing(admission, buffer) is None


def next_ticket(admission: Admission, buffer: SampleBuffer, version: int) -> Ticket | None:
    """A redundant ticket at applied version `version`, or None. An extra member of the oldest group that lacks one, or
    the first member of a new spare group; admission grants the other members."""
    while admission.lacking:
        group = admission.groups.get(admission.lacking[0])
        if group is not None and not group.complete and group.granted < admission.settings.group_tickets:
            return admission.add_member(group, version)
        admission.lacking.popleft()
    if is_closed(admission, buffer):
        return None
    return admission.add_member(admission.open(version, spare=True), version)


def replace_by_spare(admission: Admission, group: Group) -> None:
    """Before a group with a place is dropped: the oldest spare group that is not older takes the place."""
    able = (number for number in admission.spare if admission.groups[number].version >= group.version)
    number = min(able, default=None)
    if number is not None:
        admission.transfer_quota(group, admission.groups[number])


def surplus(admission: Admission, buffer: SampleBuffer) -> list[Group]:
    """The spare groups that can no longer take another group's place."""
    missing = oldest_missing(admission, buffer)
    spare = [admission.groups[number] for number in admission.spare]
    return [group for group in spare if missing is None or missing > group.version]


@dataclass(slots=True)
class Lengths:
    """Sums over samples. seconds: from the last grant of a row to the end, including the generators' time."""

    samples: int = 0
    chunk_steps: int = 0
    env_steps: int = 0
    seconds: float = 0.0

    def add(self, sample: Sample, seconds: float) -> None:
        self.samples += 1
        self.chunk_steps += sample.chunk_steps
        self.env_steps += sample.env_steps
        self.seconds += seconds

    def means(self, *names: str) -> dict[str, float]:
        count = max(1, self.samples)
        return {"samples": self.samples, **{name: getattr(self, name) / count for name in names}}


@dataclass(slots=True)
class SelectionStats:
    """trained: samples of completed updates; released: finished surplus; cancelled: surplus cancelled in rows. waiting:
    surplus samples without a row, of which nothing is known."""

    trained: Lengths = field(default_factory=Lengths)
    released: Lengths = field(default_factory=Lengths)
    cancelled: Lengths = field(default_factory=Lengths)
    waiting: int = 0

    def add_surplus(self, sample: Sample, now: float) -> None:
        if sample.state in (SampleState.BUFFERED, SampleState.SCORING):
            self.released.add(sample, sample.seconds)
        elif sample.state is SampleState.RUNNING:
            self.cancelled.add(sample, now - sample.started)
        else:
            self.waiting += 1

    def as_dict(self) -> dict[str, dict[str, float]]:
        """Means by fate. Compare trained with released by steps (released samples belong to groups that were too slow
        as a whole), and with cancelled by seconds, where those of the cancelled ones are lower bounds."""
        finished = ("chunk_steps", "env_steps", "seconds")
        return {
            "trained": self.trained.means(*finished),
            "released": self.released.means(*finished),
            "cancelled": self.cancelled.means("seconds"),
            "waiting": {"samples": self.waiting},
        }
